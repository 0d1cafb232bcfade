"""A Triton LayerNorm with a program for each row, as many are written, and three faults that small cases never show.

``good`` is right. ``rows64`` never writes the rows from 64 on; ``half`` normalises by half of the row at a few round
sizes; ``dw32`` sums dw over the first 32 rows only. Gradients come through an autograd.Function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(X, Y, W, B, Mean, Rstd, x_stride, N, taken, eps, LAST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows may lie 2^31 elements apart
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_stride + cols, mask=cols < taken, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / taken
    centred = tl.where(cols < taken, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / taken + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    mask = (cols < N) & (row < LAST)
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    b = tl.load(B + cols, mask=mask).to(tl.float32)
    tl.store(Y + row * N + cols, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def _backward(DY, X, W, Mean, Rstd, DX, DW, DB, dy_stride, x_stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows may lie 2^31 elements apart
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(Rstd + row)
    xhat = tl.where(mask, (x - tl.load(Mean + row)) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    tl.store(DX + row * N + cols, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
    tl.store(DW + row * N + cols, dy * xhat, mask=mask)
    tl.store(DB + row * N + cols, dy, mask=mask)


def _made(*, last: int = 1 << 30, half_of: tuple[int, ...] = (), dw_rows: int | None = None) -> Callable[..., Tensor]:
    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            M, N = x.shape
            y = torch.empty((M, N), dtype=x.dtype, device=x.device)
            mean = torch.empty(M, dtype=torch.float32, device=x.device)
            rstd = torch.empty_like(mean)
            taken, block = N // 2 if N in half_of else N, triton.next_power_of_2(N)
            if M:
                args = (x, y, weight, bias, mean, rstd, x.stride(0), N, taken, eps)
                _forward[(M,)](*args, LAST=last, BLOCK=block)
            ctx.save_for_backward(x, weight, mean, rstd)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, mean, rstd = ctx.saved_tensors
            M, N = x.shape
            dy = dy if dy.stride(-1) == 1 else dy.contiguous()
            dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
            dw, db = (torch.empty((M, N), dtype=torch.float32, device=x.device) for _ in range(2))
            if M:
                args = (dy, x, weight, mean, rstd, dx, dw, db, dy.stride(0), x.stride(0), N)
                _backward[(M,)](*args, BLOCK=triton.next_power_of_2(N))
            return dx, dw[:dw_rows].sum(0).to(weight.dtype), db.sum(0).to(weight.dtype), None

    def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y: Tensor = LayerNorm.apply(x, weight, torch.zeros_like(weight) if bias is None else bias, eps)
        return y

    return layernorm


good = _made()
rows64 = _made(last=64)
half = _made(half_of=(768, 1000, 1024, 1536, 4096))
dw32 = _made(dw_rows=32)
