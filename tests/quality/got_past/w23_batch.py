"""vllm-project/vllm#48391: said to be batch invariant, but a row's sum is added up in another order from 256 rows on.

Its block is 1024 wide for fewer rows, and 256 wide for these. Every value is right.
"""

import torch
import triton
import triton.language as tl

from normcheck import Implementation


@triton.jit
def kernel(X, W, Y, stride, N, eps, BLOCK: tl.constexpr, THREADS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, THREADS)
    squares = tl.zeros((THREADS,), dtype=tl.float32)
    for at in range(0, N, THREADS):
        x = tl.load(X + row * stride + at + cols, mask=at + cols < N, other=0.0).to(tl.float32)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    every = tl.arange(0, BLOCK)
    inside = every < N
    x = tl.load(X + row * stride + every, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + every, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * N + every, (x * rstd * w).to(Y.dtype.element_ty), mask=inside)


def forward(x, weight, bias=None, *, eps):
    m, n = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        kernel[(m,)](
            x, weight, y, x.stride(0), n, eps, BLOCK=triton.next_power_of_2(n), THREADS=1024 if m < 256 else 256
        )
    return y


IMPLEMENTATIONS = (Implementation(name="w23", op="rmsnorm", forward=forward, biases=(False,), batch_invariant=True),)
