# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The tensors of a case by one Triton kernel: the same bits as the plain way in ``inputs.py``, which defines them.

Each line here has its twin in ``rng.py`` and ``data_kinds.py``, operation by operation: fp64 is rounded after each of
them (launch it with ``enable_fp_fusion=False``), then to fp32, then to the stored dtype.

One compilation serves every kind, size, layout and seed of a pair of dtypes. Kinds are told apart by branches that all
threads of a program take alike. A program makes one tile: a piece of one row, or several whole rows if they are narrow.
A value such as "the column" is then (BLOCK,), one for each lane.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from normcheck.cases import rng
from normcheck.cases.data_kinds import DY_KINDS, ROW_KINDS, ROWS, WEIGHT_KINDS
from normcheck.cases.dtypes import FORMATS

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(rng.GOLDEN), tl.constexpr(rng.MIX_1), tl.constexpr(rng.MIX_2)
_OF_STREAM, _NORMAL_SCALE = tl.constexpr(rng.OF_STREAM), tl.constexpr(rng.NORMAL_SCALE)
_X, _DY, _ROW, _WEIGHT, _BIAS = map(tl.constexpr, range(5))  # the streams of inputs.py

_POSITIVE = tl.constexpr(2**63 - 1)
_SIGN = tl.constexpr(-(2**63))
_INF = tl.constexpr(math.inf)
_EVEN = tl.constexpr(1.5 * 2.0**52)
"""Added and subtracted, it rounds an fp64 below 2^51 to an integer, to nearest even."""
_ONE_300TH = tl.constexpr(1 / 300)
_2_33, _2_18, _2_128 = tl.constexpr(2.0**33), tl.constexpr(2.0**-18), tl.constexpr(2.0**-128)
_MAX_FP16, _MAX_BF16, _MAX_FP32 = (tl.constexpr(FORMATS[name].max) for name in ("fp16", "bf16", "fp32"))


def _row(*names: str) -> tl.constexpr:
    """The number of a kind of rows; of several kinds a mask, with the bit of each."""
    numbers = [ROW_KINDS.index(name) for name in names]
    return tl.constexpr(numbers[0] if len(names) == 1 else sum(1 << number for number in numbers))


_KINDS = tl.constexpr(len(ROWS))
_UNIFORM, _SHIFTED, _SCALED, _TAIL, _RAMP = map(_row, ("uniform", "shifted", "scaled", "tail", "ramp"))
_OUTLIER, _INTEGERS, _ALTERNATING, _ZERO = map(_row, ("outlier", "integers", "alternating", "zero"))
_CONSTANT, _TINY_VARIANCE, _SMALL_OFFSET = map(_row, ("constant", "tiny_variance", "small_offset"))
_MEAN100, _OFFSET, _MEAN10000, _MIXED = map(_row, ("mean100", "offset", "mean10000", "mixed"))
_LARGE, _SUBNORMAL, _BLEND, _SIGNED_ZERO = map(_row, ("large", "subnormal", "blend", "signed_zero"))
_LARGEST, _NAN_ROWS, _INF_ROWS = map(_row, ("largest", "nan", "inf"))
_OF_NORMAL = _row("shifted", "small_offset", "mean100", "mean10000", "large", "subnormal")
_OF_UNIFORM = _row("uniform", "integers", "mixed")
_OF_COLUMN = _row("tail", "ramp", "outlier", "alternating", "offset")
_OF_ROW = _row("scaled", "zero", "constant", "tiny_variance")
_WITH_UR = _row("scaled", "outlier", "constant", "tiny_variance", "offset", "nan", "inf")
_IN_ONE_ROW = _row("largest", "nan", "inf")

_DY_SHIFTED, _DY_ONES, _DY_INTEGERS, _DY_CORRELATED, _DY_LAST_ROW, _DY_FIRST_ROW, _DY_SMALL, _DY_NAN, _DY_INF = (
    tl.constexpr(DY_KINDS.index(name))
    for name in ("shifted", "ones", "integers", "correlated", "last_row", "first_row", "small", "nan", "inf")
)
_SMALL_WEIGHTS, _PROBE = (tl.constexpr(WEIGHT_KINDS.index(name)) for name in ("small", "probe"))


