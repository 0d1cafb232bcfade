"""ROCm/FlyDSL#800: eps is a constant of the compiled kernel, and no part of the key under which that is kept.

Whoever comes first with this N and this dtype decides eps for all.
"""

import torch
import triton
import triton.language as tl

from normcheck import Implementation


@triton.jit
def kernel(X, W, Y, stride, N, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    x = tl.load(X + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / N + EPS)
    w = tl.load(W + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * N + cols, (x * rstd * w).to(Y.dtype.element_ty), mask=inside)


built = {}


def build(n, dtype, eps):
    if (n, dtype) not in built:
        built[n, dtype] = lambda m, *tensors: kernel[(m,)](*tensors, n, EPS=eps, BLOCK=triton.next_power_of_2(n))
    return built[n, dtype]


def forward(x, weight, bias=None, *, eps):
    m, n = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        build(n, x.dtype, eps)(m, x, weight, y, x.stride(0))
    return y


IMPLEMENTATIONS = (Implementation(name="w24", op="rmsnorm", forward=forward, biases=(False,)),)
