# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels that norm the heads of q and k and rotate them, forward and backward; v is copied.

A row here is a head of a token. A program takes several, each whole, as three tiles: the first columns of all pairs,
the second ones, and what is not rotated. So a thread has both columns of a pair. If they lie side by side, they are
loaded together and split.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.grouped import rows_of
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import ceil_div, power_of_two, tile

FORWARD_ELEMENTS, ELEMENTS = 512, 2048
"""Elements for each program on a GPU, in the forward and of the gradients. Chosen from six each on an H100."""

_LONGEST = 65536
"""Columns of the widest heads, which one program holds."""


@triton.jit
def load_pairs(ptr, at, here, P, PAIRED: tl.constexpr, PAIRS: tl.constexpr):
    """The first and the second columns of pairs, (ROWS, PAIRS) each, of heads that begin at ``at`` (ROWS, 1)."""
    pair = tl.arange(0, PAIRS)[None, :]
    if PAIRED:
        cols = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(ptr + at + cols, mask=here & (cols < 2 * P), other=0.0)
        first, second = tl.split(tl.reshape(both, (at.shape[0], PAIRS, 2)))
    else:
        first = tl.load(ptr + at + pair, mask=here & (pair < P), other=0.0)
        second = tl.load(ptr + at + P + pair, mask=here & (pair < P), other=0.0)
    return first, second


@triton.jit
def store_pairs(ptr, at, first, second, here, P, PAIRED: tl.constexpr, PAIRS: tl.constexpr):
    """Store what ``load_pairs`` loads."""
    pair = tl.arange(0, PAIRS)[None, :]
    if PAIRED:
        cols = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), (at.shape[0], 2 * PAIRS))
        tl.store(ptr + at + cols, both, mask=here & (cols < 2 * P))
    else:
        tl.store(ptr + at + pair, first, mask=here & (pair < P))
        tl.store(ptr + at + P + pair, second, mask=here & (pair < P))


