"""RMSNorms in Triton that launch one kernel or another, for what a profiler sees on a GPU.

``normcheck verify --impl tests/quality/gpu_launching_kernels.py:NAME --verbose``. All of them are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck import Implementation
from tests.quality.context_kernels import gradients


@triton.jit
def _few_columns(x, weight, y, N, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0), tl.arange(0, block)
    own = columns < N
    values = tl.load(x + row * N + columns, mask=own, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt_rn(tl.sum(values * values) / N + eps)
    scaled = values * rstd * tl.load(weight + columns, mask=own, other=0.0).to(tl.float32)
    tl.store(y + row * N + columns, scaled, mask=own)


@triton.jit
def _many_columns(x, weight, y, N, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row, total = tl.program_id(0).to(tl.int64), tl.zeros((block,), tl.float32)
    for start in range(0, N, block):
        columns = start + tl.arange(0, block)
        values = tl.load(x + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
        total += values * values
    rstd = 1 / tl.sqrt_rn(tl.sum(total) / N + eps)
    for start in range(0, N, block):
        columns = start + tl.arange(0, block)
        own = columns < N
        values = tl.load(x + row * N + columns, mask=own, other=0.0).to(tl.float32)
        scaled = values * rstd * tl.load(weight + columns, mask=own, other=0.0).to(tl.float32)
        tl.store(y + row * N + columns, scaled, mask=own)


@triton.jit
def _of_m_rows(x, weight, y, N, eps, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.program_id(0) < rows:
        _many_columns(x, weight, y, N, eps, block)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, launch: Callable[..., None]) -> Tensor:
        packed = x.contiguous()
        y = torch.empty_like(packed)
        if y.numel():
            launch(packed, weight, y, x.shape[-1], eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + ctx.eps)
        return *gradients(dy, x, weight, rstd), None, None


def _by_columns(x: Tensor, weight: Tensor, y: Tensor, columns: int, eps: float) -> None:
    kernel, block = (_few_columns, 1024) if columns <= 1024 else (_many_columns, 2048)
    kernel[(x.numel() // columns,)](x, weight, y, columns, eps, block=block)


def _by_rows(x: Tensor, weight: Tensor, y: Tensor, columns: int, eps: float) -> None:
    rows = x.numel() // columns
    _of_m_rows[(rows,)](x, weight, y, columns, eps, rows=rows, block=1024)


def two_ways(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """One kernel up to 1024 columns, another above."""
    y: Tensor = _Norm.apply(x, weight, eps, _by_columns)
    return y


def for_each_m(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Each number of rows has a kernel of its own compiled."""
    y: Tensor = _Norm.apply(x, weight, eps, _by_rows)
    return y


def falls_back(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """The kernel of its own is never reached: no row has so many columns."""
    if x.shape[-1] > 1 << 40:
        return two_ways(x, weight, bias, eps=eps)
    xf = x.float()
    return (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _declared(name: str, forward: Callable[..., Tensor], expects: str = "") -> Implementation:
    return Implementation(name=name, op="rmsnorm", forward=forward, biases=(False,), expects_kernel=expects)


IMPLEMENTATIONS = (
    _declared("two_ways", two_ways),
    _declared("for_each_m", for_each_m),
    _declared("engaged", two_ways, "^_(few|many)_columns$"),
    _declared("never_engaged", falls_back, "^_(few|many)_columns$"),
)
