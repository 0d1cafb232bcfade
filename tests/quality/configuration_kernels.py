"""RMSNorms in Triton whose autotuners have a configuration that is wrong and never wins, and right ones of that make.

``normcheck verify --impl tests/quality/configuration_kernels.py:NAME``. On a GPU a configuration that must not win does
its work many times over; without one the interpreter takes the first. ``WRONG`` has the kernel, the number and the
output of each wrong one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.impls.kernels import interpreter

if not torch.cuda.is_available():
    interpreter.enable()

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

SLOW = 200 if torch.cuda.is_available() else 1


@triton.jit
def _forward(x_ptr, weight_ptr, y_ptr, rstd_ptr, stride, N, eps, BLOCK: tl.constexpr, TAIL: tl.constexpr,  # type: ignore[no-untyped-def]
             MASKED: tl.constexpr, TIMES: tl.constexpr):  # fmt: skip
    """A program for each row. Without TAIL the mean square has whole blocks alone; without MASKED y has no end."""
    row = tl.program_id(0).to(tl.int64)
    for _ in range(TIMES):
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N if TAIL or N < BLOCK else N // BLOCK * BLOCK, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
            squares += x * x
        rstd = 1.0 / tl.sqrt(tl.sum(squares) / N + eps)
        tl.store(rstd_ptr + row, rstd)
        for start in range(0, N, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < N
            x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            stored = inside if MASKED else columns < N + 1
            tl.store(y_ptr + row * N + columns, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _of_x(dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dy_stride, stride, N, BLOCK: tl.constexpr, TAIL: tl.constexpr,  # type: ignore[no-untyped-def]
          TIMES: tl.constexpr):  # fmt: skip
    """dx of a row. Without TAIL the sum over a row has whole blocks alone."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    for _ in range(TIMES):
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N if TAIL or N < BLOCK else N // BLOCK * BLOCK, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=columns < N, other=0.0).to(tl.float32)
            products += x * rstd * dy * tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        mean = tl.sum(products) / N
        for start in range(0, N, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < N
            x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            dx = rstd * (dy * weight - x * rstd * mean)
            tl.store(dx_ptr + row * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_weight(dy_ptr, x_ptr, rstd_ptr, dw_ptr, dy_stride, stride, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
               TAIL: tl.constexpr, TIMES: tl.constexpr):  # fmt: skip
    """dw of a block of columns. Without TAIL it sums whole blocks of rows alone."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(TIMES):
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, M if TAIL or M < ROWS else M // ROWS * ROWS, ROWS):
            rows = (start + tl.arange(0, ROWS))[:, None]
            inside = (rows < M) & (columns < N)[None, :]
            x = tl.load(x_ptr + rows * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + rows * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            sums += tl.sum(dy * x * tl.load(rstd_ptr + rows, mask=rows < M, other=0.0), 0)
        tl.store(dw_ptr + columns, sums.to(dw_ptr.dtype.element_ty), mask=columns < N)


def config(block: int, *, warps: int = 4, wins: bool = True, hook: Any = None, **more: Any) -> triton.Config:
    """A configuration; one that never ``wins`` does its work many times over on a GPU."""
    meta = {"BLOCK": block, "TAIL": True, "TIMES": 1 if wins else SLOW, **more}
    return triton.Config(meta, num_warps=warps, pre_hook=hook)


def forward_config(block: int, *, masked: bool = True, **more: Any) -> triton.Config:
    """One of ``_forward``."""
    return config(block, MASKED=masked, **more)


_FORWARD = [forward_config(256), forward_config(64, wins=False)]
_OF_X = [config(256), config(64, wins=False)]
_OF_WEIGHT = [config(64, ROWS=16), config(32, ROWS=32, wins=False)]


def kernel(
    name: str, forward: Any = None, of_x: Any = None, of_weight: Any = None, prune: dict[str, Any] | None = None
) -> Implementation:
    """An RMSNorm whose three tuners have these configurations, or two right ones; ``prune``: of its forward."""
    tuned = triton.autotune(forward or _FORWARD, key=["N"], prune_configs_by=prune)(_forward)
    tuned_x = triton.autotune(of_x or _OF_X, key=["N"])(_of_x)
    tuned_weight = triton.autotune(of_weight or _OF_WEIGHT, key=["N"])(_of_weight)

    def of_rows(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> dict[str, Tensor]:
        rows, n = x.shape
        y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            tuned[(rows,)](x, weight, y, rstd, x.stride(0), n, eps)
        return {"y": y, "rstd": rstd}

    def of_gradients(
        dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: dict[str, Tensor], *, eps: float
    ) -> dict[str, Tensor]:
        rows, n = x.shape
        rstd = saved["rstd"].reshape(-1)
        dx = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        dw = torch.zeros(n, dtype=weight.dtype, device=x.device)
        if rows:
            tuned_x[(rows,)](dy, x, weight, rstd, dx, dy.stride(0), x.stride(0), n)
            blocks = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
            tuned_weight[blocks](dy, x, rstd, dw, dy.stride(0), x.stride(0), rows, n)
        return {"dx": dx, "dw": dw}

    return Implementation(name=name, op="rmsnorm", forward=of_rows, backward=of_gradients, biases=(False,))


def _too_much(_: Any) -> None:
    raise OutOfResources(1 << 20, 227 << 10, "shared memory")


def _only_right(configs: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
    return [each for each in configs if each.kwargs["TAIL"]]


_SHORT = forward_config(64, wins=False, TAIL=False)
_TWELVE = [forward_config(block, warps=warps) for block in (32, 64, 128, 256, 512, 1024) for warps in (4, 8)]

WRONG = {
    "tail": (kernel("tail", [*_FORWARD, _SHORT]), "_forward", 2, "rstd"),
    "unmasked": (kernel("unmasked", [*_FORWARD, forward_config(128, wins=False, masked=False)]), "_forward", 2, "y"),
    "tail_of_dx": (kernel("tail_of_dx", of_x=[*_OF_X, config(64, wins=False, TAIL=False)]), "_of_x", 2, "dx"),
    "rows_of_dw": (
        kernel("rows_of_dw", of_weight=[*_OF_WEIGHT, config(64, ROWS=16, wins=False, TAIL=False)]),
        *("_of_weight", 2, "dw"),
    ),
}
"""Name -> the implementation, the kernel and the number of its wrong configuration, the output that is wrong."""

TWELVE = kernel("twelve", _TWELVE)
PRUNED = kernel("pruned", [*_FORWARD, _SHORT], prune={"early_config_prune": _only_right})
NOT_AMONG_THE_BEST = kernel(
    "not_among_the_best", [*_FORWARD, _SHORT], prune={"perf_model": lambda TAIL, **_: 0 if TAIL else 1, "top_k": 2}
)
UNLAUNCHABLE = kernel("unlaunchable", [*_FORWARD, forward_config(128, hook=_too_much)])

IMPLEMENTATIONS = (*(each for each, *_ in WRONG.values()), TWELVE, PRUNED, NOT_AMONG_THE_BEST, UNLAUNCHABLE)
