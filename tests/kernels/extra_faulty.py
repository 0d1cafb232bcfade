"""More planted faults, those of a catalogue of real kernel bugs that are not among the 36 of ``faulty.py``.

Same form as there; an id is the catalogue's. Left out as the same fault: mF01 variance-masked-lanes,
mF02 stats-divided-by-block, mF03 variance-n-1, mF04 variance-single-pass, mF06 eps-missing, mF07 eps-outside-sqrt,
mF11 eps-twice, mF14 stats-last-element-missing, mF18 rms-variance-centered, mA03 xhat-rounded-io,
mB09 relu-dy-unmasked, mD02 dx-mean-term-missing, mD07 dx-c1-rstd-missing, mD21 dx-rstd-twice. Left out because they
need a residual: mD10, mD11. mB02 is the other way round than in the catalogue: it declares that its bits are those of
the fp32 value before the store, and takes them from the stored one. Of the structural faults there are those that plain
torch can commit: X14, X15, X17, X21, X22, X24.

Tiles are 8 rows. Memory that a fault leaves unwritten reads as zero, so that a run repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

if (_HERE := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.append(_HERE)

from clean_kernel import CLEAN, HALF, LAYERNORMS, OPS, Fault, Kernel, Run, chain_in, pack, rounded, truncated, unpack

_TILE = 8
_GRID = 132
_BF16, _FP16 = torch.bfloat16, torch.float16
_ZERO_CENTERED, _RELU = ("layernorm_zero_centered",), ("layernorm_relu_bitmask",)
_NO_RELU = tuple(op for op in OPS if op not in _RELU)
_STATS = ("mean", "rstd", "y", "bitmask", "dx", "dw")
_RSTD = ("rstd", "y", "bitmask", "dx", "dw")
_Y = ("y", "bitmask")


def _in_io(c: Run, t: Tensor) -> Tensor:
    """The mean over N with every partial sum rounded to the io dtype."""
    return chain_in(t.t(), c.io)[:, None] / c.N


def _first(columns: Callable[[int], int]) -> Kernel:
    """Statistics over the first ``columns(N)`` columns only."""
    return Kernel(
        mean=lambda c: c.sum_n(c.x[:, : columns(c.N)]) / c.N,
        variance=lambda c: c.sum_n((c.xc * c.xc)[:, : columns(c.N)]) / c.N,
    )


def _fp16_squares(c: Run) -> Tensor:
    squares = rounded(rounded(c.xc, _FP16) ** 2, _FP16)
    return chain_in(squares.t(), _FP16)[:, None] / c.N


def _ragged_unwritten(output: str) -> Callable[[Run, dict[str, Tensor]], dict[str, Tensor]]:
    """The rows of a last tile that is not full stay unwritten."""

    def finish(c: Run, out: dict[str, Tensor]) -> dict[str, Tensor]:
        if output in out:
            out[output].view(-1, c.N)[c.M // _TILE * _TILE :] = 0
        return out

    return finish


def _cut_bits(bits_kept: Callable[[int], int]) -> Kernel:
    """A bitmask of which only the first ``bits_kept(N)`` bits of a row are written."""
    return Kernel(mask_out=lambda c: pack(c.bits & (torch.arange(c.N) < bits_kept(c.N))))


def _last_bit_flipped(c: Run) -> Tensor:
    bits = CLEAN.mask(c)
    bits[-1:, -1] ^= True
    return bits


def _by_tile(c: Run, row_means: Tensor) -> Tensor:
    """The sum of a (M, 1) tensor over each tile of rows, in every row of the tile."""
    tile = torch.arange(c.M) // _TILE
    sums = torch.zeros(c.M).index_add_(0, tile, row_means[:, 0])
    return sums[tile][:, None]


def _overwritten_dy(c: Run) -> Tensor:
    # The steps are: dx = -(xhat*c1 + c2); dx += wdy; dx *= rstd. Where dx is dy, the second adds dx to itself.
    dx = -(c.xh * c.c1 + c.c2)
    return (dx + dx) * c.r


def _xhat_from_y(clamp: bool) -> Callable[[Run], Tensor]:
    """Xhat as (y - bias) / gamma from the stored y, with gamma kept eps away from 0 or not."""

    def xhat(c: Run) -> Tensor:
        gain = c.one_plus(c.w)
        if clamp:
            gain = torch.where(gain < 0, gain.clamp(max=-c.eps), gain.clamp(min=c.eps))
        y = c.saved["y"].reshape(-1, c.N).float()
        return (y - (0 if c.b is None else c.b)) / gain

    return xhat


def _tiles_in_io(c: Run, t: Tensor) -> Tensor:
    """(M, N) -> (N,): fp32 inside a tile of rows, the io dtype from tile to tile."""
    total = torch.zeros(c.N)
    for tile in t.split(_TILE):
        total = rounded(total + tile.sum(0), c.io)
    return total


def _rows(choose: Callable[[int], Tensor]) -> Kernel:
    """Dw and db over the rows that ``choose(M)`` names."""
    return Kernel(reduce_m=lambda t: t[choose(len(t))].sum(0))


def _padded(m: int) -> Tensor:
    """The row numbers of whole tiles, so the last of them may lie beyond M."""
    return torch.arange(-(-m // _TILE) * _TILE)


def _tail_columns_unwritten(c: Run, out: dict[str, Tensor]) -> dict[str, Tensor]:
    for name in out.keys() & {"dw", "db"}:
        out[name][c.N // 32 * 32 :] = 0
    return out


def _via_bf16(c: Run, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return (rounded(t, _BF16) if name in ("dw", "db") else t).to(dtype)


def _dx_into_dy(c: Run, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if c.dy_io is not None:
        out["dx"] = c.dy_io.copy_(out["dx"])
    return out


def _in_place(c: Run) -> Tensor:
    # What `x.float().sub_(mean)` does: a copy in the half dtypes, x itself in fp32.
    return c.x_io.view(-1, c.N).sub_(c.m) if c.io == torch.float32 else c.x - c.m


def _bits_as_bf16(c: Run) -> Tensor:
    wrong = c.w_io.dtype == torch.float32 and c.io != torch.float32
    return c.one_plus(c.w_io.contiguous().view(_BF16)[: c.N].float() if wrong else c.w)


_cache: dict[tuple[object, ...], Tensor] = {}
_calls = [0]


def _cached(c: Run, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if "y" in out:
        out["y"] = _cache.setdefault((c.x_io.data_ptr(), tuple(c.x_io.shape), c.io), out["y"]).clone()
    return out


def _wrong_after_ten(c: Run, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if "y" in out:
        _calls[0] += 1
        if _calls[0] > 10:
            out["y"][..., :1] += 1
    return out


def _looks_normal(c: Run) -> Tensor:
    """Rows that seem to be normalised already."""
    return (CLEAN.mean(c).abs() < 0.1) & ((c.x.var(1, unbiased=False, keepdim=True) - 1).abs() < 0.1)


_STATISTICS = (
    Fault(
        id="mF05",
        what="the variance is E[x*x] - mean*mean in fp32, even where that is negative",
        kernel=Kernel(variance=lambda c: c.mean_n(c.x * c.x) - c.m * c.m),
        ops=LAYERNORMS,
        outputs=_RSTD,
        when="|mean| well above sigma",
    ),
    Fault(
        id="mF08",
        what="eps is added to N instead of the variance",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v * c.N / (c.N + c.eps))),
        outputs=_RSTD,
    ),
    Fault(
        id="mF09",
        what="eps is 1e-5 whatever the caller says",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + 1e-5)),
        outputs=_RSTD,
        when="eps is not 1e-5",
    ),
    Fault(
        id="mF10",
        what="eps is rounded to fp16",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + torch.tensor(c.eps, dtype=_FP16).float())),
        outputs=_RSTD,
        when="the variance is not far above eps",
    ),
    Fault(
        id="mF12",
        what="the sums over a row are accumulated in the io dtype",
        kernel=Kernel(mean=lambda c: _in_io(c, c.x), variance=lambda c: _in_io(c, c.xc * c.xc)),
        dtypes=HALF,
        outputs=_STATS,
    ),
    Fault(
        id="mF13",
        what="the squares and their sum are in fp16",
        kernel=Kernel(variance=_fp16_squares),
        outputs=_RSTD,
    ),
    Fault(
        id="mF15",
        what="the last N mod 8 columns are left out of the statistics",
        kernel=_first(lambda n: n // 8 * 8),
        outputs=_STATS,
        when="N is not a multiple of 8",
    ),
    Fault(
        id="mF16",
        what="rstd is saved rounded to the io dtype, y uses the exact one",
        kernel=Kernel(rstd_out=lambda c: rounded(c.r, c.io)),
        dtypes=HALF,
        outputs=("rstd", "y", "dx", "dw"),
    ),
    Fault(
        id="mF17",
        what="mean is saved rounded to the io dtype, y uses the exact one",
        kernel=Kernel(mean_out=lambda c: rounded(c.m, c.io)),
        ops=LAYERNORMS,
        dtypes=HALF,
        outputs=("mean", "y", "dx", "dw"),
    ),
    Fault(
        id="mF19",
        what="LayerNorm does not subtract the mean",
        kernel=Kernel(mean=lambda c: c.zeros),
        ops=LAYERNORMS,
        outputs=_STATS,
    ),
    Fault(
        id="mF20",
        what="the variance is saved in the place of rstd",
        kernel=Kernel(rstd_out=lambda c: c.v),
        outputs=("rstd", "y", "dx", "dw"),
    ),
    Fault(
        id="mF21",
        what="rstd comes from an approximation that is off by 2**-11",
        kernel=Kernel(rstd=lambda c: CLEAN.rstd(c) * (1 + 2**-11)),
        outputs=_RSTD,
    ),
    Fault(
        id="mF22",
        what="v + eps is rounded to the io dtype before the root",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(rounded(c.v + c.eps, c.io))),
        dtypes=HALF,
        outputs=_RSTD,
    ),
    Fault(
        id="mF23",
        what="rstd is rounded to the io dtype, used and saved so",
        kernel=Kernel(rstd=lambda c: rounded(CLEAN.rstd(c), c.io)),
        dtypes=HALF,
        outputs=_RSTD,
    ),
    Fault(
        id="mF24",
        what="a last warp of fewer than 32 lanes, 4 columns each, is dropped from the statistics",
        kernel=_first(lambda n: n // 128 * 128 or n),
        outputs=_STATS,
        when="N > 128 is not a multiple of 128",
    ),
)

_AFFINE = (
    Fault(
        id="mA01",
        what="1 + w is rounded to the io dtype in forward",
        kernel=Kernel(gamma=lambda c: rounded(1 + c.w, c.io)),
        ops=_ZERO_CENTERED,
        dtypes=HALF,
        outputs=("y",),
    ),
    Fault(
        id="mA01b",
        what="1 + w is rounded to the io dtype in backward",
        kernel=Kernel(gamma_b=lambda c: rounded(1 + c.w, c.io)),
        ops=_ZERO_CENTERED,
        dtypes=HALF,
        outputs=("dx",),
    ),
    Fault(
        id="mA02",
        what="gamma is w instead of 1 + w in forward",
        kernel=Kernel(gamma=lambda c: c.w),
        ops=_ZERO_CENTERED,
        outputs=("y",),
    ),
    Fault(
        id="mA04",
        what="the bias is dropped",
        kernel=Kernel(preact=lambda c: c.xh * c.g),
        outputs=_Y,
        when="with a bias",
    ),
    Fault(
        id="mA05",
        what="(xhat + bias) * gamma",
        kernel=Kernel(preact=lambda c: c.plus_b(c.xh) * c.g),
        outputs=_Y,
        when="with a bias",
    ),
    Fault(
        id="mA06",
        what="every column is multiplied by the first gamma",
        kernel=Kernel(gamma=lambda c: c.one_plus(c.w)[:1].expand(c.N)),
        outputs=_Y,
    ),
    Fault(
        id="mA07",
        what="gamma is taken one column to the left",
        kernel=Kernel(gamma=lambda c: c.one_plus(c.w).roll(1)),
        outputs=_Y,
    ),
    Fault(
        id="mA08",
        what="the store of y truncates",
        kernel=Kernel(store=lambda c, t, dtype, name: truncated(t, dtype) if name == "y" else t.to(dtype)),
        dtypes=HALF,
        outputs=("y",),
    ),
    Fault(
        id="mA09",
        what="gamma is applied twice",
        kernel=Kernel(preact=lambda c: c.plus_b(c.xh * c.g * c.g)),
        outputs=_Y,
    ),
    Fault(
        id="mA10",
        what="the bias is taken one column to the left",
        kernel=Kernel(preact=lambda c: c.xh * c.g + (0 if c.b is None else c.b.roll(1))),
        outputs=_Y,
        when="with a bias",
    ),
    Fault(
        id="mR01",
        what="the rows of y in a last tile that is not full are not written",
        kernel=Kernel(finish=_ragged_unwritten("y")),
        outputs=("y",),
        when="M is not a multiple of 8",
    ),
)

_BITS = (
    Fault(
        id="mB01",
        what="the bits compare with >= at the lower limit",
        kernel=Kernel(mask=lambda c: (c.z >= c.lo) & (c.z < c.hi)),
        ops=_RELU,
        outputs=("bitmask",),
        when="z equals the lower limit",
    ),
    Fault(
        id="mB02",
        what="the bits are those of the stored y, not of the fp32 value before the store",
        kernel=Kernel(mask=lambda c: (rounded(c.y, c.io) > c.lo) & (rounded(c.y, c.io) < c.hi)),
        ops=_RELU,
        dtypes=HALF,
        outputs=("bitmask",),
        when="z rounds to a limit; a fault only of a kernel that promises bits of the fp32 value, as it does here",
        model={"bitmask_compare": "fp32"},
    ),
    Fault(
        id="mB03",
        what="the bits compare with <= at the upper limit",
        kernel=Kernel(mask=lambda c: (c.z > c.lo) & (c.z <= c.hi)),
        ops=_RELU,
        outputs=("bitmask",),
        when="z equals the upper limit",
    ),
    Fault(
        id="mB04",
        what="the bits are taken before the bias is added",
        kernel=Kernel(mask=lambda c: (c.xh * c.g > c.lo) & (c.xh * c.g < c.hi)),
        ops=_RELU,
        outputs=("bitmask",),
    ),
    Fault(
        id="mB05",
        what="forward and backward agree on bits that are packed most significant first",
        kernel=Kernel(
            mask_out=lambda c: pack(c.bits, msb_first=True),
            mask_in=lambda c: unpack(c.saved["bitmask"], c.N, msb_first=True),
        ),
        ops=_RELU,
        outputs=("bitmask", "dx", "dw", "db"),
    ),
    Fault(
        id="mB06",
        what="a last 32-bit word that is not full is not written",
        kernel=_cut_bits(lambda n: n // 32 * 32),
        ops=_RELU,
        outputs=("bitmask",),
        when="N is not a multiple of 32",
    ),
    Fault(
        id="mB07",
        what="the last N mod 8 bits are dropped",
        kernel=_cut_bits(lambda n: n // 8 * 8),
        ops=_RELU,
        outputs=("bitmask",),
        when="N is not a multiple of 8",
    ),
    Fault(
        id="mB08",
        what="the lower limit is compared with xhat",
        kernel=Kernel(mask=lambda c: (c.xh > c.lo) & (c.z < c.hi)),
        ops=_RELU,
        outputs=("bitmask",),
    ),
    Fault(
        id="mB10",
        what="the lower limit is compared with x",
        kernel=Kernel(mask=lambda c: (c.x > c.lo) & (c.z < c.hi)),
        ops=_RELU,
        outputs=("bitmask",),
    ),
    Fault(
        id="mB12",
        what="the bits do not look at the upper limit",
        kernel=Kernel(mask=lambda c: c.z > c.lo),
        ops=_RELU,
        outputs=("bitmask",),
        when="z above the upper limit",
    ),
    Fault(
        id="mB13",
        what="the last bit is flipped",
        kernel=Kernel(mask=_last_bit_flipped),
        ops=_RELU,
        outputs=("bitmask",),
    ),
)

_DX = (
    Fault(
        id="mD01",
        what="the xhat * c1 term is missing in dx",
        kernel=Kernel(mean1=lambda c: c.zeros),
        outputs=("dx",),
    ),
    Fault(
        id="mD03",
        what="c1 and c2 are divided by BLOCK, the padded row, instead of N",
        kernel=Kernel(
            mean1=lambda c: c.sum_n(c.xh * c.wd) / c.block,
            mean2=lambda c: c.sum_n(c.wd) / c.block,
        ),
        outputs=("dx",),
        when="N is not a power of two",
    ),
    Fault(
        id="mD04",
        what="c1 is formed without gamma",
        kernel=Kernel(mean1=lambda c: c.mean_n(c.xh * c.dy)),
        outputs=("dx",),
    ),
    Fault(
        id="mD05",
        what="c1 has the wrong sign",
        kernel=Kernel(mean1=lambda c: -CLEAN.mean1(c)),
        outputs=("dx",),
    ),
    Fault(
        id="mD06",
        what="gamma is w instead of 1 + w in backward",
        kernel=Kernel(gamma_b=lambda c: c.w),
        ops=_ZERO_CENTERED,
        outputs=("dx",),
    ),
    Fault(
        id="mD08",
        what="the last factor rstd is missing in dx",
        kernel=Kernel(dx=lambda c: c.wd - (c.xh * c.c1 + c.c2)),
        outputs=("dx",),
    ),
    Fault(
        id="mD12",
        what="dx shares the memory of dy and overwrites it too early",
        kernel=Kernel(dx=_overwritten_dy),
        outputs=("dx",),
    ),
    Fault(
        id="mD13",
        what="the rows of dx in a last tile that is not full are not written",
        kernel=Kernel(finish=_ragged_unwritten("dx")),
        outputs=("dx",),
        when="M is not a multiple of 8",
    ),
    Fault(
        id="mD14",
        what="c1 and c2 are summed over a tile of rows instead of a row",
        kernel=Kernel(mean1=lambda c: _by_tile(c, CLEAN.mean1(c)), mean2=lambda c: _by_tile(c, CLEAN.mean2(c))),
        outputs=("dx",),
        when="M > 1",
    ),
    Fault(
        id="mD15",
        what="c1 is broadcast along the columns: column j gets that of row j mod M",
        kernel=Kernel(mean1=lambda c: CLEAN.mean1(c)[torch.arange(c.N if c.M else 0) % max(c.M, 1)].t()),
        outputs=("dx",),
        when="M > 1",
    ),
    Fault(
        id="mD17",
        what="xhat is rebuilt from y, with gamma kept eps away from 0",
        kernel=Kernel(xhat_b=_xhat_from_y(clamp=True)),
        ops=_NO_RELU,
        outputs=("dx", "dw"),
        when="half dtypes, or |gamma| < eps",
    ),
    Fault(
        id="mD18",
        what="c1 and c2 are accumulated in the io dtype",
        kernel=Kernel(mean1=lambda c: _in_io(c, c.xh * c.wd), mean2=lambda c: _in_io(c, c.wd)),
        dtypes=HALF,
        outputs=("dx",),
    ),
    Fault(
        id="mD19",
        what="xhat is rebuilt from y by a division by gamma",
        kernel=Kernel(xhat_b=_xhat_from_y(clamp=False)),
        ops=_NO_RELU,
        outputs=("dx", "dw"),
        when="half dtypes, or gamma at or near 0",
    ),
    Fault(
        id="mD20",
        what="gamma is missing in wdy",
        kernel=Kernel(wdy=lambda c: c.dy),
        outputs=("dx",),
    ),
)

_DW = (
    Fault(
        id="mW01",
        what="the last M mod 8 rows are missed in dw and db",
        kernel=_rows(lambda m: torch.arange(m // _TILE * _TILE)),
        outputs=("dw", "db"),
        when="M is not a multiple of 8",
    ),
    Fault(
        id="mW03",
        what="one of four partial sums of dw and db is lost",
        kernel=_rows(lambda m: torch.arange(m)[torch.arange(m) % 4 != 1]),
        outputs=("dw", "db"),
        when="M > 1",
    ),
    Fault(
        id="mW04",
        what="dw and db are added up in the io dtype from tile to tile",
        kernel=Kernel(dw=lambda c: _tiles_in_io(c, c.dy * c.xh), db=lambda c: _tiles_in_io(c, c.dy)),
        dtypes=HALF,
        outputs=("dw", "db"),
        when="M > 8, or fp32 weights",
    ),
    Fault(
        id="mW05",
        what="dw is formed without xhat",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy)),
        outputs=("dw",),
    ),
    Fault(
        id="mW06",
        what="dw is formed without subtracting the mean",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy * c.x * c.r)),
        ops=LAYERNORMS,
        outputs=("dw",),
        when="mean != 0",
    ),
    Fault(
        id="mW07",
        what="dw is formed without rstd",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy * c.xc)),
        outputs=("dw",),
    ),
    Fault(
        id="mW09",
        what="dw has an extra factor (1 + w) / w",
        kernel=Kernel(dw=lambda c: CLEAN.dw(c) * (1 + c.w) / c.w),
        ops=_ZERO_CENTERED,
        outputs=("dw",),
    ),
    Fault(
        id="mW10",
        what="dw and db are divided by M",
        kernel=Kernel(reduce_m=lambda t: t.sum(0) / len(t)),
        outputs=("dw", "db"),
        when="M is not 1",
    ),
    Fault(
        id="mW11",
        what="dw and db are added to a buffer that holds ones",
        kernel=Kernel(reduce_m=lambda t: t.sum(0) + 1),
        outputs=("dw", "db"),
    ),
    Fault(
        id="mW12",
        what="the last N mod 32 columns of dw and db are not written",
        kernel=Kernel(finish=_tail_columns_unwritten),
        outputs=("dw", "db"),
        when="N is not a multiple of 32",
    ),
    Fault(
        id="mW13",
        what="in dw and db a last tile that is not full wraps to the first rows",
        kernel=_rows(lambda m: _padded(m) % max(m, 1)),
        outputs=("dw", "db"),
        when="M is not a multiple of 8",
    ),
    Fault(
        id="mW14",
        what="in dw and db a last tile that is not full repeats the last row",
        kernel=_rows(lambda m: _padded(m).clamp(max=m - 1)),
        outputs=("dw", "db"),
        when="M is not a multiple of 8",
    ),
    Fault(
        id="mW15",
        what="dw and db are rounded to bf16 on the way to their dtype",
        kernel=Kernel(store=_via_bf16),
        outputs=("dw", "db"),
        when="the weights are not bf16",
    ),
    Fault(
        id="mW16",
        what="row 0 is skipped in dw and db",
        kernel=Kernel(reduce_m=lambda t: t[1:].sum(0)),
        outputs=("dw", "db"),
    ),
    Fault(
        id="mW17",
        what="dw and db use dy before it is masked",
        kernel=Kernel(
            dw=lambda c: c.sum_m(c.dy_io.reshape(-1, c.N).float() * c.xh),
            db=lambda c: c.sum_m(c.dy_io.reshape(-1, c.N).float()),
        ),
        ops=_RELU,
        outputs=("dw", "db"),
    ),
    Fault(
        id="mW18",
        what="dw and db have a grid of 132 programs of 8 rows and no loop over the rest",
        kernel=Kernel(reduce_m=lambda t: t[: _GRID * _TILE].sum(0)),
        outputs=("dw", "db"),
        when="M > 1056",
    ),
)

_STRUCTURE = (
    Fault(
        id="X14",
        what="dx is written into dy, which is not said anywhere",
        kernel=Kernel(finish=_dx_into_dy),
        outputs=("dx", "dw", "db"),
        when="dy is looked at, or used again",
    ),
    Fault(
        id="X15",
        what="x is centred in place, in fp32 only",
        kernel=Kernel(center=_in_place),
        ops=LAYERNORMS,
        dtypes=("fp32",),
        outputs=("dx", "dw"),
    ),
    Fault(
        id="X17",
        what="the bits of fp32 weights are read as bf16",
        kernel=Kernel(gamma=_bits_as_bf16, gamma_b=_bits_as_bf16),
        dtypes=HALF,
        outputs=("y", "bitmask", "dx"),
        when="fp32 weights under a half x",
    ),
    Fault(
        id="X21",
        what="y is remembered by the address, shape and dtype of x",
        kernel=Kernel(finish=_cached),
        outputs=("y",),
        when="new values in a buffer that was seen before",
    ),
    Fault(
        id="X22",
        what="the first column of y is wrong from the eleventh call of the process on",
        kernel=Kernel(finish=_wrong_after_ten),
        outputs=("y",),
        when="more than ten calls",
    ),
    Fault(
        id="X24",
        what="rows with mean near 0 and variance near 1 are taken for normalised",
        kernel=Kernel(
            center=lambda c: torch.where(_looks_normal(c), c.x, CLEAN.center(c)),
            rstd=lambda c: torch.where(_looks_normal(c), 1, CLEAN.rstd(c)),
        ),
        outputs=_RSTD,
        when="x from a standard normal distribution",
    ),
)

_FAULTS = (*_STATISTICS, *_AFFINE, *_BITS, *_DX, *_DW, *_STRUCTURE)

FAULTS = {fault.id: fault for fault in _FAULTS}
IMPLEMENTATIONS = tuple(fault.implementations[op] for fault in _FAULTS for op in OPS if op in fault.ops)
