"""A right RMSNorm in Triton that tries ten configurations at each new N, in each dtype: half a second each."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 512, 1024, 2048, 4096) for warps in (4, 8)
]


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.jit
def _normed(x_ptr, weight_ptr, y_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares) / N + eps)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < N
        x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + columns, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=inside)


def rmsnorm(x, weight, eps):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0]:
        _normed[(rows.shape[0],)](rows, weight, y, rows.stride(0), rows.shape[-1], eps)
    return y
