"""What a kernel does in other modes of torch, on the cases of a core: another way is found if it is wrong."""

from __future__ import annotations

from collections import Counter
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
from normcheck.checks.other_modes import mode_of
from normcheck.circumstances import WRONG
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.result import CONTEXT
from normcheck.runner.run import FROZEN, SERVING, THREE_THREADS, UNWANTED
from tests.quality.context_kernels import Right, function, gradients, no_grad_saves_nothing, plain
from tests.some import some

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


ASK = replace(FULLY, other_modes=True)


def of(forward: Function, case: Case, ask: Ask = ASK) -> Result:
    mine = Implementation(name="mine", op="rmsnorm", forward=forward, biases=(False,))
    return check(mine, OPS["rmsnorm"], case, "cpu", ask)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", SERVING)
def test_a_fault_without_gradients_is_one_of_inference(fault: str, mode: str) -> None:
    """The usual call alone shows none of them."""
    way, fields, says = FAULTS[fault]
    case = replace(next(c for c in seeds() if turn(c) == mode), **fields)
    (problem,) = of(serving(way), case).problems
    assert (problem.kind, problem.check) == (CONTEXT, "inference")
    assert says in problem.message and mode in problem.message
    assert of(serving(way), case).contexts["inference"].status == WRONG
    assert not of(serving(way), case, FULLY).failed


@pytest.mark.parametrize(
    "forward", [function(Right), no_grad_saves_nothing, serving(lambda x, w, eps: plain(x, w, eps)[0])]
)
@pytest.mark.parametrize("fields", [{}, {"M": 0}, {"rows": "nan"}, {"rows": "inf"}, {"layout": "strided", "gap": 3}])
def test_a_right_kernel_has_none(forward: Function, fields: dict[str, Any]) -> None:
    assert not of(forward, replace(CASE, **fields)).failed


def own_backward(
    dy: Tensor, x: Tensor, w: Tensor, b: None, saved: dict[str, Tensor], *, eps: float
) -> dict[str, Tensor]:
    dx, dw = gradients(dy, x, w, saved["rstd"].view(*x.shape[:-1], 1))
    return {"dx": dx, "dw": dw}


@pytest.mark.parametrize("own", [False, True])
def test_a_right_kernel_has_none_in_any_mode(own: bool) -> None:
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> dict[str, Tensor]:
        y, rstd = plain(x, weight, eps)
        return {"y": y, "rstd": rstd.flatten()}

    mine = Implementation(name="mine", op="rmsnorm", forward=forward if own else function(Right), biases=(False,))
    mine = replace(mine, backward=own_backward if own else None)
    for case in some(seeds()[:24]):
        assert not check(mine, OPS["rmsnorm"], case, "cpu", ASK).problems


def test_other_bits_are_right_within_their_bounds() -> None:
    def in_fp64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)

    assert not of(serving(in_fp64), CASE).failed


class FrozenWeight(Right):
    """Its dx lacks the mean if nobody wants dw; or there is none."""

    lost = False

    @classmethod
    def of(cls, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor | None:
        return None if cls.lost else (dy.float() * weight.float() * rstd).to(x.dtype)

    @classmethod
    def backward(cls, ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw, _ = Right.backward(ctx, dy)
        return dx if ctx.needs_input_grad[1] else cls.of(dy, *ctx.saved_tensors), dw, None


class NoGradient(FrozenWeight):
    lost = True


@pytest.mark.parametrize(
    ("of_frozen", "says"), [(FrozenWeight, "dx is outside its bound"), (NoGradient, "dx is missing")]
)
def test_a_fault_of_a_frozen_weight_is_one_of_that_context(of_frozen: type[Right], says: str) -> None:
    case = next(c for c in seeds() if turn(c) == FROZEN)
    (problem,) = of(function(of_frozen), case).problems
    assert (problem.kind, problem.check, problem.output) == (CONTEXT, "frozen", "dx")
    assert problem.message == f"{says} with frozen parameters"
    assert not of(function(of_frozen), case, FULLY).failed


class FrozenData(Right):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw, _ = Right.backward(ctx, dy)
        return (
            dx,
            dw if ctx.needs_input_grad[0] or dw is None else dw * (torch.arange(len(dw)) < len(dw) // 8 * 8),
            None,
        )


def test_a_fault_of_a_frozen_x_is_one_of_that_context() -> None:
    """A kernel for dw alone that left out the last columns of 1000 passed: contexts are tried on other sizes."""
    case = next(c for c in seeds() if turn(c) == "with no gradient of x")
    (problem,) = of(function(FrozenData), case).problems
    assert (problem.kind, problem.check, problem.output) == (CONTEXT, "frozen", "dw")
    assert problem.message == "dw is outside its bound with no gradient of x"


def drops_a_row(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """Each thread has as many rows, and nobody the rest."""
    y = function(Right)(x, weight, bias, eps=eps)
    rest = len(x) % torch.get_num_threads()
    return y * (torch.arange(len(x)) < len(x) - rest)[:, None] if torch.get_num_threads() > 1 else y


def test_a_fault_of_several_threads_is_one_of_that_context() -> None:
    case = next(c for c in seeds() if turn(c) == THREE_THREADS)
    (problem,) = of(drops_a_row, replace(case, M=20)).problems  # no multiple of three
    assert (problem.kind, problem.check, problem.output) == (CONTEXT, "threads", "y")
    assert problem.message == "y is outside its bound with 3 torch threads"
    assert torch.get_num_threads() == 1


def seeds() -> list[Case]:
    return [replace(CASE, seed=seed) for seed in range(0, 960, 8)]


def turn(case: Case, device: str = "cpu", own: Any = None) -> str:
    mine = Implementation(name="mine", op="rmsnorm", forward=plain, backward=own)
    return mode_of(mine, OPS["rmsnorm"], case, device)


def test_each_mode_has_its_turn_and_a_kernel_without_a_graph_has_some_in_a_quarter_of_its_cases() -> None:
    turns, others = Counter(map(turn, seeds())), Counter(turn(case, own=plain) for case in seeds())
    assert 15 <= sum(turns[mode] for mode in UNWANTED) <= 25 and 15 <= turns[THREE_THREADS] <= 25
    assert {mode for mode in turns if mode in UNWANTED} == {FROZEN, "with no gradient of x"}  # CASE has no bias
    assert all(35 <= turns[mode] <= 45 for mode in SERVING)
    assert 20 <= others[SERVING[0]] + others[THREE_THREADS] <= 40
    assert {*others} == {SERVING[0], THREE_THREADS, ""}
    assert THREE_THREADS not in {turn(case, "cuda") for case in seeds()}
    assert not {*UNWANTED} & {turn(replace(case, weights="none")) for case in seeds()}


@pytest.mark.slow
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
    assert verdict.contexts["inference"].status == WRONG
    assert run_case(cell, parsed(verdict.failure.case), replace(plan, within=("inference",))).failed
    assert run_cell(cell, replace(plan, contexts=()), lambda *_: None).status == "pass"
