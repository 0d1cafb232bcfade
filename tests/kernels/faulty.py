"""The 36 planted faults that the bounds were held against: each the clean kernel but for the steps written out here.

``FAULTS``: fault id -> ``Fault`` (what is wrong, its ops, the dtypes in which it is a fault, the outputs that it may
break, and an ``Implementation`` per op). ``IMPLEMENTATIONS``: all of them, named by the fault's id. Memory that a fault
leaves unwritten reads as zero here, so that a run repeats.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

if (_HERE := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.append(_HERE)

from clean_kernel import CLEAN, HALF, LAYERNORMS, OPS, Fault, Kernel, Run, chain_in, pack, rounded, truncated

_BF16, _FP16 = torch.bfloat16, torch.float16
_ZERO_CENTERED, _RELU = ("layernorm_zero_centered",), ("layernorm_relu_bitmask",)
_STATS = ("mean", "rstd", "y", "bitmask", "dx", "dw")
_RSTD = ("rstd", "y", "bitmask", "dx", "dw")


def _all_but_last_block(c: Run, t: Tensor) -> Tensor:
    """The mean over N by a loop that stops a block of 8 too early."""
    return c.sum_n(t[:, : (c.N - 1) // 8 * 8]) / c.N


def _four_partials(c: Run, t: Tensor) -> Tensor:
    """(M, N) -> (N,) through four partial sums kept in the io dtype."""
    return sum(rounded(c.sum_m(t[first::4]), c.io) for first in range(4))


def _last_column_unwritten(c: Run, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if "y" in out:
        out["y"][..., -1] = 0
    return out


def _rounded_twice(c: Run, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    other = {_FP16: _BF16, _BF16: _FP16}.get(dtype, dtype)
    return t.to(other if name == "y" else dtype).to(dtype)


_FAULTS = (
    Fault(
        id="variance-n-1",
        what="the variance is divided by N - 1 (by 1 where N is 1, so that no NaN gives it away)",
        kernel=Kernel(variance=lambda c: c.sum_n(c.xc * c.xc) / max(c.N - 1, 1)),
        ops=LAYERNORMS,
        outputs=_RSTD,
    ),
    Fault(
        id="eps-outside-sqrt",
        what="1 / (sqrt(v) + eps)",
        kernel=Kernel(rstd=lambda c: 1 / (torch.sqrt(c.v) + c.eps)),
        outputs=_RSTD,
    ),
    Fault(
        id="eps-missing",
        what="1 / sqrt(v), without eps",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v)),
        outputs=_RSTD,
    ),
    Fault(
        id="eps-twice",
        what="eps is added twice",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + c.eps + c.eps)),
        outputs=_RSTD,
    ),
    Fault(
        id="eps-tenth",
        what="eps / 10 is used",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + c.eps / 10)),
        outputs=_RSTD,
    ),
    Fault(
        id="variance-single-pass",
        what="the variance is E[x*x] - mean*mean in fp32, negative values raised to 0",
        kernel=Kernel(variance=lambda c: (c.mean_n(c.x * c.x) - c.m * c.m).clamp(min=0)),
        ops=LAYERNORMS,
        outputs=_RSTD,
        when="|mean| well above sigma",
    ),
    Fault(
        id="stats-bf16-used",
        what="mean and rstd are rounded to bf16, used and saved so",
        kernel=Kernel(mean=lambda c: rounded(CLEAN.mean(c), _BF16), rstd=lambda c: rounded(CLEAN.rstd(c), _BF16)),
        outputs=_STATS,
    ),
    Fault(
        id="stats-fp16-used",
        what="mean and rstd are rounded to fp16, used and saved so",
        kernel=Kernel(mean=lambda c: rounded(CLEAN.mean(c), _FP16), rstd=lambda c: rounded(CLEAN.rstd(c), _FP16)),
        outputs=_STATS,
    ),
    Fault(
        id="stats-bf16-saved",
        what="mean and rstd are saved rounded to bf16, y uses the exact ones",
        kernel=Kernel(mean_out=lambda c: rounded(c.m, _BF16), rstd_out=lambda c: rounded(c.r, _BF16)),
        outputs=("mean", "rstd", "y", "dx", "dw"),
    ),
    Fault(
        id="dw-accumulated-fp16",
        what="dw and db are accumulated in fp16",
        kernel=Kernel(reduce_m=lambda t: chain_in(t, _FP16)),
        outputs=("dw", "db"),
    ),
    Fault(
        id="dw-accumulated-bf16",
        what="dw and db are accumulated in bf16",
        kernel=Kernel(reduce_m=lambda t: chain_in(t, _BF16)),
        outputs=("dw", "db"),
    ),
    Fault(
        id="dw-partials-io",
        what="dw and db go through four partial sums stored in the io dtype",
        kernel=Kernel(dw=lambda c: _four_partials(c, c.dy * c.xh), db=lambda c: _four_partials(c, c.dy)),
        dtypes=HALF,
        outputs=("dw", "db"),
    ),
    Fault(
        id="stats-last-block-missing",
        what="the last block of up to 8 columns is left out of the statistics",
        kernel=Kernel(
            mean=lambda c: _all_but_last_block(c, c.x), variance=lambda c: _all_but_last_block(c, c.xc * c.xc)
        ),
        outputs=_STATS,
    ),
    Fault(
        id="stats-last-element-missing",
        what="the last column is left out of the statistics",
        kernel=Kernel(
            mean=lambda c: c.sum_n(c.x[:, :-1]) / c.N, variance=lambda c: c.sum_n((c.xc * c.xc)[:, :-1]) / c.N
        ),
        outputs=_STATS,
    ),
    Fault(
        id="stats-divided-by-block",
        what="the sums of the statistics are divided by BLOCK, the padded row, instead of N",
        kernel=Kernel(mean=lambda c: c.sum_n(c.x) / c.block, variance=lambda c: c.sum_n(c.xc * c.xc) / c.block),
        outputs=_STATS,
        when="N is not a power of two",
    ),
    Fault(
        id="variance-masked-lanes",
        what="each masked lane of the padded row adds (0 - mean)**2 to the variance",
        kernel=Kernel(variance=lambda c: (c.sum_n(c.xc * c.xc) + (c.block - c.N) * c.m * c.m) / c.N),
        ops=LAYERNORMS,
        outputs=_RSTD,
        when="N is not a power of two and mean != 0",
    ),
    Fault(
        id="zero-centered-no-one",
        what="gamma is w instead of 1 + w, forward and backward",
        kernel=Kernel(gamma=lambda c: c.w, gamma_b=lambda c: c.w),
        ops=_ZERO_CENTERED,
        outputs=("y", "dx"),
    ),
    Fault(
        id="zero-centered-one-plus-io",
        what="1 + w is rounded to the io dtype, forward and backward",
        kernel=Kernel(gamma=lambda c: rounded(1 + c.w, c.io), gamma_b=lambda c: rounded(1 + c.w, c.io)),
        ops=_ZERO_CENTERED,
        dtypes=HALF,
        outputs=("y", "dx"),
    ),
    Fault(
        id="dx-mean-term-missing",
        what="mean(wdy) is missing in dx",
        kernel=Kernel(mean2=lambda c: c.zeros),
        ops=LAYERNORMS,
        outputs=("dx",),
    ),
    Fault(
        id="dx-c1-rstd-missing",
        what="one power of rstd is missing in xhat * c1",
        kernel=Kernel(dx=lambda c: (c.wd - (c.xc * c.c1 + c.c2)) * c.r),
        outputs=("dx",),
    ),
    Fault(
        id="dx-rstd-twice",
        what="one rstd too many in dx",
        kernel=Kernel(dx=lambda c: CLEAN.dx(c) * c.r),
        outputs=("dx",),
    ),
    Fault(
        id="relu-dy-unmasked",
        what="dy is not masked by the bits",
        kernel=Kernel(masked=lambda c: c.dy),
        ops=_RELU,
        outputs=("dx", "dw", "db"),
    ),
    Fault(
        id="relu-limits-inclusive",
        what="the bits compare with >= and <= at the limits",
        kernel=Kernel(mask=lambda c: (c.z >= c.lo) & (c.z <= c.hi)),
        ops=_RELU,
        outputs=("bitmask",),
        when="z equals a limit, as with weight 0 and a bias on the limit",
    ),
    Fault(
        id="bitmask-msb-first",
        what="forward packs the bits most significant first",
        kernel=Kernel(mask_out=lambda c: pack(c.bits, msb_first=True)),
        ops=_RELU,
        outputs=("bitmask",),
    ),
    Fault(
        id="dw-tail-rows-missing",
        what="the last M mod 4 rows are missed in dw and db",
        kernel=Kernel(reduce_m=lambda t: t[: len(t) // 4 * 4].sum(0)),
        outputs=("dw", "db"),
        when="M is not a multiple of 4",
    ),
    Fault(
        id="y-double-rounding",
        what="y is rounded to fp16 via bf16, to bf16 via fp16",
        kernel=Kernel(store=_rounded_twice),
        dtypes=HALF,
        outputs=("y",),
    ),
    Fault(
        id="xhat-rounded-io",
        what="xhat is rounded to the io dtype before it is multiplied by gamma",
        kernel=Kernel(xhat=lambda c: rounded(c.xc * c.r, c.io)),
        dtypes=HALF,
        outputs=("y", "bitmask"),
    ),
    Fault(
        id="store-truncated",
        what="every store to a half dtype truncates",
        kernel=Kernel(store=lambda c, t, dtype, name: truncated(t, dtype)),
        dtypes=HALF,
        outputs=("y", "dx", "dw", "db"),
    ),
    Fault(
        id="dx-c1-n-1",
        what="c1 is divided by N - 1 (by 1 where N is 1)",
        kernel=Kernel(mean1=lambda c: c.sum_n(c.xh * c.wd) / max(c.N - 1, 1)),
        outputs=("dx",),
    ),
    Fault(
        id="dx-last-element-missing",
        what="the last column is left out of c1 and c2",
        kernel=Kernel(
            mean1=lambda c: c.sum_n((c.xh * c.wd)[:, :-1]) / c.N, mean2=lambda c: c.sum_n(c.wd[:, :-1]) / c.N
        ),
        outputs=("dx",),
    ),
    Fault(
        id="bwd-x-not-centered",
        what="backward uses x where it needs x - mean",
        kernel=Kernel(center_b=lambda c: c.x),
        ops=LAYERNORMS,
        outputs=("dx", "dw"),
        when="mean != 0",
    ),
    Fault(
        id="rms-variance-centered",
        what="RMSNorm subtracts the mean in its mean square",
        kernel=Kernel(variance=lambda c: c.mean_n((c.x - c.mean_n(c.x)) ** 2)),
        ops=("rmsnorm",),
        outputs=_RSTD,
        when="mean != 0",
    ),
    Fault(
        id="y-last-column-unwritten",
        what="the last column of y is not written",
        kernel=Kernel(finish=_last_column_unwritten),
        outputs=("y",),
    ),
    Fault(
        id="rstd-off-1e-5",
        what="rstd is too large by 1e-5 of itself",
        kernel=Kernel(rstd=lambda c: CLEAN.rstd(c) * (1 + 1e-5)),
        outputs=_RSTD,
    ),
    Fault(
        id="dw-row-0-missing",
        what="row 0 is lost in dw",
        kernel=Kernel(dw=lambda c: c.sum_m((c.dy * c.xh)[1:])),
        outputs=("dw",),
    ),
    Fault(
        id="dx-c1-accumulated-io",
        what="c1 is accumulated in the io dtype",
        kernel=Kernel(mean1=lambda c: chain_in((c.xh * c.wd).t(), c.io)[:, None] / c.N),
        dtypes=HALF,
        outputs=("dx",),
    ),
)

FAULTS = {fault.id: fault for fault in _FAULTS}
IMPLEMENTATIONS = tuple(fault.implementations[op] for fault in _FAULTS for op in OPS if op in fault.ops)
