# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The forward's kernel: statistics of each row, and the checks of mean, rstd, y and the bitmask.

One program takes R whole rows at a time, in tiles of B columns, which it reads again for each pass over a row if they
do not fit one tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normcheck.oracle.fused import layout
from normcheck.oracle.fused.formulas import (
    AL_LANES,
    AL_SAVED,
    ALONE,
    C_VAR,
    EPS,
    ETA,
    FIELDS,
    GAM_MEAN,
    GAM_VAR,
    IO_HALF,
    IO_LEAST,
    K_Y,
    LEAST_32,
    LIMIT,
    LOWER_CLIP,
    MEAN_ETA,
    RS,
    UPPER_CLIP,
    Y_HALF,
    Y_LEAST,
    ZEROS,
    U,
    above,
    any_of,
    best_of,
    cast_xhat,
    columns_of,
    count,
    details_of,
    factors,
    larger,
    note,
    note_details,
    number,
    off_before_cast,
    one_over,
    power,
    so_far,
    store,
    to_io,
    wide,
)

MEAN_CHECK = tl.constexpr(layout.MEAN_CHECK)
RSTD_CHECK = tl.constexpr(layout.RSTD_CHECK)
OWN_CHECK = tl.constexpr(layout.OWN_CHECK)
Y_CHECK = tl.constexpr(layout.Y_CHECK)
WRONG_BITS = tl.constexpr(layout.WRONG_BITS)
DOUBTFUL_BITS = tl.constexpr(layout.DOUBTFUL_BITS)
ZERO_BITS = tl.constexpr(layout.ZERO_BITS)
UNCHECKABLE_ROWS = tl.constexpr(layout.UNCHECKABLE_ROWS)


