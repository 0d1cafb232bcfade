"""The mended twin of w03, accused by lablup/mlxcel#830 and acquitted by #1033: if a row needs two groups of threads, a
block holds one row."""

import torch
import triton
import triton.language as tl

from normcheck import Implementation


@triton.jit
def kernel(X, W, Y, stride, M, N, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE_BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(X + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, axis=1)
    if WHOLE_BLOCK:
        squares = squares * 0 + tl.sum(squares, axis=0)
    rstd = 1 / tl.sqrt(squares / N + eps)
    w = tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * w[None, :]
    tl.store(Y + rows[:, None] * N + cols[None, :], y.to(Y.dtype.element_ty), mask=inside)


def forward(x, weight, bias=None, *, eps):
    m, n = x.shape
    vector = 16 // x.element_size()
    rows = 2 if n <= 32 * vector else 1
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        kernel[(triton.cdiv(m, rows),)](
            x,
            weight,
            y,
            x.stride(0),
            m,
            n,
            eps,
            ROWS=rows,
            BLOCK=triton.next_power_of_2(n),
            WHOLE_BLOCK=False,
        )
    return y


IMPLEMENTATIONS = (Implementation(name="w03ok", op="rmsnorm", forward=forward, biases=(False,)),)
