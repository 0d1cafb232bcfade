"""Kernels that take one stride for another in ordinary cases of their op, and right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.core import core
from normcheck.cases.ops import OPS
from normcheck.cases.strides import in_channels_last
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.gate.plan import PROFILES
from normcheck.impls.adapt import adapt
from normcheck.runner.call import poisoned_memory

Kernel = Callable[..., Any]


@pytest.fixture(autouse=True)
def _as_in_a_sweep() -> Iterator[None]:
    with poisoned_memory():
        yield


def cell_of(kernel: Kernel, op: str) -> Cell:
    mine = Implementation(name="mine", op=op, forward=adapt(kernel)[0], biases=(True,))
    cell = Cell(OPS[op], mine, "fp16", "mine")
    assert not why_not(cell, "cpu")
    return cell


def first(cell: Cell, holds: Callable[[Case], bool]) -> Result:
    """What comes of the first case of the core that is such a one."""
    case = next(one.case for one in core(cell.claims, PROFILES["quick"].extent, 0) if holds(one.case))
    return check(cell.implementation, cell.op, case, "cpu", UNPROBED)


def modulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed * (1 + scale.float()[:, None]) + shift.float()[:, None]).to(x.dtype)


def by_rows(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Row r of all samples is read at r times the row stride, as a kernel of one grid axis does."""
    rows = x.as_strided((x.shape[0] * x.shape[1], x.shape[2]), (x.stride(1), 1)) if x.shape[1] > 1 else x
    return modulated(rows.reshape(x.shape), scale, shift, eps)


def viewed(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """It has rows of one stride alone, and says so by an exception."""
    return modulated(x.view(-1, x.shape[2]).view(x.shape), scale, shift, eps)


def several(case: Case) -> bool:
    return case.layout == "samples_strided" and 1 < case.batch < case.M


@pytest.mark.slow
def test_tokens_that_were_cut_off_longer_samples() -> None:
    op = "layernorm_modulate"
    assert not first(cell_of(modulated, op), several).failed
    assert first(cell_of(by_rows, op), several).wrong
    refused = first(cell_of(viewed, op), several)
    assert not refused.failed and "layout=samples_strided" in refused.refused


class Grouped(torch.autograd.Function):
    """Its backward reads dy in the layout of x if ``alike``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float, alike: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.own = groups, eps, alike
        return normed(x, groups, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        groups, eps, alike = ctx.own
        x, *rest = ctx.saved_tensors
        if alike and dy.stride() != x.stride():
            dy = dy.as_strided(dy.shape, x.stride())
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in (x, *rest)]
            y = normed(leaves[0], groups, *leaves[1:], eps)
            found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], dy))
        dx, dw, db = (None if t is None else next(found) for t in leaves)
        return dx, None, dw, db, None, None


def normed(x: Any, groups: int, weight: Any, bias: Any, eps: float) -> Tensor:
    wide = None if bias is None else bias.float()
    return torch.nn.functional.group_norm(x.float(), groups, weight.float(), wide, eps).to(x.dtype)


@pytest.mark.parametrize("alike", [False, True])
def test_x_or_dy_alone_in_channels_last_memory(alike: bool) -> None:
    def kernel(x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float) -> Any:
        return Grouped.apply(x, groups, weight, bias, eps, alike)  # type: ignore[no-untyped-call]

    def holds(case: Case) -> bool:
        return case.layout == "channels_last" and min(case.shape[1:]) > 1 and case.rows != "zero"

    cell = cell_of(kernel, "groupnorm")
    every = [
        first(cell, lambda case, own=own: holds(case) and in_channels_last(case) == own)
        for own in (("x", "dy"), ("x",), ("dy",))
    ]
    assert [bool(result.wrong) for result in every] == [False, alike, alike]
