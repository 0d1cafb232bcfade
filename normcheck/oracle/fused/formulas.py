# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What the judge's kernels share: the numbers of a case, magnitudes and stores in fp64, the forward's expected value.

Each formula is that of the plain judge (``forward_bounds``, ``casting``, ``rounding``), term by term, in fp64: the
results differ by roundings in fp64 alone, as sums have another order. tests/oracle/test_fused.py holds them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normcheck.oracle.fused import layout
from normcheck.oracle.fused.layout import NUMBERS

U = tl.constexpr(NUMBERS.index("u"))
ETA = tl.constexpr(NUMBERS.index("eta"))
EPS = tl.constexpr(NUMBERS.index("eps"))
GAM_MEAN = tl.constexpr(NUMBERS.index("gam_mean"))
MEAN_ETA = tl.constexpr(NUMBERS.index("mean_eta"))
GAM_VAR = tl.constexpr(NUMBERS.index("gam_var"))
C_VAR = tl.constexpr(NUMBERS.index("c_var"))
RS = tl.constexpr(NUMBERS.index("rs"))
LIMIT = tl.constexpr(NUMBERS.index("limit"))
K_Y = tl.constexpr(NUMBERS.index("k_y"))
AL_SAVED = tl.constexpr(NUMBERS.index("al_saved"))
AL_LANES = tl.constexpr(NUMBERS.index("al_lanes"))
LOWER_CLIP = tl.constexpr(NUMBERS.index("lower_clip"))
UPPER_CLIP = tl.constexpr(NUMBERS.index("upper_clip"))
Y_LEAST = tl.constexpr(NUMBERS.index("y_least"))
Y_HALF = tl.constexpr(NUMBERS.index("y_half"))
PER_XHAT = tl.constexpr(NUMBERS.index("per_xhat"))
IO_LEAST = tl.constexpr(NUMBERS.index("io_least"))
IO_HALF = tl.constexpr(NUMBERS.index("io_half"))
GAM_C1 = tl.constexpr(NUMBERS.index("gam_c1"))
GAM_C2 = tl.constexpr(NUMBERS.index("gam_c2"))
K_DX = tl.constexpr(NUMBERS.index("k_dx"))
GAM_RAW = tl.constexpr(NUMBERS.index("gam_raw"))
GROW = tl.constexpr(NUMBERS.index("grow"))
MEAN_XH = tl.constexpr(NUMBERS.index("mean_xh"))
DX_HALF = tl.constexpr(NUMBERS.index("dx_half"))
DW_IO_HALF = tl.constexpr(NUMBERS.index("dw_io_half"))
W_LEAST = tl.constexpr(NUMBERS.index("w_least"))
DW_HALF = tl.constexpr(NUMBERS.index("dw_half"))
DB_HALF = tl.constexpr(NUMBERS.index("db_half"))
GAM_DW = tl.constexpr(NUMBERS.index("gam_dw"))
GAM_DB = tl.constexpr(NUMBERS.index("gam_db"))
ROWS_ETA = tl.constexpr(NUMBERS.index("rows_eta"))
LEAST_32 = tl.constexpr(NUMBERS.index("least_32"))
ALONE = tl.constexpr(NUMBERS.index("alone"))

FIELDS = tl.constexpr(layout.FIELDS)
ZEROS = tl.constexpr(layout.ZEROS)

_TWICE_BIAS = tl.constexpr(2046 << 52)


@triton.jit
def number(numbers_ptr, index: tl.constexpr):
    """One of ``NUMBERS``."""
    return tl.load(numbers_ptr + index)


@triton.jit
def columns_of(inside, cols, N, FULL: tl.constexpr):
    """The mask (R, B) of the elements of a tile that the case has; FULL: all of them."""
    if FULL:
        return tl.full((inside.shape[0], cols.shape[0]), 1, tl.int1)
    return inside[:, None] & (cols < N)[None, :]


