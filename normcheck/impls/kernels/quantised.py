# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
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
from normcheck.impls.kernels.holds import with_room
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import Tile, ceil_div, group_rows, tile, tiles

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
RESIDUAL_CODE_TILES = tiles(
    Tile(rows=8, block=256, warps=4, stages=3, groups=924),
    Tile(rows=2, block=512, warps=1, stages=3, groups=2112),
    Tile(rows=2, block=1024, warps=2),
    Tile(rows=1, block=2048, warps=4),
    Tile(rows=1, block=4096, warps=8),
    Tile(rows=1, block=8192, warps=16, stages=3, groups=132),
    Tile(rows=1, block=16384, warps=16, stages=3, groups=132),
)
"""From 1024 columns on chosen from some 30 each on an H200, for the least loss over scales that are given, of a row and
of a block; the narrower ones are not measured."""


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


@triton.jit
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
def looped_quantised_kernel(
    x_ptr, weight_ptr, q_ptr, scale_ptr, residual_ptr, sum_ptr,
    x_stride, residual_stride, M, N, eps, scale_ub, least, group_rows,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for rows of one block. One program: group_rows rows, ROWS at a time; it reads w and a given scale once.

    The next rows are being loaded (STAGES in all) while these are computed. The largest |y| of a row is that of x * w,
    times rstd, so that one reduction gives both. If x * w overflows, or loses bits that a code has, y is x * rstd * w.
    """
    cols = tl.arange(0, BLOCK)
    weight = load_scale(weight_ptr, cols, N, False)[None, :]
    ones = tl.full((ROWS,), 1.0, tl.float32)
    if COLUMNS is None:
        given = tl.div_rn(ones, ones * tl.load(scale_ptr))
    first = tl.program_id(0).to(tl.int64) * group_rows
    for start in tl.range(first, tl.minimum(first + group_rows, M), ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = load_sum(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, mask)
        if COLUMNS == 0:
            y = x * weight
            total, most = tl.reduce((x * x, tl.abs(y)), 1, sum_and_most)
            rstd = rstd_of(total, N, eps, ROWS)
            scale = scale_of(most * rstd, scale_ub, least, LARGEST)
            safe = (most < float("inf")) & (scale >= rstd * SMALLEST)
            y *= rstd[:, None]
            if tl.min(safe.to(tl.int32), axis=0) == 0:
                if residual_ptr is None:  # x is read again: if it stayed in registers, every row would take longer
                    x = load_tile(x_ptr, rows, cols, x_stride, mask)
                y = x * rstd[:, None] * weight
                scale = scale_of(tl.max(tl.abs(y), axis=1), scale_ub, least, LARGEST)
            tl.store(scale_ptr + rows, scale, mask=rows < M)
            y *= tl.div_rn(ones, scale)[:, None]
        else:
            y = x * rstd_of(tl.sum(x * x, axis=1), N, eps, ROWS)[:, None] * weight
            if COLUMNS is None:
                y *= given[:, None]
            else:
                y = by_block(y, scale_ptr, rows, 0, M, N, scale_ub, least, LARGEST, COLUMNS, ROWS, BLOCK)
        store_codes(y, q_ptr, rows, cols, M, N, LARGEST)


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int, residual_bytes: int) -> Tile:
    """The tile for rows of N elements; ``residual_bytes``: those of an element of x and one of the residual, if any."""
    chosen = RESIDUAL_CODE_TILES if residual_bytes else CODE_TILES
    t = tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block, chosen=chosen, wide=WIDE)
    return with_room(t, residual_bytes) if residual_bytes else t


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
        residual_bytes = 0 if residual is None else x.element_size() + residual.element_size()
        t = how or _tile(M, N, on_gpu=x.is_cuda, max_block=max_block, residual_bytes=residual_bytes)
        arguments = (
            x, weight, q, scale, residual, sums, x.stride(0), None if residual is None else residual.stride(0),
            M, N, eps, scale_ub, least,
        )  # fmt: skip
        constants = {
            "LARGEST": LARGEST[dtype], "COLUMNS": columns and min(columns, t.block),
            "ROWS": t.rows, "BLOCK": t.block, "num_warps": t.warps,
        }  # fmt: skip
        if t.stages > 1 and t.block >= N:
            per_group = group_rows(M, t.rows, t.groups)
            grid = (ceil_div(M, per_group),)
            launch(looped_quantised_kernel, grid, *arguments, per_group, STAGES=t.stages, **constants)
        else:
            launch(quantised_kernel, (ceil_div(M, t.rows),), *arguments, **constants)
    return outputs
