"""pytorch/pytorch#69208: the vectorised LayerNorm takes weight and bias for a pair: no bias, no weight applied.

Rows that are no multiple of 4, and tensors that are not aligned, take the other path, which is right.
"""

import torch
import triton
import triton.language as tl

from normcheck import Implementation


@triton.jit
def kernel(X, W, B, Y, MEAN, R, stride, N, eps, SCALED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    x = tl.load(X + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / N + eps)
    y = centred * rstd
    if SCALED:
        y = y * tl.load(W + cols, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        y = y + tl.load(B + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * N + cols, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(R + row, rstd)


def forward(x, weight, bias=None, *, eps):
    m, n = x.shape
    y, mean, rstd = (
        torch.empty(m, n, dtype=x.dtype, device=x.device),
        torch.empty(m, device=x.device),
        torch.empty(m, device=x.device),
    )
    vectors = n % 4 == 0 and x.stride(0) % 4 == 0 and x.data_ptr() % (4 * x.element_size()) == 0
    scaled = bias is not None if vectors else True
    if m:
        kernel[(m,)](
            x,
            weight,
            bias,
            y,
            mean,
            rstd,
            x.stride(0),
            n,
            eps,
            SCALED=scaled,
            SHIFTED=bias is not None,
            BLOCK=triton.next_power_of_2(n),
        )
    return {"y": y, "mean": mean, "rstd": rstd}


IMPLEMENTATIONS = (Implementation(name="w09", op="layernorm", forward=forward),)
