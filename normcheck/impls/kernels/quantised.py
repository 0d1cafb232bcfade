# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RUF005  (Triton joins tuples with a plus)
"""Triton kernels of ops that return codes. On a CPU, call ``interpreter.enable()`` before you import this.

    rstd  = 1 / sqrt(sum(x^2) / N + eps)
    y     = x * rstd * w
    scale = given, or max |y| / LARGEST over a row or a block of columns, ``least`` or more
    q     = y * (1 / scale), saturated, to the nearest code, ties to even

If a residual is added, x above is x + residual, rounded to the dtype of the residual, as it is stored in ``sum_ptr``.

fp32 inside; y is not rounded before it is quantised, and 1 / scale is rounded correctly. (A division for each element
would take longer than its bytes do.) Of rows wider than ``BLOCK`` the first columns stay in registers, the rest is read
again: for the codes, and before that for the largest |y| of a row.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.forward import (
    ELEMENTS,
    MAX_BLOCK,
    WIDE,
    load_scale,
    load_sum,
    load_tile,
)
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import ROW_COUNTS, Tile, ceil_div, power_of_two, tile, tiles

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Dtype of codes -> the largest; the least is its negative."""

SMALLEST = tl.constexpr(2.0**-100)
"""If scale / rstd is no less, products x * w whose code is not 0 are far from the subnormal numbers of fp32."""

CODE_TILES = tiles(
    Tile(rows=8, block=256, warps=4, stages=4, groups=896),
    Tile(rows=2, block=512, warps=1, stages=4, groups=2048),
    Tile(rows=2, block=1024, warps=2, stages=3, groups=1056),
    Tile(rows=1, block=2048, warps=2, stages=3, groups=1056),
    Tile(rows=1, block=4096, warps=4, stages=3, groups=528),
    Tile(rows=1, block=8192, warps=8, stages=3, groups=264),
    Tile(rows=1, block=16384, warps=16, stages=4, groups=132),
)
"""From 1024 columns on chosen from some 30 each on an H200, for the least loss over scales that are given, of a row and
of a block; the narrower ones are not measured. With a residual a program has no loop, as in ``forward``."""

ROW_SCALE_PIECES = Tile(rows=1, block=2048, warps=4, stages=3, groups=528)
"""For rows of 8192 columns with a scale of their own: 92 % of a copy, and 75 % in one tile."""

MOST_WHOLE = 1024
"""Columns of the widest rows that one tile holds, however many of its columns are masked. In pieces, of which fewer
columns are, rows of 5120 have 89 to 96 % of a copy, and 56 to 80 % in one tile of 8192 (an H200, M * N = 2^27)."""


@triton.jit
def rstd_of(total, N, eps, ROWS: tl.constexpr):
    """rstd (ROWS,) of rows whose squares add up to ``total``."""
    variance = tl.div_rn(total, tl.full((ROWS,), N, tl.float32))
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))


@triton.jit
def sum_and_most(total, most, more, size):
    """Two sums added, and the larger of two sizes."""
    return total + more, tl.maximum(most, size)


@triton.jit
def scale_of(most, scale_ub, least, LARGEST: tl.constexpr):
    """The scale of blocks whose largest |y| is ``most``, limited by scale_ub unless that is None."""
    if scale_ub is not None:
        most = tl.minimum(most, scale_ub)
    return tl.maximum(tl.div_rn(most, tl.full(most.shape, LARGEST, tl.float32)), least)


