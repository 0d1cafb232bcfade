# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of norms by the length of x. On a CPU, call ``interpreter.enable()`` before you import this.

    s     = sum(x^2)
    rstd  = 1 / sqrt(s + eps), 1 / sqrt(s + N eps), or 1 / max(sqrt(s), eps)
    y     = x * rstd

    c     = sum(x * rstd * dy), 0 if the row is divided by eps
    dx    = (dy - x * rstd * c) * rstd

fp32 inside, one rounding at each store. x and dy have row strides of their own. Which rows were divided by eps backward
finds from x, which it reads in any case: rstd may be somebody else's, and another rounding of 1 / eps.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.forward import load_tile
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import ROW_COUNTS, Tile, ceil_div, tile

MAX_BLOCK = 16384
"""Columns of the widest rows that one program holds; wider ones are read twice."""

ELEMENTS = 2048
"""Elements for each program on a GPU, if rows are narrower, and for each warp."""


@triton.jit(do_not_specialize=ROW_COUNTS)
def l2norm_kernel(
    x_ptr, y_ptr, rstd_ptr, x_stride, M, N, eps, FLOOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows, of which the first BLOCK columns stay in registers. eps is what is added."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    first_cols = tl.arange(0, BLOCK)
    first = load_tile(x_ptr, rows, first_cols, x_stride, here & (first_cols < N)[None, :])
    squares = first * first
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        x = load_tile(x_ptr, rows, cols, x_stride, here & (cols < N)[None, :])
        squares += x * x
    total = tl.sum(squares, axis=1)
    if FLOOR:
        length = tl.sqrt_rn(total)
        length = tl.where(length < eps, eps, length)  # a NaN stays one
    else:
        length = tl.sqrt_rn(total + eps)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), length)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    mask = here & (first_cols < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + first_cols[None, :], first * rstd[:, None], mask=mask)
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        x = load_tile(x_ptr, rows, cols, x_stride, mask)
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], x * rstd[:, None], mask=mask)


@triton.jit(do_not_specialize=ROW_COUNTS)
def l2norm_gradient_kernel(
    dy_ptr, x_ptr, rstd_ptr, dx_ptr, dy_stride, x_stride, M, N, eps,
    FLOOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx. One program: ROWS whole rows, of which the first BLOCK columns stay in registers."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    first_cols = tl.arange(0, BLOCK)
    mask = here & (first_cols < N)[None, :]
    first_x = load_tile(x_ptr, rows, first_cols, x_stride, mask)
    first_dy = load_tile(dy_ptr, rows, first_cols, dy_stride, mask)
    first = first_x * rstd[:, None]
    squares = first_x * first_x
    products = first * first_dy
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        x = load_tile(x_ptr, rows, cols, x_stride, mask)
        products += x * rstd[:, None] * load_tile(dy_ptr, rows, cols, dy_stride, mask)
        if FLOOR:
            squares += x * x
    c = tl.sum(products, axis=1)
    if FLOOR:
        c = tl.where(tl.sqrt_rn(tl.sum(squares, axis=1)) < eps, 0.0, c)
    store_dx(first, first_dy, c, rstd, dx_ptr, rows, first_cols, M, N)
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        y = load_tile(x_ptr, rows, cols, x_stride, mask) * rstd[:, None]
        store_dx(y, load_tile(dy_ptr, rows, cols, dy_stride, mask), c, rstd, dx_ptr, rows, cols, M, N)


@triton.jit
def store_dx(y, dy, c, rstd, dx_ptr, rows, cols, M, N):
    """dx of the tiles y and dy (ROWS, BLOCK)."""
    dx = (dy - y * c[:, None]) * rstd[:, None]
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=(rows < M)[:, None] & (cols < N)[None, :])


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int) -> Tile:
    return tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, per_warp=ELEMENTS, max_block=max_block)


def _added(eps: float, how: str, columns: int) -> float:
    """What is added to the sum of squares, or eps itself if that is a floor."""
    return eps * columns if how == "mean" else eps


def forward(x: Tensor, *, eps: float, how: str = "sum", max_block: int = MAX_BLOCK) -> dict[str, Tensor]:
    """Divide the rows of x (M, N), last stride 1, by their length; ``how``: what eps does, see ``oracle/l2norm.py``.

    Returns y (M, N) in the dtype of x and rstd (M,) in fp32. ``max_block``: a limit in place of MAX_BLOCK.
    """
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    rstd = torch.empty((M,), dtype=torch.float32, device=x.device)
    if M:
        t = _tile(M, N, on_gpu=x.is_cuda, max_block=max_block)
        launch(
            l2norm_kernel, (ceil_div(M, t.rows),), x, y, rstd, x.stride(0), M, N, _added(eps, how, N),
            FLOOR=how == "max", ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
        )  # fmt: skip
    return {"y": y, "rstd": rstd}


def backward(
    dy: Tensor, x: Tensor, *, rstd: Tensor, eps: float, how: str = "sum", max_block: int = MAX_BLOCK
) -> dict[str, Tensor]:
    """dx (M, N) in the dtype of x from dy and x (M, N), last stride 1, and the saved rstd (M,)."""
    M, N = x.shape
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if M:
        t = _tile(M, N, on_gpu=x.is_cuda, max_block=max_block)
        launch(
            l2norm_gradient_kernel, (ceil_div(M, t.rows),), dy, x, rstd.contiguous(), dx, dy.stride(0), x.stride(0),
            M, N, _added(eps, how, N), FLOOR=how == "max", ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
        )  # fmt: skip
    return {"dx": dx}
