"""What a kernel does if nobody wants a gradient, on the cases of a core: a shorter way is found where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.ask import FULLY, Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.serving import is_served
from normcheck.circumstances import WRONG
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.result import CONTEXT
from tests.quality.context_kernels import Right, function, no_grad_saves_nothing, plain

Function = Callable[..., Any]
CASE = parsed("rmsnorm fp16 M=9 N=33 eps=1e-05 rows=blend dy=normal layout=contiguous seed=2 bias=none")


def serving(way: Function) -> Function:
    """A kernel that goes this ``way`` if nobody wants gradients, and is right otherwise."""

    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Any:
        return function(Right)(x, weight, bias, eps=eps) if torch.is_grad_enabled() else way(x, weight, eps)

    return forward


def in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = plain(x, weight, eps)[0]
    x.copy_(y)
    return y


def raises(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise RuntimeError("no gradient, no norm")


FAULTS: dict[str, tuple[Function, dict[str, Any], str]] = {
    "packed rows": (lambda x, w, eps: plain(x.as_strided(x.shape, (33, 1)), w, eps)[0],
                    {"layout": "x_strided", "gap": 8}, "y is outside its bound"),
    "whole vectors": (lambda x, w, eps: plain(torch.cat([x[:, :32], 0 * x[:, 32:]], 1), w, eps)[0], {},
                      "y is outside its bound"),
    "no NaN": (lambda x, w, eps: plain(x.nan_to_num(), w, eps)[0], {"rows": "nan"}, "y is outside its bound"),
    "no rows": (lambda x, w, eps: plain(x, w, eps)[0].flatten(), {"M": 0}, "y.shape=(0,): expected (0, 33)"),
    "another dtype": (lambda x, w, eps: plain(x.float(), w, eps)[0], {}, "y.dtype=torch.float32"),
    "in place": (in_place, {}, "x was modified: "),
    "nothing": (lambda x, w, eps: {"rstd": plain(x, w, eps)[1].flatten()}, {}, "forward returned"),
    "an exception": (raises, {}, "forward raised RuntimeError: no gradient, no norm"),
}  # fmt: skip


def of(forward: Function, case: Case, ask: Ask = FULLY) -> Result:
    mine = Implementation(name="mine", op="rmsnorm", forward=forward, biases=(False,))
    return check(mine, OPS["rmsnorm"], case, "cpu", ask)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [2, 3])
def test_a_fault_without_gradients_is_one_of_inference(fault: str, seed: int) -> None:
    """Under torch.no_grad() and, with an odd seed, torch.inference_mode(). The usual call alone shows none of them."""
    way, fields, says = FAULTS[fault]
    case = replace(CASE, **{"seed": seed, **fields})
    (problem,) = of(serving(way), case).problems
    mode = "torch.inference_mode()" if seed % 2 else "torch.no_grad()"
    assert (problem.kind, problem.check) == (CONTEXT, "inference")
    assert says in problem.message and f"under {mode}" in problem.message
    assert of(serving(way), case).contexts["inference"].status == WRONG
    assert not of(serving(way), case, replace(FULLY, serving=False)).failed


@pytest.mark.parametrize(
    "forward", [function(Right), no_grad_saves_nothing, serving(lambda x, w, eps: plain(x, w, eps)[0])]
)
@pytest.mark.parametrize("fields", [{}, {"M": 0}, {"rows": "nan"}, {"rows": "inf"}, {"layout": "strided", "gap": 3}])
def test_a_right_kernel_has_none(forward: Function, fields: dict[str, Any]) -> None:
    assert not of(forward, replace(CASE, **fields)).failed


def test_other_bits_are_right_within_their_bounds() -> None:
    def in_fp64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)

    assert not of(serving(in_fp64), CASE).failed


def test_a_kernel_without_a_graph_is_called_so_in_one_of_four_cases() -> None:
    own = Implementation(name="mine", op="rmsnorm", forward=plain, backward=plain)
    served = [is_served(own, OPS["rmsnorm"], replace(CASE, seed=seed)) for seed in range(8)]
    assert served == [True, False, False, False] * 2
    assert is_served(replace(own, backward=None), OPS["rmsnorm"], replace(CASE, seed=1))


def test_a_cell_finds_it_where_no_context_is_tried_and_names_the_smallest_case() -> None:
    """Rows of more than one block, of an odd length: of the shapes on which contexts are tried none has these."""

    def way(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return plain(x, weight, 0.0 if x.shape[0] in range(2, 9) and 64 < x.shape[1] < 512 else eps)[0]

    mine = Implementation(name="mine", op="rmsnorm", forward=serving(way), biases=(False,))
    cell = Cell(OPS["rmsnorm"], mine, "fp32", "mine.py")
    plan = Plan((cell,), PROFILES["quick"], 0, "cpu", 120.0, contexts=("inference",))
    verdict = run_cell(cell, plan, lambda *_: None)
    assert verdict.status == "fail" and verdict.failure is not None
    assert verdict.failure.kind == CONTEXT and "--context inference" in verdict.failure.reproduce
    assert run_case(cell, parsed(verdict.failure.case), plan).failed
    assert run_cell(cell, replace(plan, contexts=()), lambda *_: None).status == "pass"
