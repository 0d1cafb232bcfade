# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""An RMSNorm in Triton for packed rows, right, and with two faults that only more than 2^31 elements show.

``narrow_forward`` and ``narrow_backward`` compute the offset of a row in 32 bits. A row is taken in blocks, and sums of
dw over groups of rows, so that they need little memory and compile fast for any N.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck import Implementation

BLOCK, GROUPS = 1024, 512


@triton.jit
def _forward(X, W, B, Y, Rstd, N, eps, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * N if NARROW else row.to(tl.int64) * N
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + at + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += x * x
    rstd = 1 / tl.sqrt_rn(tl.sum(total, axis=0) / N + eps)
    tl.store(Rstd + row, rstd)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = tl.load(X + at + cols, mask=cols < N, other=0.0).to(tl.float32) * rstd
        y *= tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
        if B is not None:
            y += tl.load(B + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(Y + at + cols, y, mask=cols < N)


@triton.jit
def _dx(DY, X, W, Rstd, DX, N, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * N if NARROW else row.to(tl.int64) * N
    rstd = tl.load(Rstd + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + at + cols, mask=cols < N, other=0.0).to(tl.float32)
        wdy = tl.load(DY + at + cols, mask=cols < N, other=0.0).to(tl.float32)
        wdy *= tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += x * rstd * wdy
    c1 = tl.sum(total, axis=0) / N
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + at + cols, mask=cols < N, other=0.0).to(tl.float32)
        wdy = tl.load(DY + at + cols, mask=cols < N, other=0.0).to(tl.float32)
        wdy *= tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(DX + at + cols, (wdy - x * rstd * c1) * rstd, mask=cols < N)


@triton.jit
def _sums(DY, X, Rstd, DW, DB, M, N, per_group, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    first = group * per_group
    at = first.to(tl.int64) * N
    for row in range(first, tl.minimum(first + per_group, M)):
        dy = tl.load(DY + at + cols, mask=cols < N, other=0.0).to(tl.float32)
        dw += dy * tl.load(X + at + cols, mask=cols < N, other=0.0).to(tl.float32) * tl.load(Rstd + row)
        db += dy
        at += N
    tl.store(DW + group * N + cols, dw, mask=cols < N)
    tl.store(DB + group * N + cols, db, mask=cols < N)


def forward(narrow: bool, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """y as x and rstd (M,) fp32, of packed x (M, N)."""
    M, N = x.shape
    y, rstd = torch.empty_like(x), torch.empty(M, dtype=torch.float32, device=x.device)
    if M:
        _forward[(M,)](x, weight, bias, y, rstd, N, eps, NARROW=narrow, BLOCK=BLOCK)
    return {"y": y, "rstd": rstd}


def backward(narrow: bool, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, saved: dict[str, Tensor], **_):
    """dx as x, dw and db (N,)."""
    M, N = x.shape
    groups = max(min(GROUPS, M), 1)
    dx, rstd = torch.empty_like(x), saved["rstd"].contiguous()
    dw, db = torch.zeros((2, groups, N), dtype=torch.float32, device=x.device)
    if M:
        _dx[(M,)](dy, x, weight, rstd, dx, N, NARROW=narrow, BLOCK=BLOCK)
        grid = (groups, triton.cdiv(N, BLOCK))
        _sums[grid](dy, x, rstd, dw, db, M, N, triton.cdiv(M, groups), BLOCK=BLOCK)
    return {"dx": dx, "dw": dw.sum(0).to(weight.dtype), "db": db.sum(0).to(weight.dtype)}


def _made(name: str, *, narrow: tuple[bool, bool] = (False, False)) -> Implementation:
    calls = partial(forward, narrow[0]), partial(backward, narrow[1])
    return Implementation(name=name, op="rmsnorm", forward=calls[0], backward=calls[1], strided=False)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        outputs = forward(False, x, weight, bias, eps=eps)
        ctx.save_for_backward(x, weight, bias, outputs["rstd"])
        return outputs["y"]

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, rstd = ctx.saved_tensors
        gradients = backward(False, dy.contiguous(), x, weight, bias, {"rstd": rstd})
        return gradients["dx"], gradients["dw"], None if bias is None else gradients["db"], None


def by_autograd(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The right one, whose gradients come through autograd."""
    y: Tensor = _Function.apply(x, weight, bias, eps)
    return y


IMPLEMENTATIONS = (
    _made("right"),
    Implementation(name="right_autograd", op="rmsnorm", forward=by_autograd, strided=False),
    _made("narrow_forward", narrow=(True, False)),
    _made("narrow_backward", narrow=(False, True)),
)
