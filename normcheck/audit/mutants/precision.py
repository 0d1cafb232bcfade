"""Faults without an id in the catalogue, mostly of precision. The bounds were first tested against these."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import (
    CLEAN,
    HALF,
    LAYERNORMS,
    RELU,
    ZERO_CENTERED,
    Kernel,
    KernelCall,
    chain_in,
    only,
    pack,
    rounded,
    truncated,
)
from normcheck.audit.mutants.mutant import RSTD, STATS, UNWRITTEN, WITHIN_ADDITIONS, Mutant, implementations, mutant

_BF16, _FP16 = torch.bfloat16, torch.float16


def _all_but_last_block(c: KernelCall, t: Tensor) -> Tensor:
    """(M, N) -> (M, 1): the mean over N by a loop that stops a block of 8 too early."""
    return c.sum_n(t[:, : (c.N - 1) // 8 * 8]) / c.N


def _four_partials(c: KernelCall, t: Tensor) -> Tensor:
    """(M, N) -> (N,): the sum over M of four partial sums that are kept in the io dtype."""
    return torch.stack([rounded(c.sum_m(t[first::4]), c.io) for first in range(4)]).sum(0)


def _rounded_twice(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    other = {_FP16: _BF16, _BF16: _FP16}.get(dtype, dtype)
    return t.to(other if name == "y" else dtype).to(dtype)


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="eps-tenth",
        what="eps / 10 is used",
        source="invented",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + c.eps / 10)),
        outputs=RSTD,
    ),
    mutant(
        id="stats-bf16-used",
        what="mean and rstd are rounded to bf16, used and saved so",
        source="amd/IRON#139",
        kernel=Kernel(mean=lambda c: rounded(CLEAN.mean(c), _BF16), rstd=lambda c: rounded(CLEAN.rstd(c), _BF16)),
        outputs=STATS,
    ),
    mutant(
        id="stats-fp16-used",
        what="mean and rstd are rounded to fp16, used and saved so",
        source="invented",
        kernel=Kernel(mean=lambda c: rounded(CLEAN.mean(c), _FP16), rstd=lambda c: rounded(CLEAN.rstd(c), _FP16)),
        outputs=STATS,
    ),
    mutant(
        id="stats-bf16-saved",
        what="mean and rstd are saved rounded to bf16, y uses the exact ones",
        source="pytorch/helion#2273",
        kernel=Kernel(mean_out=lambda c: rounded(c.m, _BF16), rstd_out=lambda c: rounded(c.r, _BF16)),
        outputs=("mean", "rstd", "y", "dx", "dw"),
    ),
    mutant(
        id="dw-accumulated-fp16",
        what="dw and db are accumulated in fp16",
        source="linkedin/Liger-Kernel#950",
        kernel=Kernel(reduce_m=lambda t: chain_in(t, _FP16)),
        outputs=("dw", "db"),
    ),
    mutant(
        id="dw-accumulated-bf16",
        what="dw and db are accumulated in bf16",
        source="linkedin/Liger-Kernel#950",
        kernel=Kernel(reduce_m=lambda t: chain_in(t, _BF16)),
        outputs=("dw", "db"),
    ),
    mutant(
        id="dw-partials-io",
        what="dw and db go through four partial sums stored in the io dtype",
        source="linkedin/Liger-Kernel#950",
        kernel=Kernel(dw=lambda c: _four_partials(c, c.dy * c.xh), db=lambda c: _four_partials(c, c.dy)),
        dtypes=HALF,
        outputs=("dw", "db"),
    ),
    mutant(
        id="stats-last-block-missing",
        what="the last block of up to 8 columns is left out of the statistics",
        source="tile-ai/tilelang-ascend#890",
        kernel=Kernel(
            mean=lambda c: _all_but_last_block(c, c.x), variance=lambda c: _all_but_last_block(c, c.xc * c.xc)
        ),
        outputs=STATS,
    ),
    mutant(
        id="zero-centered-no-one",
        what="gamma is w instead of 1 + w, forward and backward",
        source="linkedin/Liger-Kernel#74",
        kernel=Kernel(gamma=lambda c: c.w, gamma_b=lambda c: c.w),
        ops=ZERO_CENTERED,
        outputs=("y", "dx"),
    ),
    mutant(
        id="zero-centered-one-plus-io",
        what="1 + w is rounded to the io dtype, forward and backward",
        source="linkedin/Liger-Kernel#1462",
        kernel=Kernel(gamma=lambda c: rounded(1 + c.w, c.io), gamma_b=lambda c: rounded(1 + c.w, c.io)),
        ops=ZERO_CENTERED,
        dtypes=HALF,
        outputs=("y", "dx"),
    ),
    mutant(
        id="relu-limits-inclusive",
        what="the bits compare with >= and <= at the limits",
        source="invented",
        kernel=Kernel(mask=lambda c: (c.z >= c.lo) & (c.z <= c.hi)),
        ops=RELU,
        outputs=("bitmask",),
        when="z equals a limit, as with weight 0 and a bias on the limit",
    ),
    mutant(
        id="bitmask-msb-first",
        what="forward packs the bits most significant first",
        source="invented",
        kernel=Kernel(mask_out=lambda c: pack(c.bits, msb_first=True)),
        ops=RELU,
        outputs=("bitmask",),
    ),
    mutant(
        id="dw-tail-rows-missing",
        what="the last M mod 4 rows are missed in dw and db",
        source="BobMcDear/attorch#18",
        kernel=Kernel(reduce_m=lambda t: t[: len(t) // 4 * 4].sum(0)),
        outputs=("dw", "db"),
        when="M is not a multiple of 4",
    ),
    mutant(
        id="y-double-rounding",
        what="y is rounded to fp16 via bf16, to bf16 via fp16",
        source="invented",
        kernel=Kernel(store=_rounded_twice),
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="store-truncated",
        what="every store to a half dtype truncates",
        source="ROCm/aiter#5151",
        kernel=Kernel(store=lambda c, t, dtype, name: truncated(t, dtype)),
        dtypes=HALF,
        outputs=("y", "dx", "dw", "db"),
    ),
    mutant(
        id="dx-c1-n-1",
        what="c1 is divided by N - 1 (by 1 where N is 1)",
        source="invented",
        kernel=Kernel(mean1=lambda c: c.sum_n(c.xh * c.wd) / max(c.N - 1, 1)),
        outputs=("dx",),
        widest=WITHIN_ADDITIONS,
    ),
    mutant(
        id="dx-last-element-missing",
        what="the last column is left out of c1 and c2",
        source="invented",
        kernel=Kernel(
            mean1=lambda c: c.sum_n((c.xh * c.wd)[:, :-1]) / c.N, mean2=lambda c: c.sum_n(c.wd[:, :-1]) / c.N
        ),
        outputs=("dx",),
    ),
    mutant(
        id="bwd-x-not-centered",
        what="backward uses x where it needs x - mean",
        source="invented",
        kernel=Kernel(center_b=lambda c: c.x),
        ops=LAYERNORMS,
        outputs=("dx", "dw"),
        when="mean != 0",
    ),
    mutant(
        id="y-last-column-unwritten",
        what="the last column of y is not written",
        source="karpathy/llm.c#472",
        kernel=Kernel(
            store=lambda c, t, dtype, name: only(t.to(dtype), ..., slice(-1)) if name == "y" else t.to(dtype)
        ),
        outputs=("y",),
        kinds=UNWRITTEN,
    ),
    mutant(
        id="rstd-off-1e-5",
        what="rstd is too large by 1e-5 of itself",
        source="invented",
        kernel=Kernel(rstd=lambda c: CLEAN.rstd(c) * (1 + 1e-5)),
        outputs=RSTD,
    ),
    mutant(
        id="dw-row-0-missing",
        what="row 0 is lost in dw",
        source="invented",
        kernel=Kernel(dw=lambda c: c.sum_m((c.dy * c.xh)[1:])),
        outputs=("dw",),
    ),
    mutant(
        id="dx-c1-accumulated-io",
        what="c1 is accumulated in the io dtype",
        source="invented",
        kernel=Kernel(mean1=lambda c: chain_in((c.xh * c.wd).t(), c.io)[:, None] / c.N),
        dtypes=HALF,
        outputs=("dx",),
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
