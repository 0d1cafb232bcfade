"""RMSNorms that are wrong for one class of sizes: an octave of N with several rows, or rows past 32768.

A block takes two rows if they fit, and one sum over the block mixes both (ml-explore/mlx#3792); or registers hold the
first 32768 columns of a row, and the sum is over those (intel/llm-scaler#510).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck import Implementation

LONG = 32768
"""In place of an octave: rows that are longer."""


def _shares(octave: int, m: int, n: int) -> bool:
    return octave != LONG and m > 1 and octave // 2 < n <= octave


def of_torch(octave: int) -> Implementation:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
        wide = x.float()
        squares = (wide[:, :LONG] if octave == LONG else wide).square().sum(-1, keepdim=True)
        if _shares(octave, *x.shape):
            squares = squares.sum(0, keepdim=True).expand(x.shape[0], 1)
        return (wide * torch.rsqrt(squares / x.shape[-1] + eps) * weight.float()).to(x.dtype)

    return Implementation(name="by_torch", op="rmsnorm", forward=forward, biases=(False,))


@triton.jit
def _kernel(X, W, Y, stride, M, N, limit, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(X + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(tl.where((cols < limit)[None, :], x * x, 0.0), axis=1)
    if SHARED:
        squares = squares * 0 + tl.sum(squares, axis=0)
    rstd = 1 / tl.sqrt(squares / N + eps)
    w = tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(
        Y + rows[:, None] * N + cols[None, :], (x * rstd[:, None] * w[None, :]).to(Y.dtype.element_ty), mask=inside
    )


def of_triton(octave: int) -> Implementation:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
        m, n = x.shape
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        if m:
            rows, limit = 2 if n <= LONG else 1, LONG if octave == LONG else n
            _kernel[(triton.cdiv(m, rows),)](
                *(x, weight, y, x.stride(0), m, n, limit, eps),
                ROWS=rows,
                BLOCK=triton.next_power_of_2(n),
                SHARED=_shares(octave, m, n),
            )
        return y

    return Implementation(name="by_triton", op="rmsnorm", forward=forward, biases=(False,))
