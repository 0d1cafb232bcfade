# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels that norm the heads of q and k and rotate them, forward and backward; v is copied.

A row here is a head of a token. A program takes several, each whole. The other column of a pair is read again, and not
exchanged between threads: it lies in the cache, and any number of columns may be rotated.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import Tile, ceil_div, tile

FORWARD_ELEMENTS, ELEMENTS = 1024, 4096
"""Elements for each program on a GPU, in the forward and of the gradients."""

_LONGEST = 65536
"""Columns of the widest heads, which one program holds."""


@triton.jit
def heads_at(ptr, tokens, heads, cols, stride, D):
    """Pointers to columns of heads, (ROWS, BLOCK)."""
    return ptr + (tokens * stride + heads * D)[:, None] + cols[None, :]


@triton.jit
def other_of_pair(cols, P, PAIRED: tl.constexpr):
    """Of each column the other one of its pair, that pair's number, and whether the column is its second; (BLOCK,)."""
    if PAIRED:
        return cols ^ 1, cols // 2, cols % 2 == 1
    second = cols >= P
    pair = tl.where(second, cols - P, cols)
    return tl.where(second, pair, cols + P), pair, second


@triton.jit
def load_weight(q_weight_ptr, k_weight_ptr, heads, cols, Q, mask):
    """The weight of q or of k, as a tile (ROWS, BLOCK) in fp32."""
    of_q = tl.load(q_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    return tl.where((heads < Q)[:, None], of_q[None, :], of_k[None, :])


@triton.jit
def load_angles(cos_ptr, sin_ptr, tokens, pair, stride, mask):
    """cos and sin of each column, tiles (ROWS, BLOCK) in fp32; 0 where nothing is rotated."""
    at = tokens[:, None] * stride + pair[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("M",))
def rotary_kernel(
    x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr, x_stride, angle_stride,
    M, H, Q, NORMED, D, P, eps, PAIRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the M = T * H heads. The first Q of a token are of q, the first NORMED are normed."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens, heads, cols = rows // H, rows % H, tl.arange(0, BLOCK)
    here, turned = (rows < M)[:, None] & (cols < D)[None, :], cols < 2 * P
    stored = tl.load(heads_at(x_ptr, tokens, heads, cols, x_stride, D), mask=here, other=0.0)
    x = stored.to(tl.float32)
    variance = tl.div_rn(tl.sum(x * x, axis=1), tl.full((ROWS,), D, tl.float32))
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    normed = heads < NORMED
    tl.store(rstd_ptr + tokens * NORMED + heads, rstd, mask=(rows < M) & normed)
    other, pair, second = other_of_pair(cols, P, PAIRED)
    both = here & (turned & (other < D))[None, :]
    n = x * rstd[:, None] * load_weight(q_weight_ptr, k_weight_ptr, heads, cols, Q, cols < D)
    there = tl.load(heads_at(x_ptr, tokens, heads, other, x_stride, D), mask=both, other=0.0).to(tl.float32)
    there = there * rstd[:, None] * load_weight(q_weight_ptr, k_weight_ptr, heads, other, Q, turned & (other < D))
    cos, sin = load_angles(cos_ptr, sin_ptr, tokens, pair, angle_stride, both)
    rotated = n * cos + tl.where(second[None, :], there * sin, -there * sin)
    y = tl.where(turned[None, :], rotated, n).to(stored.dtype)
    y = tl.where(normed[:, None], y, stored)
    tl.store(heads_at(y_ptr, tokens, heads, cols, H * D, D), y, mask=here)


@triton.jit(do_not_specialize=("M",))
def rotary_gradient_kernel(
    dy_ptr, x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, dy_stride, x_stride, angle_stride,
    M, H, Q, NORMED, D, P, PAIRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of the same heads: dy rotated back is the cotangent of a norm with the weight of q or k."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens, heads, cols = rows // H, rows % H, tl.arange(0, BLOCK)
    here, turned = (rows < M)[:, None] & (cols < D)[None, :], cols < 2 * P
    stored = tl.load(heads_at(dy_ptr, tokens, heads, cols, dy_stride, D), mask=here, other=0.0)
    dy, normed = stored.to(tl.float32), heads < NORMED
    other, pair, second = other_of_pair(cols, P, PAIRED)
    both = here & (turned & (other < D))[None, :]
    there = tl.load(heads_at(dy_ptr, tokens, heads, other, dy_stride, D), mask=both, other=0.0).to(tl.float32)
    cos, sin = load_angles(cos_ptr, sin_ptr, tokens, pair, angle_stride, both)
    rotated = dy * cos + tl.where(second[None, :], -there * sin, there * sin)
    g = tl.where(turned[None, :], rotated, dy)
    wd = g * load_weight(q_weight_ptr, k_weight_ptr, heads, cols, Q, cols < D)
    rstd = tl.load(rstd_ptr + tokens * NORMED + heads, mask=(rows < M) & normed, other=0.0)
    x = tl.load(heads_at(x_ptr, tokens, heads, cols, x_stride, D), mask=here, other=0.0).to(tl.float32)
    xhat = x * rstd[:, None]
    c1 = tl.div_rn(tl.sum(xhat * wd, axis=1), tl.full((ROWS,), D, tl.float32))
    dx = ((wd - xhat * c1[:, None]) * rstd[:, None]).to(dx_ptr.dtype.element_ty)
    dx = tl.where(normed[:, None], dx, stored)
    tl.store(heads_at(dx_ptr, tokens, heads, cols, H * D, D), dx, mask=here)


@cache
def _tile(M: int, D: int, *, on_gpu: bool, elements: int) -> Tile:
    return tile(M, D, on_gpu=on_gpu, elements=elements, max_block=_LONGEST)


def forward(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    q_heads: int,
    k_heads: int,
    interleaved: bool,
) -> dict[str, Tensor]:
    """Norm and rotate the heads of q and k in x (T, N), with last stride 1; weights (D,), cos and sin (T, pairs) of one
    row stride.

    Returns y (T, N) in the dtype of x, and rstd (T, q_heads + k_heads) in fp32.
    """
    (T, N), D, normed = x.shape, q_weight.shape[0], q_heads + k_heads
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    rstd = torch.empty((T, normed), dtype=torch.float32, device=x.device)
    H = N // D
    if T:
        t = _tile(T * H, D, on_gpu=x.is_cuda, elements=FORWARD_ELEMENTS)
        launch(
            rotary_kernel, (ceil_div(T * H, t.rows),), x, q_weight, k_weight, cos, sin, y, rstd, x.stride(0),
            cos.stride(0), T * H, H, q_heads, normed, D, cos.shape[1], eps, PAIRED=interleaved, ROWS=t.rows,
            BLOCK=t.block, num_warps=t.warps,
        )  # fmt: skip
    return {"y": y, "rstd": rstd}


def backward(
    dy: Tensor,
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rstd: Tensor,
    q_heads: int,
    k_heads: int,
    interleaved: bool,
) -> dict[str, Tensor]:
    """dx (T, N) in the dtype of x, from dy and x (T, N), last stride 1, and the saved rstd; the rest as of forward."""
    (T, N), D, normed = x.shape, q_weight.shape[0], q_heads + k_heads
    dx = torch.empty((T, N), dtype=x.dtype, device=x.device)
    H = N // D
    if T:
        t = _tile(T * H, D, on_gpu=x.is_cuda, elements=ELEMENTS)
        launch(
            rotary_gradient_kernel, (ceil_div(T * H, t.rows),), dy, x, q_weight, k_weight, cos, sin,
            rstd.contiguous(), dx, dy.stride(0), x.stride(0), cos.stride(0), T * H, H, q_heads, normed, D,
            cos.shape[1], PAIRED=interleaved, ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
        )  # fmt: skip
    return {"dx": dx}