@triton.jit
def value_of(
    xh, g, bias, lower_clip, upper_clip, io_least, io_half,
    BIAS: tl.constexpr, CAST: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """p, z and y (R, B) of a tile, see ``reference.forward``."""
    if CAST:
        xh = to_io(xh, io_least, io_half)
    p = xh * g
    z = p
    if BIAS:
        z = p + bias
    y = z
    if CLAMPED:
        y = tl.where(z < lower_clip, lower_clip, tl.where(z > upper_clip, upper_clip, z))
    return p, z, y


@triton.jit
def bounds_of(
    x_abs, xh, p, z, y, g, bias, mean_abs, r, al, per_xh, per_row, u, eta, y_least, y_half, io_least, io_half, alone,
    weight_offset: tl.constexpr, BIAS: tl.constexpr, FOLDED: tl.constexpr, CAST: tl.constexpr, STORED: tl.constexpr,
    FLUSH: tl.constexpr,
):  # fmt: skip
    """The error of z before its store, and the bounds of that of y above and below, (R, B); see ``output_y`` of
    ``forward_bounds`` and of ``casting``.
    """
    g_abs = tl.abs(g)
    if CAST:
        _, low, high = cast_xhat(xh, per_xh, per_row, io_least, io_half)
        one, other = low * g, high * g
        upper = larger(one, other) - y
        lower = y + larger(-one, -other)
        ops = (larger(-low, high) * g_abs) * u + eta * (1 + g_abs)
        ops = tl.where(g != 0, ops, 0.0)
        before = larger(upper, lower) + ops
        upper += ops
        lower += ops
    else:
        before = tl.abs(p) * per_xh + (g_abs * per_row + eta)
        if weight_offset != 0:  # xhat may be added to its product with the weight
            before += (tl.abs(xh) * (1 + al) + per_row) * tl.abs(g - weight_offset) * alone
        if FOLDED:
            wider = 5 * u * (1 + al)
            before += (x_abs + mean_abs) * r * g_abs * wider
        if BIAS:
            b_abs = tl.abs(bias)
            if FOLDED:
                before += b_abs * wider
            by_add = tl.abs(z) * u + before * (1 + u)
            by_size = 2 * before + tl.abs(p)
            before = tl.where(by_add < by_size, by_add, by_size) + b_abs * (2.0**-51)
        before = tl.where(g != 0, before, 0.0)
        if BIAS:
            before += tl.where(b_abs < eta, b_abs, 0.0)
        upper = before
        lower = before
    if STORED:
        stored = store(tl.abs(y) + before, y_least, y_half, FLUSH)
        return before, upper + stored, lower + stored
    return before, larger(upper, 1e-300), larger(lower, 1e-300)


@triton.jit
def at_least(p, y, g, per_xh, per_row, y_least, y_half, CAST: tl.constexpr, STORED: tl.constexpr):
    """What the bounds of y are at least, (R, B): little less than they are, except for an op that rounds xhat. It costs
    little.
    """
    least = tl.zeros_like(y)
    if not CAST:
        least = tl.abs(p) * per_xh + tl.abs(g) * per_row
    if STORED:
        least += power(y, y_least) * y_half
    return least


@triton.jit
def reach_at_most(
    p, z, g, bias, per_xh, per_row, u, eta, io_least, io_half, BIAS: tl.constexpr, ROUNDED: tl.constexpr
):  # fmt: skip
    """How far z may be off at most, (R, B), rounded if ROUNDED: somewhat more than that. It costs little."""
    most = tl.abs(p) * per_xh + (tl.abs(g) * per_row + eta)
    if BIAS:
        most = tl.abs(z) * u + most * (1 + 2 * u) + (tl.abs(bias) * (2.0**-51) + eta)
    if ROUNDED:
        most += (tl.abs(z) + (most + io_least)) * io_half
    return most * (1 + 2.0**-20)


@triton.jit
def off_by_ops(al, d, r, k_y, CAST: tl.constexpr, numbers_ptr):
    """How far xhat is off by its operations and its statistics, by |xhat| and beside it, for each row."""
    if CAST:
        return off_before_cast(al, r, numbers_ptr)
    u, eta = number(numbers_ptr, U), number(numbers_ptr, ETA)
    per_row = eta * (1 + r * (1 + al)) + (1 + al) * (1 + (k_y + 1) * u) * d
    return (1 + al) * (1 + k_y * u) - 1 + 2.0**-51, per_row  # the last is the reference's own rounding


@triton.jit
def forward_kernel(
    found_ptr, x_ptr, y_ptr, weight_ptr, bias_ptr, own_mean_ptr, own_rstd_ptr, own_bits_ptr, numbers_ptr,
    rows_ptr, mean_ptr, rstd_ptr, bits_ptr, ties_ptr, doubt_ptr,
    M, N, x_stride, y_stride, bits_stride,
    weight_offset: tl.constexpr, CENTERED: tl.constexpr, ANY_VARIANCE: tl.constexpr, FOLDED: tl.constexpr,
    CAST: tl.constexpr, CLAMPED: tl.constexpr, OWN: tl.constexpr, PACKED: tl.constexpr, ROUNDED: tl.constexpr,
    STORED: tl.constexpr, FLUSH: tl.constexpr, DETAILS: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Judge y, and those of the statistics and the bitmask whose pointers are not None.

    Fills ``rows`` (8, M): mean, rstd, al and d of each row in fp64, then those of a kernel that is given the statistics
    as they are saved; the reference's mean and rstd (M,) in fp32, and for a clamped op its bits, ties and doubt (M, N).
    OWN: y is judged given the own statistics as well. PACKED: the own bits are packed. ROUNDED: a bit may be of the
    rounded z. STORED, FLUSH: y is rounded, and may be flushed, at its store. DETAILS: the largest errors are found, and
    the elements that a 0 would pass are counted. WHOLE: a tile holds whole rows. FULL: no tile is larger than its rows.
    STAGES: so many tiles are read at once.

    Few tiles hold a record or a bit in doubt. So a bound of y is first taken for less than it is, and the reach of a
    bit for more, which costs little, and only a tile that may hold one then is looked at again. What other programs
    have noted by then counts, so that not each of them finds its way to the largest ratio.
    """
    u, eta, eps = number(numbers_ptr, U), number(numbers_ptr, ETA), number(numbers_ptr, EPS)
    per_n = 1 / tl.full((R,), N, tl.float64)  # a product costs little, a division in fp64 as much as 20 of them
    m = tl.full((), M, tl.int64)
    k_y, alone = number(numbers_ptr, K_Y), number(numbers_ptr, ALONE)
    lower_clip, upper_clip = number(numbers_ptr, LOWER_CLIP), number(numbers_ptr, UPPER_CLIP)
    y_least, y_half = number(numbers_ptr, Y_LEAST), number(numbers_ptr, Y_HALF)
    io_least, io_half = number(numbers_ptr, IO_LEAST), number(numbers_ptr, IO_HALF)
    best, best_own = so_far(found_ptr, Y_CHECK), so_far(found_ptr, OWN_CHECK)
    best_mean, best_rstd = so_far(found_ptr, MEAN_CHECK), so_far(found_ptr, RSTD_CHECK)
    size_mean = tl.zeros((R,), tl.float64)
    size_rstd = tl.zeros((R,), tl.float64)
    powers_mean = tl.zeros((R,), tl.float64)
    powers_rstd = tl.zeros((R,), tl.float64)
    size_y = tl.zeros((R, B), tl.float64)
    powers_y = tl.zeros((R, B), tl.float64)
    size_own = tl.zeros((R, B), tl.float64)
    powers_own = tl.zeros((R, B), tl.float64)
    zeros_mean = tl.zeros((R,), tl.int32)
    zeros_rstd = tl.zeros((R,), tl.int32)
    unbounded = tl.zeros((R,), tl.int32)
    zeros_y = tl.zeros((R, B), tl.int32)
    zeros_own = tl.zeros((R, B), tl.int32)
    wrong_bits = tl.zeros((R, B), tl.int32)
    doubtful_bits = tl.zeros((R, B), tl.int32)
    zero_bits = tl.zeros((R, B), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0)):
        rows = tl.full((), tile, tl.int64) * R + tl.arange(0, R)
        inside = rows < M
        at = x_ptr + rows[:, None] * x_stride
        sums = tl.zeros((R, B), tl.float64)
        sizes = tl.zeros((R, B), tl.float64)
        if WHOLE:
            cols = tl.arange(0, B)
            mask = columns_of(inside, cols, N, FULL)
            x_whole = wide(at + cols[None, :], mask)
            if CENTERED:
                sums, sizes = x_whole, tl.abs(x_whole)
            else:
                sums = x_whole * x_whole
        else:
            for start in tl.range(0, N, B, num_stages=STAGES):
                cols = start + tl.arange(0, B)
                x = wide(at + cols[None, :], columns_of(inside, cols, N, FULL))
                if CENTERED:
                    sums += x
                    sizes += tl.abs(x)
                else:
                    sums += x * x
        if CENTERED:
            mean = tl.sum(sums, axis=1) * per_n
            size = tl.sum(sizes, axis=1) * per_n
            sums = tl.zeros((R, B), tl.float64)
            sizes = tl.zeros((R, B), tl.float64)
            if WHOLE:
                xc = tl.where(mask, x_whole - mean[:, None], 0.0)
                sums, sizes = xc, xc * xc
            else:
                for start in tl.range(0, N, B, num_stages=STAGES):
                    cols = start + tl.arange(0, B)
                    mask = columns_of(inside, cols, N, FULL)
                    xc = tl.where(mask, wide(at + cols[None, :], mask) - mean[:, None], 0.0)
                    sums += xc
                    sizes += xc * xc
            shift = tl.sum(sums, axis=1) * per_n
            mean += shift
            var = tl.maximum(tl.sum(sizes, axis=1) * per_n - shift * shift, 0.0)
            dm = size * number(numbers_ptr, GAM_MEAN) + number(numbers_ptr, MEAN_ETA)
            dv = (var + dm * dm) * number(numbers_ptr, GAM_VAR) + dm * dm + 3 * eta
            if ANY_VARIANCE:
                dv += tl.sqrt(var * (mean * mean + var)) * number(numbers_ptr, C_VAR)
            size = tl.maximum(size, var)
        else:
            mean = tl.zeros((R,), tl.float64)
            dm = tl.zeros((R,), tl.float64)
            var = tl.sum(sums, axis=1) * per_n
            dv = var * number(numbers_ptr, GAM_VAR) + 3 * eta
            size = var
        unbounded += (inside & ~(size <= number(numbers_ptr, LIMIT))).to(tl.int32)
        q = var + eps
        r = tl.rsqrt(q)  # in fp64: a root and a division cost as much as 40 products
        dq = (q + dv) * u + dv + u * eps
        rs = number(numbers_ptr, RS)
        upper = (q * r) * tl.rsqrt(tl.maximum(q - dq, eps * (1 - 2 * u))) * (1 + rs) - 1
        lower = 1 - (q * r) * tl.rsqrt(q + dq) * (1 - rs)
        al = tl.maximum(upper, lower)
        d = r * dm
        saved_mean, saved_rstd = mean.to(tl.float32), r.to(tl.float32)
        to = rows_ptr + rows
        tl.store(to, mean, mask=inside)
        tl.store(to + m, r, mask=inside)
        tl.store(to + 2 * m, al, mask=inside)
        tl.store(to + 3 * m, d, mask=inside)
        tl.store(to + 4 * m, saved_mean.to(tl.float64), mask=inside)
        tl.store(to + 5 * m, saved_rstd.to(tl.float64), mask=inside)
        tl.store(to + 6 * m, tl.zeros((R,), tl.float64), mask=inside)
        tl.store(to + 7 * m, tl.abs(mean - saved_mean) * saved_rstd.to(tl.float64), mask=inside)
        tl.store(rstd_ptr + rows, saved_rstd, mask=inside)
        if CENTERED:
            tl.store(mean_ptr + rows, saved_mean, mask=inside)
            if own_mean_ptr is not None:
                off = tl.where(inside, tl.abs(wide(own_mean_ptr + rows, inside) - mean), 0.0)
                if any_of(above(best_mean, off[:, None], dm[:, None], inside[:, None])):
                    best_mean = best_of(best_mean, off[:, None], dm[:, None], inside[:, None])
                if DETAILS:
                    size_mean = larger(size_mean, off)
                    powers_mean = larger(powers_mean, off * one_over(power(mean, number(numbers_ptr, LEAST_32))))
                    zeros_mean += (inside & (tl.abs(mean) <= dm)).to(tl.int32)
        if own_rstd_ptr is not None:
            off = wide(own_rstd_ptr + rows, inside) - r
            side = tl.where(off > 0, r * upper, r * lower) + eta
            off = tl.where(inside, tl.abs(off), 0.0)
            if any_of(above(best_rstd, off[:, None], side[:, None], inside[:, None])):
                best_rstd = best_of(best_rstd, off[:, None], side[:, None], inside[:, None])
            if DETAILS:
                size_rstd = larger(size_rstd, off)
                powers_rstd = larger(powers_rstd, off * one_over(power(r, number(numbers_ptr, LEAST_32))))
                zeros_rstd += (inside & (r <= r * lower + eta)).to(tl.int32)
        per_xh, per_row = off_by_ops(al, d, r, k_y, CAST, numbers_ptr)
        own_r = r
        own_mean = mean
        own_al = al
        own_per_xh = per_xh
        own_per_row = per_row
        if OWN:
            own_r = wide(own_rstd_ptr + rows, inside)
            if CENTERED:
                own_mean = wide(own_mean_ptr + rows, inside)
            own_al = tl.zeros((R,), tl.float64) + number(numbers_ptr, AL_LANES)
            own_d = tl.abs(own_mean) * own_r * number(numbers_ptr, AL_SAVED)
            own_per_xh, own_per_row = off_by_ops(own_al, own_d, own_r, k_y, CAST, numbers_ptr)
        for start in tl.range(0, N, B, num_stages=STAGES):
            cols = start + tl.arange(0, B)
            mask = columns_of(inside, cols, N, FULL)
            x = x_whole if WHOLE else wide(at + cols[None, :], mask)
            g = factors(weight_ptr, weight_offset, cols, N)
            bias = g
            if bias_ptr is not None:
                bias = wide(bias_ptr + cols, cols < N)[None, :]
            got = wide(y_ptr + rows[:, None] * y_stride + cols[None, :], mask)
            xh = (x - mean[:, None]) * r[:, None]
            p, z, y = value_of(
                xh, g, bias, lower_clip, upper_clip, io_least, io_half, bias_ptr is not None, CAST, CLAMPED
            )  # fmt: skip
            error = got - y
            least = at_least(p, y, g, per_xh[:, None], per_row[:, None], y_least, y_half, CAST, STORED)
            record = above(best, tl.abs(error), least, mask)
            own_xh = xh
            own_p = p
            own_z = z
            own_y = y
            own_error = error
            own_least = least
            if OWN:
                own_xh = (x - own_mean[:, None]) * own_r[:, None]
                own_p, own_z, own_y = value_of(
                    own_xh, g, bias, lower_clip, upper_clip, io_least, io_half, bias_ptr is not None, CAST, CLAMPED
                )  # fmt: skip
                own_error = got - own_y
                own_least = at_least(
                    own_p, own_y, g, own_per_xh[:, None], own_per_row[:, None], y_least, y_half, CAST, STORED
                )  # fmt: skip
                record |= above(best_own, tl.abs(own_error), own_least, mask)
            if DETAILS:
                record = mask
            looked = any_of(record)
            if not DETAILS:  # noqa: SIM102  (known when it is compiled)
                if looked:
                    best = larger(best, so_far(found_ptr, Y_CHECK))
                    record = above(best, tl.abs(error), least, mask)
                    if OWN:
                        best_own = larger(best_own, so_far(found_ptr, OWN_CHECK))
                        record |= above(best_own, tl.abs(own_error), own_least, mask)
                    looked = any_of(record)
            if looked:
                _, upper_y, lower_y = bounds_of(
                    tl.abs(x), xh, p, z, y, g, bias, tl.abs(mean)[:, None], r[:, None], al[:, None], per_xh[:, None],
                    per_row[:, None], u, eta, y_least, y_half, io_least, io_half, alone, weight_offset,
                    bias_ptr is not None, FOLDED, CAST, STORED, FLUSH,
                )  # fmt: skip
                bound = tl.where(error > 0, upper_y, lower_y)
                if any_of(above(best, tl.abs(error), bound, mask)):
                    best = best_of(best, tl.abs(error), bound, mask)
                    note(found_ptr, Y_CHECK, 0, best)
                if DETAILS:
                    size_y, powers_y = details_of(size_y, powers_y, tl.abs(error), y, y_least, mask)
                    zeros_y += (mask & (tl.abs(y) <= tl.where(y > 0, lower_y, upper_y))).to(tl.int32)
                if OWN:
                    _, upper_y, lower_y = bounds_of(
                        tl.abs(x), own_xh, own_p, own_z, own_y, g, bias, tl.abs(own_mean)[:, None], own_r[:, None],
                        own_al[:, None], own_per_xh[:, None], own_per_row[:, None], u, eta, y_least, y_half,
                        io_least, io_half, alone, weight_offset, bias_ptr is not None, FOLDED, CAST, STORED, FLUSH,
                    )  # fmt: skip
                    bound = tl.where(own_error > 0, upper_y, lower_y)
                    if any_of(above(best_own, tl.abs(own_error), bound, mask)):
                        best_own = best_of(best_own, tl.abs(own_error), bound, mask)
                        note(found_ptr, OWN_CHECK, 0, best_own)
                    if DETAILS:
                        size_own, powers_own = details_of(
                            size_own, powers_own, tl.abs(own_error), own_y, y_least, mask
                        )  # fmt: skip
                        zeros_own += (mask & (tl.abs(own_y) <= tl.where(own_y > 0, lower_y, upper_y))).to(tl.int32)
            if CLAMPED:
                bits = (z > lower_clip) & (z < upper_clip)
                to_lower, to_upper = tl.abs(z - lower_clip), tl.abs(z - upper_clip)
                near = mask
                if not FOLDED:
                    reach = reach_at_most(
                        p, z, g, bias, per_xh[:, None], per_row[:, None], u, eta, io_least, io_half,
                        bias_ptr is not None, ROUNDED,
                    )  # fmt: skip
                    near = mask & ~((to_lower > reach) & (to_upper > reach))
                if own_bits_ptr is not None:
                    if PACKED:
                        byte = tl.load(own_bits_ptr + rows[:, None] * bits_stride + (cols // 8)[None, :], mask=mask)
                        own_bit = ((byte.to(tl.int32) >> (cols % 8)[None, :]) & 1) != 0
                    else:
                        own_bit = tl.load(own_bits_ptr + rows[:, None] * bits_stride + cols[None, :], mask=mask) != 0
                    near |= mask & (own_bit != bits)
                    if DETAILS:
                        near = mask
                place = rows[:, None] * N + cols[None, :]
                tl.store(bits_ptr + place, bits.to(tl.uint8), mask=mask)
                if any_of(near):
                    before, _, _ = bounds_of(
                        tl.abs(x), xh, p, z, y, g, bias, tl.abs(mean)[:, None], r[:, None], al[:, None],
                        per_xh[:, None], per_row[:, None], u, eta, y_least, y_half, io_least, io_half,
                        alone, weight_offset, bias_ptr is not None, FOLDED, CAST, STORED, FLUSH,
                    )  # fmt: skip
                    reach = before
                    if ROUNDED:
                        reach += power(tl.abs(z) + before, io_least) * io_half
                    ties = (to_lower == 0) | (to_upper == 0)
                    doubt = ~((to_lower > reach) & (to_upper > reach)) & (reach != 0)
                    if any_of(mask & doubt & (before == 0)):  # a tie without any error is one in every correct kernel
                        doubt = ~(to_lower > reach) & ~((before == 0) & (to_lower == 0))
                        doubt |= ~(to_upper > reach) & ~((before == 0) & (to_upper == 0))
                        doubt &= reach != 0
                    if own_bits_ptr is not None:
                        doubtful = (mask & doubt).to(tl.int32)
                        wrong = (mask & ~doubt & (own_bit != bits)).to(tl.int32)
                        if DETAILS:
                            doubtful_bits += doubtful
                            wrong_bits += wrong
                            zero_bits += (mask & ~doubt & ~bits).to(tl.int32)
                        else:  # few tiles come here: their counts take no registers of the others
                            count(found_ptr, DOUBTFUL_BITS, doubtful)
                            count(found_ptr, WRONG_BITS, wrong)
                    tl.store(ties_ptr + place, ties.to(tl.uint8), mask=mask)
                    tl.store(doubt_ptr + place, (doubt | ties).to(tl.uint8), mask=mask)
                else:
                    tl.store(ties_ptr + place, tl.zeros((R, B), tl.uint8), mask=mask)
                    tl.store(doubt_ptr + place, tl.zeros((R, B), tl.uint8), mask=mask)
    note(found_ptr, Y_CHECK, 0, best)
    count(found_ptr, UNCHECKABLE_ROWS, unbounded[:, None])
    if DETAILS:
        note_details(found_ptr, Y_CHECK, size_y, powers_y)
        count(found_ptr, Y_CHECK * FIELDS + ZEROS, zeros_y)
    if OWN:
        note(found_ptr, OWN_CHECK, 0, best_own)
        if DETAILS:
            note_details(found_ptr, OWN_CHECK, size_own, powers_own)
            count(found_ptr, OWN_CHECK * FIELDS + ZEROS, zeros_own)
    if own_mean_ptr is not None:
        note(found_ptr, MEAN_CHECK, 0, best_mean)
        if DETAILS:
            note_details(found_ptr, MEAN_CHECK, size_mean[:, None], powers_mean[:, None])
            count(found_ptr, MEAN_CHECK * FIELDS + ZEROS, zeros_mean[:, None])
    if own_rstd_ptr is not None:
        note(found_ptr, RSTD_CHECK, 0, best_rstd)
        if DETAILS:
            note_details(found_ptr, RSTD_CHECK, size_rstd[:, None], powers_rstd[:, None])
            count(found_ptr, RSTD_CHECK * FIELDS + ZEROS, zeros_rstd[:, None])
    if CLAMPED and DETAILS:
        count(found_ptr, WRONG_BITS, wrong_bits)
        count(found_ptr, DOUBTFUL_BITS, doubtful_bits)
        count(found_ptr, ZERO_BITS, zero_bits)
