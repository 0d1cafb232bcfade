"""Faults that an unprepared tester wrote for ops with a residual and codes, and right kernels that were accused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.finding import finding
from normcheck.impls.adapt import adapt
from normcheck.impls.discovery import wrapped
from normcheck.runner.call import poisoned_memory
from tests.inner_loop import parametrize


def mine(function: Any, op: str) -> Implementation:
    return wrapped(adapt(function), op, "mine", "")


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own: dict[str, Any] = {"dtype": "bf16", "M": 5, "N": 24, "seed": 3, "rows": "shifted", "bias": False, **fields}
    with poisoned_memory():
        return check(implementation, OPS[implementation.op], Case(op=implementation.op, **own), "cpu")


def y_of(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stored = x + residual
    return y_of(stored.float(), weight, eps).to(x.dtype), stored


def codes(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stored = x + residual
    y = y_of(stored.float(), weight, eps)
    scale = (y.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-10)
    return (y / scale).round().clamp(-127, 127).to(torch.int8), scale, stored


def codes_of_packed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return codes(x, residual.as_strided(x.shape, (x.shape[-1], 1)), weight, eps)


def codes_and_no_nan(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return codes(torch.nan_to_num(x), torch.nan_to_num(residual), weight, eps)


def no_nan_of_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return added(x, torch.nan_to_num(residual, posinf=0.0), weight, eps)


@pytest.mark.parametrize(
    ("wrong", "op", "fields"),
    [
        (codes_of_packed, "fused_add_rmsnorm_quant", {"layout": "strided", "gap": 3}),
        (codes_and_no_nan, "fused_add_rmsnorm_quant", {"rows": "nan"}),
        (no_nan_of_residual, "fused_add_rmsnorm", {"rows": "nan"}),
        (no_nan_of_residual, "fused_add_rmsnorm", {"rows": "inf"}),
    ],
)
def test_what_becomes_of_a_residual(wrong: Any, op: str, fields: dict[str, Any]) -> None:
    right = codes if op == "fused_add_rmsnorm_quant" else added
    assert not result_of(mine(right, op), **fields).failed
    found = result_of(mine(wrong, op), **fields)
    assert "residual_out" in {one.output for one in (*found.wrong, *found.problems)}


@pytest.mark.parametrize("moved", ["nothing", "swapped", "right"])
def test_in_place_is_where_the_declaration_says(moved: str) -> None:
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float, residual: Tensor, **_: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            y, stored = added(x, residual, weight, eps)
            if moved == "swapped":
                x.copy_(stored)
                residual.copy_(y)
            elif moved == "right":
                x.copy_(y)
                residual.copy_(stored)
        return {"y": y, "residual_out": stored}

    own = Implementation(name="x", op="fused_add_rmsnorm", forward=forward, overwrites=("x", "residual"))
    said = [problem.message for problem in result_of(own).problems]
    assert len(said) == (moved != "right")
    assert all(message.startswith("y was not written to the memory of x, as overwrites says") for message in said)


@pytest.mark.parametrize("rows", ["shifted", "tiny_variance"])
def test_autograd_may_round_the_gradient_of_the_stored_sum_alone(rows: str) -> None:
    def mixed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.float() + residual.float()
        stored = wide.to(x.dtype)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (stored.float() * rstd * weight.float()).to(x.dtype), stored

    def forgotten(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, stored = mixed(x, residual, weight, eps)
        return y, stored.detach() + 0 * y

    own = mine(mixed, "fused_add_rmsnorm")
    for dtype, m, n in (("fp16", 7, 1), ("bf16", 20, 129), ("fp16", 5, 24)):
        assert not result_of(own, dtype=dtype, M=m, N=n, rows=rows, eps=1e-12).failed
    assert result_of(mine(forgotten, "fused_add_rmsnorm"), rows=rows).failed


@pytest.mark.slow
def test_batches_of_256_rows_in_another_order() -> None:
    def by(parts: Any) -> Implementation:
        def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float, **_: Any) -> dict[str, Tensor]:
            squares = x.float().square().reshape(*x.shape[:-1], -1, parts(len(x))).sum(-2)
            total = squares[..., :1]
            for i in range(1, squares.shape[-1]):
                total = total + squares[..., i : i + 1]
            return {"y": x.float() * torch.rsqrt(total / x.shape[-1] + eps) * weight.float()}

        return Implementation(name="x", op="rmsnorm", forward=forward, biases=(False,), batch_invariant=True)

    assert not result_of(by(lambda rows: 8), dtype="fp32", M=257, N=1024).failed
    (problem,) = result_of(by(lambda rows: 8 if rows > 255 else 4), dtype="fp32", M=257, N=1024).problems
    assert (problem.kind, problem.output) == ("not_repeatable", "y")
    assert "among 257 rows than" in problem.message


@pytest.mark.slow
@parametrize("dtype", ["fp16", "bf16", "fp32"], inner=1)
@pytest.mark.parametrize("columns", [600, 1024])
def test_a_variance_in_one_pass_in_long_rows(dtype: str, columns: int) -> None:
    def by(variance: Any) -> Implementation:
        def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            wide = x.float()
            mean = wide.mean(-1, keepdim=True)
            return ((wide - mean) * torch.rsqrt(variance(wide, mean) + eps) * weight.float()).to(x.dtype)

        return mine(forward, "layernorm")

    def one_pass(x: Tensor, mean: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)

    def shifted(x: Tensor, mean: Tensor) -> Tensor:  # one pass too, about the first element: right
        own = x - x[:, :1]
        return own.square().mean(-1, keepdim=True) - own.mean(-1, keepdim=True).square()

    def one_after_another(x: Tensor, mean: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        for column in range(columns):
            total = total + (x[:, column : column + 1] - mean).square()
        return total / columns

    size: dict[str, Any] = {"dtype": dtype, "M": 20, "N": columns, "rows": "offset", "eps": 1e-5}
    assert result_of(by(one_pass), **size).wrong
    for right in (shifted, one_after_another):
        assert not result_of(by(right), **size).failed


def test_words_for_what_comes_back_wrongly() -> None:
    def in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.copy_(y_of(x.float(), weight, eps))

    def three(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        return (*added(x, residual, weight, eps), x)

    own = mine(in_place, "rmsnorm")

    def advice_on(implementation: Implementation) -> str:
        cell = Cell(OPS[implementation.op], implementation, "bf16", "mine")
        return finding(cell, result_of(implementation), "cpu").advice

    assert "compute under torch.no_grad()" in advice_on(own)

    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float, **_: Any) -> dict[str, Tensor]:
        return {"y": y_of(x.float(), weight, eps).to(x.dtype), "xhat": x.float()}

    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        return {"dx": saved["xhat"]}

    forgetful = Implementation(name="x", op="rmsnorm", forward=forward, backward=backward, biases=(False,))
    assert "but no other tensors" in advice_on(forgetful)
    (problem,) = result_of(mine(three, "fused_add_rmsnorm")).problems
    assert problem.message == "forward returned tuple of 3: expected 2: y, residual_out"