@triton.jit
def _start(start, STREAM: tl.constexpr):
    """The start of a stream, modulo 2^63, from that of stream 0."""
    return (start + tl.full((), STREAM, tl.int64) * _OF_STREAM) & _POSITIVE


@triton.jit
def _hash(z):
    """int64, splitmix64 of ``z``, which is a position times the golden constant plus the start of a stream."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _normal(bits):
    low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
    fields = ((low << 16) >> 16) + (low >> 16) + ((high << 16) >> 16) + (high >> 16)
    return (fields + 2).to(tl.float64) * _NORMAL_SCALE


@triton.jit
def _uniform(bits):
    return bits.to(tl.uint32).to(tl.float64) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _copysign(magnitude, sign):
    """fp64. ``tl`` has none, and a -0.0 here differs from a 0.0."""
    bits = (magnitude.to(tl.int64, bitcast=True) & _POSITIVE) | (sign.to(tl.int64, bitcast=True) & _SIGN)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _f64(value: tl.constexpr):
    """``tl.where`` takes a number as fp32."""
    return tl.full((), value, tl.float64)


@triton.jit
def _f64_of(bits):
    """The fp64 of these bits; as an argument of a kernel it would be an fp32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _random_column(ur, N):
    return (ur * N.to(tl.float64)).to(tl.int64)


@triton.jit
def _level(ur):
    """The constant of a row of kind ``constant``."""
    i = (ur * 8.0).to(tl.int32)
    level = tl.where(i == 0, _f64(14.0), _f64(-3.5))
    level = tl.where(i == 2, _f64(1234.0), level)
    level = tl.where(i == 3, _f64(0.1), level)
    level = tl.where(i == 4, _f64(1.0), level)
    level = tl.where(i == 5, _f64(-200.0), level)
    level = tl.where(i == 6, _f64(3e-3), level)
    return tl.where(i == 7, _f64(40003.0), level)


