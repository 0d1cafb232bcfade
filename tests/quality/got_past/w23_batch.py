"""vllm-project/vllm#48391: said to be batch invariant, but a row's sum is added up in another order from 256 rows on.

Its block is 1024 wide for fewer rows, and 256 wide for these. Every value is right.
"""

import torch
import triton
import triton.language as tl

from normcheck import Implementation


@triton.jit
def kernel(X, W, Y, stride, M, N, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, THREADS)[None, :]
    squares = tl.zeros((ROWS, THREADS), dtype=tl.float32)
    for at in range(0, N, THREADS):
        x = tl.load(X + rows * stride + at + cols, mask=(rows < M) & (at + cols < N), other=0.0).to(tl.float32)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=1) / N + eps)
    every = tl.arange(0, BLOCK)[None, :]
    inside = (rows < M) & (every < N)
    x = tl.load(X + rows * stride + every, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + every, mask=every < N, other=0.0).to(tl.float32)
    tl.store(Y + rows * N + every, (x * rstd[:, None] * w).to(Y.dtype.element_ty), mask=inside)


def forward(x, weight, bias=None, *, eps):
    m, n = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        rows = min(triton.next_power_of_2(m), 256)  # Triton's interpreter takes as long for one row as for all of these
        widths = {"BLOCK": triton.next_power_of_2(n), "THREADS": 1024 if m < 256 else 256}
        kernel[(triton.cdiv(m, rows),)](x, weight, y, x.stride(0), m, n, eps, ROWS=rows, **widths)
    return y


IMPLEMENTATIONS = (Implementation(name="w23", op="rmsnorm", forward=forward, biases=(False,), batch_invariant=True),)