@triton.jit
def load_weights(ptr, here, P, PAIRED: tl.constexpr, PAIRS: tl.constexpr):
    """The weights at ``ptr`` (ROWS, 1), as ``load_pairs`` has their columns, in fp32."""
    first, second = load_pairs(ptr, tl.zeros(ptr.shape, tl.int32), here, P, PAIRED, PAIRS)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_angles(cos_ptr, sin_ptr, tokens, stride, here, P, PAIRS: tl.constexpr):
    """cos and sin of each pair, tiles (ROWS, PAIRS) in fp32."""
    pair = tl.arange(0, PAIRS)[None, :]
    at, mask = tokens[:, None] * stride + pair, here & (pair < P)
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("M",))
def rotary_kernel(
    x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr, x_stride, angle_stride,
    M, H, Q, NORMED, D, P, eps,
    PAIRED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the M = T * H heads. The first Q of a token are of q, the first NORMED are normed."""
    rows, tokens, heads = rows_of(M, H, ROWS)
    here, normed = (rows < M)[:, None], (heads < NORMED)[:, None]
    weight_ptr = tl.where((heads < Q)[:, None], q_weight_ptr, k_weight_ptr)
    x_at, y_at = (tokens * x_stride + heads * D)[:, None], (rows * D)[:, None]
    stored1, stored2 = load_pairs(x_ptr, x_at, here, P, PAIRED, PAIRS)
    cos, sin = load_angles(cos_ptr, sin_ptr, tokens, angle_stride, here & normed, P, PAIRS)
    w1, w2 = load_weights(weight_ptr, here & normed, P, PAIRED, PAIRS)
    x1, x2 = stored1.to(tl.float32), stored2.to(tl.float32)
    total = tl.sum(x1 * x1 + x2 * x2, axis=1)
    if REST:
        cols = 2 * P + tl.arange(0, REST)[None, :]
        stored = tl.load(x_ptr + x_at + cols, mask=here & (cols < D), other=0.0)
        x = stored.to(tl.float32)
        total += tl.sum(x * x, axis=1)
    variance = tl.div_rn(total, tl.full((ROWS,), D, tl.float32))
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + tokens * NORMED + heads, rstd, mask=(rows < M) & (heads < NORMED))
    rstd = rstd[:, None]
    n1, n2 = x1 * rstd * w1, x2 * rstd * w2
    y1 = tl.where(normed, (n1 * cos - n2 * sin).to(stored1.dtype), stored1)
    y2 = tl.where(normed, (n2 * cos + n1 * sin).to(stored1.dtype), stored2)
    store_pairs(y_ptr, y_at, y1, y2, here, P, PAIRED, PAIRS)
    if REST:
        y = x * rstd * tl.load(weight_ptr + cols, mask=here & normed & (cols < D), other=0.0).to(tl.float32)
        tl.store(y_ptr + y_at + cols, tl.where(normed, y.to(stored.dtype), stored), mask=here & (cols < D))


@triton.jit(do_not_specialize=("M",))
def rotary_gradient_kernel(
    dy_ptr, x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, dy_stride, x_stride, angle_stride,
    M, H, Q, NORMED, D, P,
    PAIRED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dx of the same heads: dy rotated back is the cotangent of a norm with the weight of q or k."""
    rows, tokens, heads = rows_of(M, H, ROWS)
    here, normed = (rows < M)[:, None], (heads < NORMED)[:, None]
    weight_ptr = tl.where((heads < Q)[:, None], q_weight_ptr, k_weight_ptr)
    dy_at, x_at, dx_at = tokens * dy_stride + heads * D, tokens * x_stride + heads * D, rows * D
    dy_at, x_at, dx_at = dy_at[:, None], x_at[:, None], dx_at[:, None]
    stored1, stored2 = load_pairs(dy_ptr, dy_at, here, P, PAIRED, PAIRS)
    x1, x2 = load_pairs(x_ptr, x_at, here & normed, P, PAIRED, PAIRS)
    cos, sin = load_angles(cos_ptr, sin_ptr, tokens, angle_stride, here & normed, P, PAIRS)
    w1, w2 = load_weights(weight_ptr, here & normed, P, PAIRED, PAIRS)
    rstd = tl.load(rstd_ptr + tokens * NORMED + heads, mask=(rows < M) & (heads < NORMED), other=0.0)[:, None]
    dy1, dy2 = stored1.to(tl.float32), stored2.to(tl.float32)
    wd1, wd2 = (dy1 * cos + dy2 * sin) * w1, (dy2 * cos - dy1 * sin) * w2
    xhat1, xhat2 = x1.to(tl.float32) * rstd, x2.to(tl.float32) * rstd
    total = tl.sum(xhat1 * wd1 + xhat2 * wd2, axis=1)
    if REST:
        cols = 2 * P + tl.arange(0, REST)[None, :]
        stored = tl.load(dy_ptr + dy_at + cols, mask=here & (cols < D), other=0.0)
        own = here & normed & (cols < D)
        wd = stored.to(tl.float32) * tl.load(weight_ptr + cols, mask=own, other=0.0).to(tl.float32)
        xhat = tl.load(x_ptr + x_at + cols, mask=own, other=0.0).to(tl.float32) * rstd
        total += tl.sum(xhat * wd, axis=1)
    c1 = tl.div_rn(total, tl.full((ROWS,), D, tl.float32))[:, None]
    dx1 = tl.where(normed, ((wd1 - xhat1 * c1) * rstd).to(stored1.dtype), stored1)
    dx2 = tl.where(normed, ((wd2 - xhat2 * c1) * rstd).to(stored1.dtype), stored2)
    store_pairs(dx_ptr, dx_at, dx1, dx2, here, P, PAIRED, PAIRS)
    if REST:
        dx = ((wd - xhat * c1) * rstd).to(stored.dtype)
        tl.store(dx_ptr + dx_at + cols, tl.where(normed, dx, stored), mask=here & (cols < D))


@cache
def _constants(M: int, D: int, pairs: int, *, on_gpu: bool, elements: int) -> dict[str, int]:
    """The constants of a kernel for M heads of D columns, of which so many ``pairs`` are rotated."""
    t = tile(M, D, on_gpu=on_gpu, elements=elements, max_block=_LONGEST)
    rest = D - 2 * pairs
    blocks = {"PAIRS": power_of_two(pairs), "REST": power_of_two(rest) if rest else 0}
    return {"ROWS": t.rows, **blocks, "num_warps": t.warps}


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
        constants = _constants(T * H, D, cos.shape[1], on_gpu=x.is_cuda, elements=FORWARD_ELEMENTS)
        launch(
            rotary_kernel, (ceil_div(T * H, constants["ROWS"]),), x, q_weight, k_weight, cos, sin, y, rstd, x.stride(0),
            cos.stride(0), T * H, H, q_heads, normed, D, cos.shape[1], eps, PAIRED=interleaved, **constants,
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
        constants = _constants(T * H, D, cos.shape[1], on_gpu=x.is_cuda, elements=ELEMENTS)
        launch(
            rotary_gradient_kernel, (ceil_div(T * H, constants["ROWS"]),), dy, x, q_weight, k_weight, cos, sin,
            rstd.contiguous(), dx, dy.stride(0), x.stride(0), cos.stride(0), T * H, H, q_heads, normed, D,
            cos.shape[1], PAIRED=interleaved, **constants,
        )  # fmt: skip
    return {"dx": dx}