@triton.jit
def store_codes(t, q_ptr, rows, cols, M, N, LARGEST: tl.constexpr):
    """The codes of t (ROWS, BLOCK), which is y over the scale; NaN stays NaN if the codes have one."""
    if q_ptr.dtype.element_ty == tl.int8:
        t = tl.clamp(t, -LARGEST, LARGEST) + 12582912.0  # 1.5 * 2^23, beside which fp32 has integers only,
        codes = t.to(tl.int32, bitcast=True).to(tl.int8)  # whose last 8 bits are the code: a conversion takes longer
    else:
        codes = tl.clamp(t, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(q_ptr.dtype.element_ty)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(q_ptr + rows[:, None] * N + cols[None, :], codes, mask=mask)


@triton.jit
def by_block(
    y, scale_ptr, rows, start, M, N, scale_ub, least,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y over the scales of its blocks of COLUMNS, which are stored; the tile (ROWS, BLOCK) begins at ``start``."""
    blocks = tl.reshape(y, (ROWS, BLOCK // COLUMNS, COLUMNS))
    scale = scale_of(tl.max(tl.abs(blocks), axis=2), scale_ub, least, LARGEST)
    numbers = start // COLUMNS + tl.arange(0, BLOCK // COLUMNS)
    count = (N + COLUMNS - 1) // COLUMNS
    mask = (rows < M)[:, None] & (numbers < count)[None, :]
    tl.store(scale_ptr + rows[:, None] * count + numbers[None, :], scale, mask=mask)
    factor = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.reshape(blocks * factor[:, :, None], (ROWS, BLOCK))


@triton.jit(do_not_specialize=ROW_COUNTS)
def quantised_kernel(
    x_ptr, weight_ptr, q_ptr, scale_ptr, residual_ptr, sum_ptr,
    x_stride, residual_stride, M, N, eps, scale_ub, least,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows. residual_ptr and sum_ptr are None if the op has none.

    COLUMNS share a scale; 0: those of a row. None: ``scale_ptr`` has the scale, of one element.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    first_cols = tl.arange(0, BLOCK)

    first = load_sum(
        x_ptr, residual_ptr, sum_ptr, rows, first_cols, x_stride, residual_stride, N, here & (first_cols < N)[None, :]
    )
    squares = first * first
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        x = load_sum(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, here & (cols < N)[None, :])
        squares += x * x
    if residual_ptr is not None:  # from here on the stored sum is read, which other threads may have stored
        tl.debug_barrier()
        x_ptr, x_stride = sum_ptr, N
    rstd = rstd_of(tl.sum(squares, axis=1), N, eps, ROWS)[:, None]
    first = first * rstd * load_scale(weight_ptr, first_cols, N, False)[None, :]

    factor = tl.full((ROWS,), 1.0, tl.float32)
    if COLUMNS is None:
        factor = tl.div_rn(factor, factor * tl.load(scale_ptr))
    elif COLUMNS == 0:
        most = tl.max(tl.abs(first), axis=1)
        for start in range(BLOCK, N, BLOCK):
            cols = start + first_cols
            x = load_tile(x_ptr, rows, cols, x_stride, here & (cols < N)[None, :])
            y = x * rstd * load_scale(weight_ptr, cols, N, False)[None, :]
            most = tl.maximum(most, tl.max(tl.abs(y), axis=1))
        scale = scale_of(most, scale_ub, least, LARGEST)
        tl.store(scale_ptr + rows, scale, mask=rows < M)
        factor = tl.div_rn(factor, scale)

    if COLUMNS:
        first = by_block(first, scale_ptr, rows, 0, M, N, scale_ub, least, LARGEST, COLUMNS, ROWS, BLOCK)
    else:
        first *= factor[:, None]
    store_codes(first, q_ptr, rows, first_cols, M, N, LARGEST)
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        x = load_tile(x_ptr, rows, cols, x_stride, here & (cols < N)[None, :])
        y = x * rstd * load_scale(weight_ptr, cols, N, False)[None, :]
        if COLUMNS:
            y = by_block(y, scale_ptr, rows, start, M, N, scale_ub, least, LARGEST, COLUMNS, ROWS, BLOCK)
        else:
            y *= factor[:, None]
        store_codes(y, q_ptr, rows, cols, M, N, LARGEST)


@triton.jit
def sum_again(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, M, N):
    """What ``load_sum`` returned, from its summands, as other threads may have stored the sum."""
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = load_tile(x_ptr, rows, cols, x_stride, mask)
    if residual_ptr is not None:
        x += load_tile(residual_ptr, rows, cols, residual_stride, mask)
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit(do_not_specialize=ROW_COUNTS)
def looped_quantised_kernel(
    x_ptr, weight_ptr, q_ptr, scale_ptr, residual_ptr, sum_ptr,
    x_stride, residual_stride, M, N, eps, scale_ub, least,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The same for rows of PIECES blocks. One program: ROWS rows, and all that are so many tiles on as there are
    programs; it reads w and a given scale once, and a row as well, which stays in registers.

    The next rows are being loaded (STAGES in all) while these are computed. The largest |y| of a row is that of x * w,
    times rstd, so that one reduction gives both. If x * w overflows, or loses bits that a code has, y is x * rstd * w.
    """
    first_cols = tl.arange(0, BLOCK)
    weights = ()
    for i in tl.static_range(PIECES):
        weights = weights + (load_scale(weight_ptr, first_cols + i * BLOCK, N, False)[None, :],)
    ones = tl.full((ROWS,), 1.0, tl.float32)
    if COLUMNS is None:
        given = tl.div_rn(ones, ones * tl.load(scale_ptr))
    first = tl.program_id(0).to(tl.int64) * ROWS
    for start in tl.range(first, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        pieces = ()
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        sizes = tl.zeros((ROWS, BLOCK), tl.float32)
        for i in tl.static_range(PIECES):
            cols = first_cols + i * BLOCK
            mask = (rows < M)[:, None] & (cols < N)[None, :]
            x = load_sum(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, mask)
            squares += x * x
            if COLUMNS == 0:
                x *= weights[i]
                sizes = tl.maximum(sizes, tl.abs(x))
            pieces = pieces + (x,)
        if COLUMNS == 0:
            total, most = tl.reduce((squares, sizes), 1, sum_and_most)
            rstd = rstd_of(total, N, eps, ROWS)
            scale = scale_of(most * rstd, scale_ub, least, LARGEST)
            safe = (most < float("inf")) & (scale >= rstd * SMALLEST)
            if tl.min(safe.to(tl.int32), axis=0) != 0:
                tl.store(scale_ptr + rows, scale, mask=rows < M)
                factor = tl.div_rn(ones, scale)[:, None]
                for i in tl.static_range(PIECES):
                    y = pieces[i] * rstd[:, None] * factor
                    store_codes(y, q_ptr, rows, first_cols + i * BLOCK, M, N, LARGEST)
            else:  # all is read again: what stays in registers for these few rows would slow down every row
                sizes = tl.zeros((ROWS, BLOCK), tl.float32)
                for start_again in range(0, N, BLOCK):
                    cols = first_cols + start_again
                    x = sum_again(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, M, N)
                    y = x * rstd[:, None] * load_scale(weight_ptr, cols, N, False)[None, :]
                    sizes = tl.maximum(sizes, tl.abs(y))
                scale = scale_of(tl.max(sizes, axis=1), scale_ub, least, LARGEST)
                tl.store(scale_ptr + rows, scale, mask=rows < M)
                factor = tl.div_rn(ones, scale)[:, None]
                for start_again in range(0, N, BLOCK):
                    cols = first_cols + start_again
                    x = sum_again(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, M, N)
                    y = x * rstd[:, None] * load_scale(weight_ptr, cols, N, False)[None, :]
                    store_codes(y * factor, q_ptr, rows, cols, M, N, LARGEST)
        else:
            rstd = rstd_of(tl.sum(squares, axis=1), N, eps, ROWS)
            for i in tl.static_range(PIECES):
                y = pieces[i] * rstd[:, None] * weights[i]
                if COLUMNS:
                    y = by_block(y, scale_ptr, rows, i * BLOCK, M, N, scale_ub, least, LARGEST, COLUMNS, ROWS, BLOCK)
                else:
                    y *= given[:, None]
                store_codes(y, q_ptr, rows, first_cols + i * BLOCK, M, N, LARGEST)


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int, with_residual: bool, row_scale: bool) -> Tile:
    """The tile for rows of N elements; ``row_scale``: whether they share a scale that is not given."""
    if on_gpu and N > MAX_BLOCK:
        return WIDE
    if with_residual:
        t = tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, per_warp=ELEMENTS, max_block=max_block)
    else:
        t = tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block, chosen=CODE_TILES)
    if on_gpu and MOST_WHOLE < N <= max_block:
        t = in_pieces(N, with_residual=with_residual) or t
        if row_scale and not with_residual and t.block == ROW_SCALE_PIECES.block * 4:
            t = ROW_SCALE_PIECES
    return t