@triton.jit
def wide(ptr, mask):
    """Values of any dtype as fp64, exactly, 0 if masked."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def factors(weight_ptr, weight_offset: tl.constexpr, cols, N):
    """The factors of xhat (1, B), see ``reference.scale``."""
    return (wide(weight_ptr + cols, cols < N) + weight_offset)[None, :]


@triton.jit
def larger(a, b):
    """max(a, b) of numbers; tl.maximum takes three times as long, to quiet a NaN."""
    return tl.where(a > b, a, b)


@triton.jit
def power(a, least):
    """2^floor(log2(|a|)), at least ``least``, a power of two. Both are in the upper halves of their bits."""
    upper = (a.to(tl.int64, bitcast=True) >> 32).to(tl.int32) & 0x7FF00000
    upper = tl.maximum(upper, (least.to(tl.int64, bitcast=True) >> 32).to(tl.int32))
    return (upper.to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def one_over(power_of_two):
    """1 / p of a normal power of two, exactly."""
    return (-power_of_two.to(tl.int64, bitcast=True) + _TWICE_BIAS).to(tl.float64, bitcast=True)


@triton.jit
def store(a, least, half, FLUSH: tl.constexpr):
    """The error of one store at magnitude a >= 0, see ``rounding.store``."""
    error = power(a, least) * half
    if FLUSH:
        error += tl.where(a < 2.0**-125, 2.0**-126, 0.0)
    return error


@triton.jit
def to_io(a, least, half):
    """``a`` rounded to the nearest number of a format, ties to even, see ``casting.rounded``."""
    anchor = power(a, least) * (half * (3.0 * 2.0**52))  # fp64 with this exponent has the format's spacing
    return (a + anchor) - anchor


@triton.jit
def off_before_cast(al, r, numbers_ptr):
    """How far xhat is off before its rounding, by |xhat| and beside it, for each row."""
    return (1 + al) * number(numbers_ptr, PER_XHAT) - 1, number(numbers_ptr, ETA) * (1 + r * (1 + al))


@triton.jit
def cast_xhat(xh, per_xh, per_row, io_least, io_half):
    """The rounded xhat: the reference's, and the least and the largest of a correct kernel, see ``casting.cast``."""
    e = tl.abs(xh) * per_xh + per_row
    return to_io(xh, io_least, io_half), to_io(xh - e, io_least, io_half), to_io(xh + e, io_least, io_half)


@triton.jit
def cast_size(xh, per_xh, per_row, io_least, io_half):
    """The rounded xhat of the reference, how far a correct kernel's may be from that, and its largest size.

    Rounding is the same on both sides of 0: so the ends of |xhat| say both with fewer operations than those of xhat.
    """
    e = tl.abs(xh) * per_xh + per_row
    value = to_io(xh, io_least, io_half)
    low, high = to_io(tl.abs(xh) - e, io_least, io_half), to_io(tl.abs(xh) + e, io_least, io_half)
    return value, larger(high - tl.abs(value), tl.abs(value) - low), high


@triton.jit
def largest(values):
    """The largest element of a tile, NaN counted as infinite."""
    return tl.max(tl.max(tl.where(values == values, values, float("inf")), axis=1), axis=0)


@triton.jit
def any_of(conditions):
    """Whether any element of a tile of booleans is true."""
    return tl.max(tl.max(conditions.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def so_far(found_ptr, check: tl.constexpr):
    """The largest ratio that any program has noted of a check by now."""
    return tl.load(found_ptr + check * FIELDS, volatile=True).to(tl.float64, bitcast=True)


@triton.jit
def above(best, size, bound, mask):
    """Booleans: the elements whose ratio size / bound is above ``best``, or NaN.

    It divides nothing: a division in fp64 costs as much as all else in a check, and few tiles hold a record.
    """
    return mask & ~(size <= bound * best)


@triton.jit
def best_of(best, size, bound, mask):
    """``best``, or the largest ratio of a tile if that is larger."""
    return tl.maximum(best, largest(tl.where(mask, size / bound, 0.0)))


@triton.jit
def note_details(found_ptr, check: tl.constexpr, size, in_powers):
    """Keep the largest error of tiles, and the largest in powers of two."""
    note(found_ptr, check, 1, largest(size))
    note(found_ptr, check, 2, largest(in_powers))


@triton.jit
def details_of(size, powers, error, expected, least, mask):
    """``size`` and ``powers`` (R, B), or the |error| and the error in powers of two where these are larger."""
    size = larger(size, tl.where(mask, error, 0.0))
    return size, larger(powers, tl.where(mask, error * one_over(power(expected, least)), 0.0))


@triton.jit
def note(found_ptr, check: tl.constexpr, field: tl.constexpr, value):
    """Keep the largest ``value``, a number in fp64 >= 0, of a field of a check."""
    tl.atomic_max(found_ptr + (check * FIELDS + field), value.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def count(found_ptr, at: tl.constexpr, values):
    """Add up a tile of counts."""
    tl.atomic_add(found_ptr + at, tl.sum(tl.sum(values, axis=1), axis=0).to(tl.int64), sem="relaxed")
