# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The gradients' kernels: dx row by row, the sums behind dw and db in groups of rows, and their checks.

dx needs two sums over its row, then a pass over the row for the check, which reads it again if it does not fit one
tile. dw and db are summed in a fixed order, so every run finds the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normcheck.oracle.fused import layout
from normcheck.oracle.fused.formulas import (
    ALONE,
    DB_HALF,
    DW_HALF,
    DW_IO_HALF,
    DX_HALF,
    ETA,
    FIELDS,
    GAM_C1,
    GAM_C2,
    GAM_DB,
    GAM_DW,
    GAM_RAW,
    GROW,
    IO_HALF,
    IO_LEAST,
    K_DX,
    MEAN_XH,
    ROWS_ETA,
    W_LEAST,
    ZEROS,
    U,
    above,
    any_of,
    best_of,
    cast_size,
    columns_of,
    count,
    details_of,
    factors,
    larger,
    largest,
    note,
    note_details,
    number,
    off_before_cast,
    one_over,
    power,
    so_far,
    store,
    wide,
)

DX_CHECK = tl.constexpr(layout.DX_CHECK)
DW_CHECK = tl.constexpr(layout.DW_CHECK)
DB_CHECK = tl.constexpr(layout.DB_CHECK)
DW = tl.constexpr(layout.DW)
DB = tl.constexpr(layout.DB)
DY_XHAT = tl.constexpr(layout.DY_XHAT)
DY_SIZE = tl.constexpr(layout.DY_SIZE)
DY_SHIFT = tl.constexpr(layout.DY_SHIFT)
DW_DOUBT = tl.constexpr(layout.DW_DOUBT)
DB_DOUBT = tl.constexpr(layout.DB_DOUBT)
WHOLE_SUMS = tl.constexpr(layout.WHOLE_SUMS)
BOTH_SUMS = tl.constexpr(layout.BOTH_SUMS)


@triton.jit
def load_dy(dy_ptr, bits_ptr, doubt_ptr, rows, cols, dy_stride, N, mask, dy_column):
    """dy as the backward takes it, 0 if its bit is, and its size where the bit is in doubt; (R, B) in fp64."""
    dy = wide(dy_ptr + rows[:, None] * dy_stride + (cols * dy_column)[None, :], mask)
    doubt = dy
    place = rows[:, None] * N + cols[None, :]
    if doubt_ptr is not None:
        doubt = tl.where(tl.load(doubt_ptr + place, mask=mask, other=0) != 0, tl.abs(dy), 0.0)
    if bits_ptr is not None:
        dy = tl.where(tl.load(bits_ptr + place, mask=mask, other=0) != 0, dy, 0.0)
    return dy, doubt


@triton.jit
def load_row(rows_ptr, rows, inside, M, GIVEN: tl.constexpr):
    """mean, rstd, al and d (R,) of the statistics that a kernel computes with; al is 0 if they are GIVEN."""
    m = tl.full((), M, tl.int64)
    mean = tl.load(rows_ptr + rows, mask=inside, other=0.0)
    r = tl.load(rows_ptr + m + rows, mask=inside, other=0.0)
    d = tl.load(rows_ptr + 3 * m + rows, mask=inside, other=0.0)
    if GIVEN:
        return mean, r, tl.zeros_like(mean), d
    return mean, r, tl.load(rows_ptr + 2 * m + rows, mask=inside, other=0.0), d


@triton.jit
def moved(wd, doubt, g, u, eta, least, half, IO_ROUNDED: tl.constexpr, FLUSH: tl.constexpr):
    """How far each dy * g may be moved by a bit in doubt, or by a rounding to the io dtype, in units of
    ``moved_unit``; (R, B).
    """
    if IO_ROUNDED:
        size = tl.abs(wd) * (1 + u) + eta
        powers = power(size, least)
        if FLUSH:
            powers += tl.where(size < 2.0**-125, 2.0**-126 / half, 0.0)
        return powers
    return doubt * tl.abs(g)


@triton.jit
def moved_unit(grow, half, IO_ROUNDED: tl.constexpr):
    """What the results of ``moved`` and their sums are multiples of, so that no element is multiplied by it."""
    if IO_ROUNDED:
        return half * grow
    return grow