def in_pieces(N: int, *, with_residual: bool) -> Tile | None:
    """A tile of which 3, 5 or 7 hold a row of N elements; None if 4 or 8 are needed, which one tile holds as well."""
    power = power_of_two(N)
    block = power // 4 if power // 8 * 5 < N <= power // 4 * 3 else power // 8
    count = ceil_div(N, block)
    if count == power // block:
        return None
    if with_residual:
        return Tile(rows=1, block=block, warps=block // 256)
    warps = max(block // (256 if count == 5 else 512), 1)
    return Tile(rows=1, block=block, warps=warps, stages=3, groups=132 * 16 // warps)


def forward(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    columns: int | None = None,
    scale: Tensor | None = None,
    scale_ub: float | None = None,
    least: float = 0.0,
    residual: Tensor | None = None,
    max_block: int = MAX_BLOCK,
    how: Tile | None = None,
) -> dict[str, Tensor]:
    """The codes of the normed rows of x (M, N), last stride 1, by weight (N,) or none, in a ``dtype`` of ``LARGEST``.

    ``columns``: how many share a scale, a power of two, or 0: those of a row; None: ``scale``, fp32 of one element, is
    given. ``scale_ub`` limits the largest |y|, of which a scale is made that is ``least`` or more. ``residual``
    (M, N), last stride 1, in a dtype of its own, is added to x first; the sum is rounded to that dtype, is what is
    normed, and is returned.
    ``how``: in place of the tile that is chosen for N; programs of tiles with stages loop over rows.
    Returns q (M, N), scale (M, 1) or (M, ceil(N / columns)) in fp32 unless it is given, and with a residual
    residual_out (M, N) in its dtype.
    """
    M, N = x.shape
    q = torch.empty((M, N), dtype=dtype, device=x.device)
    sums = None if residual is None else torch.empty((M, N), dtype=residual.dtype, device=x.device)
    outputs = {"q": q} if sums is None else {"q": q, "residual_out": sums}
    if columns is not None:
        shape = (M, ceil_div(N, columns) if columns else 1)
        scale = outputs["scale"] = torch.empty(shape, dtype=torch.float32, device=x.device)
    if M:
        facts = {"with_residual": residual is not None, "row_scale": columns == 0}
        t = how or _tile(M, N, on_gpu=x.is_cuda, max_block=max_block, **facts)
        arguments = (
            x, weight, q, scale, residual, sums, x.stride(0), None if residual is None else residual.stride(0),
            M, N, eps, scale_ub, least,
        )  # fmt: skip
        constants = {
            "LARGEST": LARGEST[dtype], "COLUMNS": columns and min(columns, t.block),
            "ROWS": t.rows, "BLOCK": t.block, "num_warps": t.warps,
        }  # fmt: skip
        grid = (ceil_div(M, t.rows),)
        if t.stages > 1 or (x.is_cuda and N <= MAX_BLOCK):
            grid = grid if t.stages == 1 else (min(*grid, t.groups),)
            pieces = {"STAGES": t.stages, "PIECES": ceil_div(N, t.block)}
            launch(looped_quantised_kernel, grid, *arguments, **constants, **pieces)
        else:
            launch(quantised_kernel, grid, *arguments, **constants)
    return outputs