@triton.jit
def _ordinary(n, bits, ur, kind, asked, column, N, step, io: tl.constexpr):
    """x (BLOCK,) in fp64 of the kinds in ``ROWS``; ``asked``: a mask of those that the tile has.

    Four groups, because a branch around a single kind is so short that the compiler computes both sides of it.
    """
    x = n
    if (asked & _OF_NORMAL) != 0:
        x = tl.where(kind == _SHIFTED, n + 8.0, x)
        x = tl.where(kind == _SMALL_OFFSET, n * 0.0009765625 + 0.25, x)
        x = tl.where(kind == _MEAN100, n + 100.0, x)
        x = tl.where(kind == _MEAN10000, n + 10000.0, x)
        x = tl.where(kind == _LARGE, n * (16000.0 if io == tl.float16 else _2_33), x)
        x = tl.where(kind == _SUBNORMAL, n * (_2_18 if io == tl.float16 else _2_128), x)
    if (asked & _OF_UNIFORM) != 0:
        u = _uniform(bits)
        x = tl.where(kind == _UNIFORM, u, x)
        digits = (u * 5.0).to(tl.int32) - 2
        x = tl.where(kind == _INTEGERS, digits.to(tl.float64) * (u > 0.5).to(tl.float64), x)
        x = tl.where(kind == _MIXED, n * _power_of_two((u * 30.0).to(tl.int32) - 20), x)
    if (asked & _OF_COLUMN) != 0:
        random_column = _random_column(ur, N)
        x = tl.where((kind == _TAIL) & (column == N - 1), 10.0 + n, x)
        x = tl.where(kind == _RAMP, column.to(tl.float64) * step - 3.0, x)
        x = tl.where((kind == _OUTLIER) & (column == random_column), 40.0 + n, x)
        x = tl.where(kind == _ALTERNATING, tl.where((column & 1) == 0, 100.0, -100.0), x)
        if io == tl.float32:
            x = tl.where(kind == _OFFSET, n + 4096.0, x)
        else:
            lowest = 2048.0 if io == tl.float16 else 256.0
            width = tl.maximum(N // 128, 2) if io == tl.float16 else 2
            fraction = ur * N.to(tl.float64) - random_column.to(tl.float64)
            level = (fraction * (lowest / 4)).to(tl.int32).to(tl.float64) * 2.0 + lowest
            near = tl.abs(column - random_column) < width
            x = tl.where(kind == _OFFSET, tl.where(near, level + 2.0, level), x)
    if (asked & _OF_ROW) != 0:
        x = tl.where(kind == _SCALED, n * tl.where(ur < 0.5, 8.0, 0.125), x)
        x = tl.where(kind == _ZERO, 0.0, x)
        x = tl.where(kind == _CONSTANT, _level(ur), x)
        x = tl.where(kind == _TINY_VARIANCE, n * _power_of_two((ur * 8.0).to(tl.int32) - 17), x)
    return x


@triton.jit
def _special(n, ur, kind, column, hit, N, io: tl.constexpr):
    """x (BLOCK,) in fp64 of the kinds in ``SPECIAL_ROWS``, ``hit``: the lanes of the row that is not normal."""
    x = n
    if kind == _SIGNED_ZERO:
        x = _copysign(tl.zeros_like(n), n)
    if kind == _LARGEST:
        most = _MAX_FP16 if io == tl.float16 else _MAX_BF16 if io == tl.bfloat16 else _MAX_FP32
        x = tl.where(hit, _copysign(tl.full(n.shape, most, tl.float64), n), n)
    if kind == _NAN_ROWS:
        nan = tl.full(n.shape, 0x7FF8000000000000, tl.int64).to(tl.float64, bitcast=True)
        x = tl.where(hit & ((column == _random_column(ur, N)) | (ur < 0.25)), nan, n)
    if kind == _INF_ROWS:
        x = tl.where(hit & (column == _random_column(ur, N)), _copysign(tl.full(n.shape, _INF, tl.float64), n), n)
    return x


@triton.jit
def _random_of_row(row, start):
    """fp64 in [0, 1), of the shape of ``row``."""
    return _uniform(_hash(row * _GOLDEN + _start(start, _ROW)))


@triton.jit
def _is_hit(row, M, slab, start):
    """Whether a row is the one of its slab that is not normal."""
    first = row // slab * slab
    height = tl.minimum(M - first, slab)
    return row == first + (_random_of_row(first, start) * 4.0 * height.to(tl.float64)).to(tl.int64) % height


@triton.jit
def _one_element(row, M, N, slab, start):
    """The position of the element of dy that is not finite in the slab of ``row``, and a number of its sign."""
    first = row // slab * slab
    height = tl.minimum(M - first, slab)
    n = _normal(_hash(first * N * _GOLDEN + _start(start, _DY)))
    return first * N + (tl.abs(n) * 1e6).to(tl.int64) % (height * N), n


@triton.jit
def _cotangent(n, nx, kind):
    """dy (BLOCK,) in fp64, but for the kinds that are not finite."""
    dy = n
    if kind == _DY_SHIFTED:
        dy = n + 0.5
    if kind == _DY_ONES:
        dy = tl.full(n.shape, 1.0, tl.float64)
    if kind == _DY_INTEGERS:
        scaled = n * 1.25
        dy = _copysign((scaled + _EVEN) - _EVEN, scaled)
    if kind == _DY_CORRELATED:
        dy = (nx + 0.25 * n) + 0.5
    if (kind == _DY_LAST_ROW) | (kind == _DY_FIRST_ROW):
        dy = n + _copysign(tl.full(n.shape, 0.5, tl.float64), n)
    if kind == _DY_SMALL:
        dy = n * 0.000244140625  # 2^-12
    return dy


@triton.jit
def _rounded(value, nan_bits, has_nan, io: tl.constexpr):
    """fp64 in dtype ``io``, by way of fp32; a NaN, which devices convert to different bits, has ``nan_bits``."""
    single = value.to(tl.float32)
    out = single.to(io)
    if has_nan:
        integer: tl.constexpr = tl.int32 if io == tl.float32 else tl.int16
        nan = tl.full(value.shape, 0, integer) + nan_bits.to(integer)
        out = tl.where(single != single, nan.to(io, bitcast=True), out)
    return out


@triton.jit
def _store(ptr, values, lane, below, gap, lanes):
    """Store the first ``lanes`` of a tile from ``ptr`` on; a gap follows each row."""
    if gap == 0:
        tl.store(ptr + lane, values, mask=lane < lanes)
    else:
        tl.store(ptr + lane + below * gap, values, mask=lane < lanes)


@triton.jit
def _rows(
    tile, x_ptr, dy_ptr, M, N, x_stride, dy_stride, dy_elements, slab,
    start, row_kind, dy_kind, only_row, nan_bits, step, BLOCK: tl.constexpr,
):  # fmt: skip
    """x and dy of one tile."""
    io: tl.constexpr = x_ptr.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    narrow = N <= BLOCK // 2
    if narrow:
        rows = BLOCK // N
        row = tile * rows
        at = tl.zeros((), tl.int64)
        height = tl.minimum(M - row, rows)
        lanes = (height * N).to(tl.int32)
        below = lane // N.to(tl.int32)  # rows from the first of the tile
    else:
        pieces = tl.cdiv(N, BLOCK).to(tl.int32)
        piece = tile.to(tl.int32) % pieces
        row = (tile.to(tl.int32) // pieces).to(tl.int64)
        at = piece.to(tl.int64) * BLOCK
        height = tl.full((), 1, tl.int64)
        lanes = tl.minimum(N - at, BLOCK).to(tl.int32)
        below = tl.zeros((BLOCK,), tl.int32)

    position = row * N + at
    ramp = lane.to(tl.int64) * _GOLDEN
    bits = _hash(ramp + (position * _GOLDEN + _start(start, _X)))
    n = _normal(bits)
    x = n
    if row_kind != 0:
        column = (lane - below * N.to(tl.int32)).to(tl.int64) + at
        asked = tl.full((), 1, tl.int64) << row_kind
        kind = tl.zeros((BLOCK,), tl.int32) + row_kind.to(tl.int32)
        if row_kind == _BLEND:
            first = (row % _KINDS).to(tl.int32)
            asked = ((tl.full((), 1, tl.int64) << tl.minimum(height, _KINDS)) - 1) << first
            asked |= asked >> _KINDS
            kind = first + below
            if narrow:
                kind %= _KINDS
        ur = tl.zeros((BLOCK,), tl.float64)
        if (asked & _WITH_UR) != 0:
            if narrow:
                ur = _random_of_row(row + below, start)
            else:
                ur += _random_of_row(row, start)
        if row_kind <= _BLEND:
            x = _ordinary(n, bits, ur, kind, asked, column, N, step, io)
        else:
            hit = tl.zeros((BLOCK,), tl.int1)
            if (asked & _IN_ONE_ROW) != 0:
                if narrow:
                    hit = _is_hit(row + below, M, slab, start)
                else:
                    hit |= _is_hit(row, M, slab, start)
            x = _special(n, ur, row_kind, column, hit, N, io)
    out = _rounded(x, nan_bits, row_kind == _NAN_ROWS, io)
    _store(x_ptr + (row * x_stride + at), out, lane, below, x_stride - N, lanes)

    if position < dy_elements:
        ndy = _normal(_hash(ramp + (position * _GOLDEN + _start(start, _DY))))
        dy = _cotangent(ndy, n, dy_kind)
        if (dy_kind == _DY_NAN) | (dy_kind == _DY_INF):
            place = tl.zeros((BLOCK,), tl.int64)
            sign = tl.zeros((BLOCK,), tl.float64)
            if narrow:
                place, sign = _one_element(row + below, M, N, slab, start)
            else:
                one_place, one_sign = _one_element(row, M, N, slab, start)
                place += one_place
                sign = one_sign + sign
            value = _copysign(tl.full((BLOCK,), _INF, tl.float64), sign)
            if dy_kind == _DY_NAN:
                value -= value
            dy = tl.where(place == position + lane, value, dy)
        if only_row >= 0:
            dy = tl.where(row + below == only_row, dy, 0.0)
        lanes = tl.minimum(dy_elements - position, lanes).to(tl.int32)
        out = _rounded(dy, nan_bits, dy_kind == _DY_NAN, io)
        _store(dy_ptr + (row * dy_stride + at), out, lane, below, dy_stride - N, lanes)


@triton.jit
def _parameters(
    tile, weight_ptr, bias_ptr, N, start, kind, clamped, offset, lower, upper, has_bias, BLOCK: tl.constexpr
):
    """weight and bias of one tile of columns."""
    io: tl.constexpr = weight_ptr.dtype.element_ty
    column = tile * BLOCK + tl.arange(0, BLOCK)
    ramp = column * _GOLDEN
    n = _normal(_hash(ramp + _start(start, _WEIGHT)))
    weight = n
    bias = _normal(_hash(ramp + _start(start, _BIAS)))
    if kind == _SMALL_WEIGHTS:
        weight = n * _ONE_300TH
    if kind == _PROBE:
        which = (column % 9).to(tl.int32)
        weight = tl.where(which == 0, 0.0, weight)
        weight = tl.where(which == 2, -1.0, weight)
        weight = tl.where(which == 4, 0.00390625, weight)  # 2^-8
        weight = tl.where(which == 6, 0.001953125, weight)  # 2^-9
        weight = tl.where(which == 8, 8.0 * n, weight)
        if clamped != 0:
            limit = tl.where((column // 9) % 2 == 0, lower, upper)
            bias = tl.where(weight + offset == 0.0, limit, bias)
    tl.store(weight_ptr + column, weight.to(tl.float32).to(io), mask=column < N)
    tl.store(bias_ptr + column, bias.to(tl.float32).to(io), mask=(column < N) & (has_bias != 0))


INTEGERS = (
    "M", "N", "x_stride", "dy_stride", "dy_elements", "slab", "start", "row_kind", "dy_kind", "only_row", "nan_bits",
    "weight_kind", "clamped", "has_bias", "step", "offset", "lower", "upper",
)  # fmt: skip
"""The numbers that the kernel is given, each as int64; the last four are the bits of an fp64."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=("x_ptr", "dy_ptr", "weight_ptr", "bias_ptr"))
def make(
    x_ptr, dy_ptr, weight_ptr, bias_ptr,
    M: tl.int64, N: tl.int64, x_stride: tl.int64, dy_stride: tl.int64, dy_elements: tl.int64, slab: tl.int64,
    start: tl.int64, row_kind: tl.int64, dy_kind: tl.int64, only_row: tl.int64, nan_bits: tl.int64,
    weight_kind: tl.int64, clamped: tl.int64, has_bias: tl.int64,
    step: tl.int64, offset: tl.int64, lower: tl.int64, upper: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """weight, bias (N,), then x, dy (M, N): the first programs make the former, a tile of ``BLOCK`` columns each.

    ``dy_elements``: how many elements of dy are stored, from the first one on. ``slab``: rows that the plain way makes
    at a time. ``start``: of stream 0. ``only_row``: the one row of dy that is not 0, or -1. ``nan_bits``: of a NaN in
    x and dy. ``step``: 8 / N. ``offset``: the number that is added to the weight. ``lower``, ``upper``: the limits of
    a clamped op.
    """
    # The interpreter has an integer argument in as few bits as hold it.
    M, N, x_stride, dy_stride = M.to(tl.int64), N.to(tl.int64), x_stride.to(tl.int64), dy_stride.to(tl.int64)
    slab, start, dy_elements = slab.to(tl.int64), start.to(tl.int64), dy_elements.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    before = tl.cdiv(N, BLOCK)
    if program < before:
        _parameters(
            program, weight_ptr, bias_ptr, N, start, weight_kind, clamped,
            _f64_of(offset), _f64_of(lower), _f64_of(upper), has_bias, BLOCK,
        )  # fmt: skip
    else:
        _rows(
            program - before, x_ptr, dy_ptr, M, N, x_stride, dy_stride, dy_elements, slab,
            start, row_kind, dy_kind, only_row, nan_bits, _f64_of(step), BLOCK,
        )  # fmt: skip


INTERPRETED = not isinstance(make, triton.JITFunction)
"""Whether Triton's interpreter runs the kernel."""