@triton.jit
def xhat_at_most(xh, al, d):
    """The bound of a kernel's own |xhat|, (R, B)."""
    return tl.abs(xh) * (1 + al)[:, None] + (d * (1 + al))[:, None]


@triton.jit
def row_tile(
    x_ptr, dy_ptr, weight_ptr, bits_ptr, doubt_ptr, mean, r, rows, start, inside, N, x_stride, dy_stride,
    u, eta, least, half, dy_column, weight_offset: tl.constexpr, IO_ROUNDED: tl.constexpr,
    FLUSH: tl.constexpr, FULL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """x, xhat, dy * g and how far that may be moved, see ``moved``; (R, B), the last two are 0 if masked."""
    cols = start + tl.arange(0, B)
    mask = columns_of(inside, cols, N, FULL)
    x = wide(x_ptr + rows[:, None] * x_stride + cols[None, :], mask)
    g = factors(weight_ptr, weight_offset, cols, N)
    dy, doubt = load_dy(dy_ptr, bits_ptr, doubt_ptr, rows, cols, dy_stride, N, mask, dy_column)
    xh = (x - mean[:, None]) * r[:, None]
    wd = dy * g
    off = wd
    if IO_ROUNDED or doubt_ptr is not None:
        off = tl.where(mask, moved(wd, doubt, g, u, eta, least, half, IO_ROUNDED, FLUSH), 0.0)
    elif weight_offset != 0:  # dy may be added to its product with the weight
        off = tl.where(mask & (g != 0), tl.abs(dy) * tl.abs(g - weight_offset), 0.0)
    return x, xh, wd, off


@triton.jit
def dx_kernel(
    found_ptr, x_ptr, dy_ptr, dx_ptr, weight_ptr, bits_ptr, doubt_ptr, rows_ptr, numbers_ptr,
    M, N, x_stride, dy_stride, dy_column, dx_stride,
    weight_offset: tl.constexpr, GIVEN: tl.constexpr, CENTERED: tl.constexpr, RAW: tl.constexpr,
    IO_ROUNDED: tl.constexpr,
    STORED: tl.constexpr, FLUSH: tl.constexpr, DETAILS: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Judge dx (M, N), GIVEN the reference's statistics or end to end.

    ``rows``: (4, M) in fp64, see ``forward_kernel``. RAW: the backward may compute from raw moments. IO_ROUNDED: an op
    that rounds xhat, whose products may be rounded as well. STORED, FLUSH: dx is rounded, and may be flushed, at its
    store. DETAILS: the largest errors are found, and the elements that a 0 would pass are counted. WHOLE: a tile holds
    whole rows. FULL: no tile is larger than its rows. STAGES: so many tiles are read at once.
    """
    u, eta = number(numbers_ptr, U), number(numbers_ptr, ETA)
    least, half, k_dx = number(numbers_ptr, IO_LEAST), number(numbers_ptr, DX_HALF), number(numbers_ptr, K_DX)
    unit = moved_unit(number(numbers_ptr, GROW), half, IO_ROUNDED)
    if weight_offset != 0:
        unit *= number(numbers_ptr, ALONE)
    per_n = 1 / tl.full((R,), N, tl.float64)  # a product costs little, a division in fp64 as much as 20 of them
    best = so_far(found_ptr, DX_CHECK)
    size = tl.zeros((R, B), tl.float64)
    in_powers = tl.zeros((R, B), tl.float64)
    zeros = tl.zeros((R, B), tl.int32)
    DOUBT: tl.constexpr = IO_ROUNDED or doubt_ptr is not None or weight_offset != 0
    for tile in range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0)):
        rows = tl.full((), tile, tl.int64) * R + tl.arange(0, R)
        inside = rows < M
        mean, r, al, d = load_row(rows_ptr, rows, inside, M, GIVEN)
        c1 = tl.zeros((R, B), tl.float64)
        c2 = tl.zeros((R, B), tl.float64)
        c1_size = tl.zeros((R, B), tl.float64)
        wd_size = tl.zeros((R, B), tl.float64)
        raw_size = tl.zeros((R, B), tl.float64)
        c1_moved = tl.zeros((R, B), tl.float64)
        c2_moved = tl.zeros((R, B), tl.float64)
        if WHOLE:
            whole_x, whole_xh, whole_wd, whole_off = row_tile(
                x_ptr, dy_ptr, weight_ptr, bits_ptr, doubt_ptr, mean, r, rows, 0, inside, N, x_stride, dy_stride,
                u, eta, least, half, dy_column, weight_offset, IO_ROUNDED, FLUSH, FULL, B,
            )  # fmt: skip
            c1, c2 = whole_xh * whole_wd, whole_wd
            c1_size, wd_size = tl.abs(c1), tl.abs(whole_wd)
            if RAW:
                raw_size = tl.abs(whole_wd * whole_x)
            if DOUBT:
                c1_moved, c2_moved = tl.abs(whole_xh) * whole_off, whole_off
        else:
            for start in tl.range(0, N, B, num_stages=STAGES):
                x, xh, wd, off = row_tile(
                    x_ptr, dy_ptr, weight_ptr, bits_ptr, doubt_ptr, mean, r, rows, start, inside, N, x_stride,
                    dy_stride, u, eta, least, half, dy_column, weight_offset, IO_ROUNDED, FLUSH, FULL, B,
                )  # fmt: skip
                product = xh * wd
                c1 += product
                if CENTERED:
                    c2 += wd
                c1_size += tl.abs(product)
                wd_size += tl.abs(wd)
                if RAW:
                    raw_size += tl.abs(wd * x)
                if DOUBT:
                    c1_moved += tl.abs(xh) * off
                    c2_moved += off
        c1_mean = tl.sum(c1, axis=1) * per_n
        c2_mean = tl.sum(c2, axis=1) * per_n
        if not CENTERED:
            c2_mean = tl.zeros_like(r)
        wd_mean = tl.sum(wd_size, axis=1) * per_n
        k2 = (1 + al) * (1 + al)
        ra = (1 + al) * r
        flushed = eta * (1 + ra)
        c1_abs, c2_abs = tl.abs(c1_mean), tl.abs(c2_mean)
        c1_most_mean = (1 + al) * (tl.sum(c1_size, axis=1) * per_n + d * wd_mean)  # by ``xhat_at_most``
        dc1 = c1_most_mean * number(numbers_ptr, GAM_C1) + wd_mean * flushed
        dc1 += ((1 + al) * (number(numbers_ptr, MEAN_XH) + d)) * eta + 3 * eta
        c1_most = c1_abs * k2 + k2 * d * c2_abs
        per_row = k_dx * c2_abs + c1_most * flushed + 5 * eta
        if CENTERED:
            per_row += (wd_mean * number(numbers_ptr, GAM_C2) + 3 * eta) * (1 + 8 * u)
        per_xa = dc1 * (1 + 8 * u) + k_dx * c1_most
        per_xh = ra * ((k2 - 1) * c1_abs + k2 * d * c2_abs)
        per_xa = per_xa * ra
        per_wd = k_dx * ra
        per_row = per_row * ra + eta + ra * k2 * d * (c1_abs + d * c2_abs)
        per_x = tl.zeros_like(r)
        if RAW:
            s = tl.sum(raw_size, axis=1) * per_n + tl.abs(mean) * wd_mean
            lost = ra * ra * s * number(numbers_ptr, GAM_RAW)
            per_x = lost * ra * (8 * u) + ra * ra * c1_most * (4 * u)
            per_xh += lost * (1 + al)
            per_row += tl.abs(mean) * per_x
        if DOUBT:
            c2_moved_mean = tl.sum(c2_moved, axis=1) * (per_n * unit)
            per_xa += (1 + al) * (tl.sum(c1_moved, axis=1) * (per_n * unit) + d * c2_moved_mean) * ra
            if CENTERED:
                per_row += c2_moved_mean * ra
        per_xh += per_xa * (1 + al)  # by ``xhat_at_most``
        per_row += per_xa * (1 + al) * d
        per_moved = ra * unit
        for start in tl.range(0, N, B, num_stages=STAGES):
            cols = start + tl.arange(0, B)
            mask = columns_of(inside, cols, N, FULL)
            if WHOLE:
                x, xh, wd, off = whole_x, whole_xh, whole_wd, whole_off
            else:
                x, xh, wd, off = row_tile(
                    x_ptr, dy_ptr, weight_ptr, bits_ptr, doubt_ptr, mean, r, rows, start, inside, N, x_stride,
                    dy_stride, u, eta, least, half, dy_column, weight_offset, IO_ROUNDED, FLUSH, FULL, B,
                )  # fmt: skip
            got = wide(dx_ptr + rows[:, None] * dx_stride + cols[None, :], mask)
            dx = (wd - (xh * c1_mean[:, None] + c2_mean[:, None])) * r[:, None]
            error = tl.abs(got - dx)
            dx_abs = tl.abs(dx)
            bound = tl.abs(xh) * per_xh[:, None] + (tl.abs(wd) * per_wd[:, None] + per_row[:, None])
            if not GIVEN:
                bound += dx_abs * al[:, None]
            if RAW:
                bound += tl.abs(x) * per_x[:, None]
            if DOUBT:
                bound += off * per_moved[:, None]
            if STORED:
                bound += store(dx_abs + bound, least, half, FLUSH)
            if any_of(above(best, error, bound, mask)):
                best = larger(best, so_far(found_ptr, DX_CHECK))  # what other programs have noted by now
                if any_of(above(best, error, bound, mask)):
                    best = best_of(best, error, bound, mask)
                    note(found_ptr, DX_CHECK, 0, best)
            if DETAILS:
                size, in_powers = details_of(size, in_powers, error, dx, least, mask)
                zeros += (mask & (dx_abs <= bound)).to(tl.int32)
    note(found_ptr, DX_CHECK, 0, best)
    if DETAILS:
        note_details(found_ptr, DX_CHECK, size, in_powers)
        count(found_ptr, DX_CHECK * FIELDS + ZEROS, zeros)


@triton.jit
def dy_times_xhat(
    xh, xa, dy, doubt, al, r, eta, grow, inside, numbers_ptr, DOUBT: tl.constexpr, IO_ROUNDED: tl.constexpr,
    FLUSH: tl.constexpr,
):  # fmt: skip
    """A summand of dw, and how far it may be off by a bit in DOUBT, or by roundings to the io dtype; (R, B).

    The latter is in units of ``grow``, and 0 in rows that are not ``inside``, where dy is.
    """
    if not IO_ROUNDED:
        if DOUBT:
            return dy * xh, doubt * xa
        return dy * xh, xa
    dy_abs = tl.abs(dy)
    io_least, io_half = number(numbers_ptr, IO_LEAST), number(numbers_ptr, IO_HALF)
    half = tl.where(inside, number(numbers_ptr, DW_IO_HALF), 0.0)[:, None]
    per_xh, per_row = off_before_cast(al, r, numbers_ptr)
    value, cast_off, cast_most = cast_size(xh, per_xh[:, None], per_row[:, None], io_least, io_half)
    size = dy_abs * cast_most + eta
    off = power(size, io_least) * half
    if FLUSH:
        off += tl.where((size < 2.0**-125) & inside[:, None], 2.0**-126, 0.0)
    off += dy_abs * (cast_off + tl.abs(value - xh) * ((grow - 1) / grow))
    return dy * value, off


@triton.jit
def sums_kernel(
    x_ptr, dy_ptr, bits_ptr, doubt_ptr, rows_ptr, numbers_ptr, sums_ptr,
    M, N, group_rows, x_stride, dy_stride, dy_column,
    BOTH: tl.constexpr, RAW: tl.constexpr, IO_ROUNDED: tl.constexpr, FLUSH: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The sums over a group of rows behind dw and db, into ``sums`` (groups, ..., N) fp64. One program: B columns.

    Without BOTH there are no sums of a kernel that is given the statistics. STAGES: so many tiles are read at once.
    """
    u, eta = number(numbers_ptr, U), number(numbers_ptr, ETA)
    grow = number(numbers_ptr, GROW)
    group = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    dw = tl.zeros((R, B), tl.float64)
    db = tl.zeros((R, B), tl.float64)
    dy_xhat = tl.zeros((R, B), tl.float64)
    dy_shift = tl.zeros((R, B), tl.float64)
    dy_size = tl.zeros((R, B), tl.float64)
    dw_doubt = tl.zeros((R, B), tl.float64)
    db_doubt = tl.zeros((R, B), tl.float64)
    given_dw = tl.zeros((R, B), tl.float64)
    given_dy_xhat = tl.zeros((R, B), tl.float64)
    given_dy_shift = tl.zeros((R, B), tl.float64)
    given_dw_doubt = tl.zeros((R, B), tl.float64)
    DOUBT: tl.constexpr = doubt_ptr is not None
    m = tl.full((), M, tl.int64)
    first = group * group_rows
    last = tl.minimum(first + group_rows, M)
    for start in tl.range(first, last, R, num_stages=STAGES):
        rows = start + tl.arange(0, R)
        inside = rows < last
        mask = inside[:, None] & (cols < N)[None, :]
        x = wide(x_ptr + rows[:, None] * x_stride + cols[None, :], mask)
        dy, doubt = load_dy(dy_ptr, bits_ptr, doubt_ptr, rows, cols, dy_stride, N, mask, dy_column)
        dy_abs = tl.abs(dy)
        mean, r, al, d = load_row(rows_ptr, rows, inside, M, False)
        xh = (x - mean[:, None]) * r[:, None]
        xa = xhat_at_most(xh, al, d)
        flushed = eta * (1 + (1 + al) * r)
        shift = tl.abs(xh) * al[:, None] + ((1 + al) * d + flushed)[:, None]
        if RAW:
            shift += (tl.abs(x) + tl.abs(mean)[:, None]) * ((1 + al) * r * (4 * u))[:, None]
        db += dy
        dy_size += dy_abs
        dy_xhat += dy_abs * xa
        dy_shift += dy_abs * shift
        product, off = dy_times_xhat(
            xh, xa, dy, doubt, al, r, eta, grow, inside, numbers_ptr, DOUBT, IO_ROUNDED, FLUSH
        )  # fmt: skip
        dw += product
        if DOUBT or IO_ROUNDED:
            dw_doubt += off
        if DOUBT:
            db_doubt += doubt
        if BOTH:
            mean, r, al, d = load_row(rows_ptr + 4 * m, rows, inside, M, True)
            xh = (x - mean[:, None]) * r[:, None]
            xa = tl.abs(xh) + d[:, None]
            shift = tl.zeros_like(xh) + (eta * (1 + r) + d)[:, None]
            if RAW:
                shift += (tl.abs(x) + tl.abs(mean)[:, None]) * (r * (4 * u))[:, None]
            given_dy_xhat += dy_abs * xa
            given_dy_shift += dy_abs * shift
            product, off = dy_times_xhat(
                xh, xa, dy, doubt, al, r, eta, grow, inside, numbers_ptr, DOUBT, IO_ROUNDED, FLUSH
            )  # fmt: skip
            given_dw += product
            if DOUBT or IO_ROUNDED:
                given_dw_doubt += off
    n = tl.full((), N, tl.int64)
    to = sums_ptr + group * (BOTH_SUMS if BOTH else WHOLE_SUMS) * n + cols
    keep = cols < N
    tl.store(to + DW * n, tl.sum(dw, axis=0), mask=keep)
    tl.store(to + DB * n, tl.sum(db, axis=0), mask=keep)
    tl.store(to + DY_XHAT * n, tl.sum(dy_xhat, axis=0), mask=keep)
    tl.store(to + DY_SIZE * n, tl.sum(dy_size, axis=0), mask=keep)
    tl.store(to + DY_SHIFT * n, tl.sum(dy_shift, axis=0), mask=keep)
    tl.store(to + DW_DOUBT * n, tl.sum(dw_doubt, axis=0) * grow, mask=keep)
    tl.store(to + DB_DOUBT * n, tl.sum(db_doubt, axis=0) * grow, mask=keep)
    if BOTH:
        to += WHOLE_SUMS * n
        tl.store(to, tl.sum(given_dw, axis=0), mask=keep)
        tl.store(to + n, tl.sum(given_dy_xhat, axis=0), mask=keep)
        tl.store(to + 2 * n, tl.sum(given_dy_shift, axis=0), mask=keep)
        tl.store(to + 3 * n, tl.sum(given_dw_doubt, axis=0) * grow, mask=keep)


@triton.jit
def over_groups(values):
    """The sum (1, B) of a tile (G, B)."""
    return tl.sum(values, axis=0)[None, :]


@triton.jit
def judge_sum(
    actual_ptr, value, error_bound, cols, keep, half, numbers_ptr, found_ptr, CHECK: tl.constexpr,
    STORED: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """Judge dw or db at the columns ``cols`` (1, B), given the bound of the error before the store."""
    least = number(numbers_ptr, W_LEAST)
    bound = error_bound
    if STORED:
        bound += store(tl.abs(value) + error_bound, least, half, FLUSH)
    bound = tl.maximum(bound, 1e-300)
    error = tl.where(keep, tl.abs(wide(actual_ptr + cols, keep) - value), 0.0)
    note(found_ptr, CHECK, 0, largest(error / bound))
    note_details(found_ptr, CHECK, error, error * one_over(power(tl.abs(value), least)))
    count(found_ptr, CHECK * FIELDS + ZEROS, (keep & (tl.abs(value) <= bound)).to(tl.int32))


@triton.jit
def dw_db_kernel(
    found_ptr, dw_ptr, db_ptr, sums_ptr, numbers_ptr, groups, N,
    GIVEN: tl.constexpr, BOTH: tl.constexpr, STORED: tl.constexpr, FLUSH: tl.constexpr, G: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Judge dw and db (N,), those that are not None, from ``sums`` (groups, ..., N) of ``sums_kernel``."""
    cols = tl.program_id(0) * B + tl.arange(0, B)[None, :]
    keep = cols < N
    n = tl.full((), N, tl.int64)
    size = n * (BOTH_SUMS if BOTH else WHOLE_SUMS)
    FIRST: tl.constexpr = WHOLE_SUMS if GIVEN else DW
    BY_XHAT: tl.constexpr = WHOLE_SUMS + 1 if GIVEN else DY_XHAT
    BY_SHIFT: tl.constexpr = WHOLE_SUMS + 2 if GIVEN else DY_SHIFT
    BY_DOUBT: tl.constexpr = WHOLE_SUMS + 3 if GIVEN else DW_DOUBT
    dw = tl.zeros((G, B), tl.float64)
    dy_xhat = tl.zeros((G, B), tl.float64)
    dy_shift = tl.zeros((G, B), tl.float64)
    dw_doubt = tl.zeros((G, B), tl.float64)
    db = tl.zeros((G, B), tl.float64)
    dy_size = tl.zeros((G, B), tl.float64)
    db_doubt = tl.zeros((G, B), tl.float64)
    for start in range(0, groups, G):  # all of a tile are read before any is waited for
        group = (start + tl.arange(0, G))[:, None]
        at = sums_ptr + group * size + cols
        inside = keep & (group < groups)
        dw += tl.load(at + FIRST * n, mask=inside, other=0.0)
        dy_xhat += tl.load(at + BY_XHAT * n, mask=inside, other=0.0)
        dy_shift += tl.load(at + BY_SHIFT * n, mask=inside, other=0.0)
        dw_doubt += tl.load(at + BY_DOUBT * n, mask=inside, other=0.0)
        db += tl.load(at + DB * n, mask=inside, other=0.0)
        dy_size += tl.load(at + DY_SIZE * n, mask=inside, other=0.0)
        db_doubt += tl.load(at + DB_DOUBT * n, mask=inside, other=0.0)
    if dw_ptr is not None:
        off = over_groups(dy_xhat) * number(numbers_ptr, GAM_DW) + over_groups(dy_shift)
        off += number(numbers_ptr, ROWS_ETA) + over_groups(dw_doubt)
        judge_sum(
            dw_ptr, over_groups(dw), off, cols, keep, number(numbers_ptr, DW_HALF), numbers_ptr, found_ptr, DW_CHECK,
            STORED, FLUSH,
        )  # fmt: skip
    if db_ptr is not None:
        off = over_groups(dy_size) * number(numbers_ptr, GAM_DB) + number(numbers_ptr, ROWS_ETA) + over_groups(db_doubt)
        judge_sum(
            db_ptr, over_groups(db), off, cols, keep, number(numbers_ptr, DB_HALF), numbers_ptr, found_ptr, DB_CHECK,
            STORED, FLUSH,
        )  # fmt: skip
