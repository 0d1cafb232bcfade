"""Rank 4, and a norm over several trailing dimensions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.cases.case import Case, with_rows
from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.layouts import RANK4, TRAILING
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import check
from normcheck.errors import UsageError
from normcheck.gate.engine import verdict_of
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.discovery import implementations, validated
from normcheck.runner.call import poisoned_memory


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """LayerNorm over the dimensions of its weight."""
    wide = None if bias is None else bias.float()
    y = torch.nn.functional.layer_norm(x.float(), weight.shape, weight.float(), wide, eps)
    return {"y": y.to(x.dtype)}


def of_last_dimension(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """The statistics of the last dimension alone."""
    xhat = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], None, None, eps)
    z = xhat * weight.float() + (0.0 if bias is None else bias.float())
    return {"y": z.to(x.dtype)}


def first_of_batch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """Of rank 4 it takes the first of the outer batch for all."""
    return layernorm(x[:1].expand_as(x) if x.dim() == 4 else x, weight, bias, eps=eps)


def mine(forward: object, **fields: object) -> Implementation:
    return Implementation(name="mine", op="layernorm", forward=forward, **fields)  # type: ignore[arg-type]


def verdict(implementation: Implementation, *layouts: str) -> str:
    cell = Cell(OPS["layernorm"], implementation, "fp16", "mine", layouts)
    plan = Plan(cells=(cell,), device="cpu", seed=0, profile=replace(PROFILES["quick"], max_examples=90), timeout=60.0)
    return verdict_of(cell, plan, lambda cases, worst: None).status


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12, 60, 64, 1000])
def test_rank_4_factors_the_rows(rows: int) -> None:
    case = Case(op="layernorm", dtype="fp16", M=rows, N=5, layout=RANK4)
    shape = make(case, OPS["layernorm"], "cpu").x.shape
    assert tuple(shape) == case.shape and len(shape) == case.rank == 4
    assert math.prod(shape[:-1]) == rows and shape[-1] == 5


@pytest.mark.parametrize(("columns", "sides"), [(1, (1, 1)), (7, (1, 7)), (12, (3, 4)), (64, (8, 8)), (768, (24, 32))])
def test_two_dimensions_are_normed(columns: int, sides: tuple[int, int]) -> None:
    case = Case(op="layernorm", dtype="fp16", M=3, N=columns, layout=TRAILING)
    inputs = make(case, OPS["layernorm"], "cpu")
    assert inputs.weight is not None and inputs.bias is not None
    assert tuple(inputs.x.shape) == (3, *sides) and tuple(inputs.weight.shape) == tuple(inputs.bias.shape) == sides
    flat = inputs.flat(case).weight
    assert flat is not None and flat.shape == (columns,)
    assert with_rows(case, 1).shape == (1, *sides)
    usual = make(Case(op="layernorm", dtype="fp16", M=3, N=columns), OPS["layernorm"], "cpu")
    assert torch.equal(inputs.x.reshape(3, columns), usual.x)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("layout", [RANK4, TRAILING])
def test_a_right_kernel_passes_and_a_wrong_one_fails(layout: str, dtype: str) -> None:
    case = Case(op="layernorm", dtype=dtype, M=12, N=24, layout=layout, seed=3)
    wrong = of_last_dimension if layout == TRAILING else first_of_batch
    with poisoned_memory():
        right = check(mine(layernorm), OPS["layernorm"], case, "cpu")
        assert not right.failed and {"y", "dx", "dw", "db"} <= {c.output for c in right.checked}
        assert right.probed is not None and all(right.probed.invariant.values()) and right.probed.invariant
        found = check(mine(wrong), OPS["layernorm"], case, "cpu")
    assert "y" in {c.output for c in found.wrong}


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "layout", "status"), [
    (layernorm, RANK4, "pass"), (layernorm, TRAILING, "pass"), (first_of_batch, RANK4, "fail"),
    (of_last_dimension, TRAILING, "fail"),
])  # fmt: skip
def test_a_sweep_of_what_is_declared(forward: object, layout: str, status: str) -> None:
    assert verdict(mine(forward, ranks=(2, 3, 4), trailing=True), layout) in (status, "thin" * (status == "pass"))


def test_what_is_not_declared_is_not_asked() -> None:
    assert {RANK4, TRAILING}.isdisjoint(Cell(OPS["layernorm"], mine(layernorm), "fp16", "mine").claims.layouts)
    both = Cell(OPS["layernorm"], mine(layernorm, ranks=(2, 3, 4), trailing=True), "fp16", "mine").claims.layouts
    assert {RANK4, TRAILING} <= set(both)
    assert next(i for i in implementations()["torch"] if i.op == "layernorm").ranks == (2, 3, 4)


def test_without_a_weight_nothing_says_what_is_normed() -> None:
    with pytest.raises(UsageError, match="the shape of the weight says what is normed"):
        validated(mine(layernorm, trailing=True, weights=(False, True)), "mine")
    with pytest.raises(UsageError, match="the weight says what is normed"):
        parsed("layernorm fp16 M=3 N=9 layout=trailing weights=none")
