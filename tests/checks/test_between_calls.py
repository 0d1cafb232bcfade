"""State that is kept between calls: of another case, of other weights, of a copy, or of where a tensor lay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import normcheck
from normcheck import Implementation
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import check
from normcheck.result import CONTEXT, EARLIER_CALLS, Verdict
from normcheck.runner.session import LocalSession
from tests.case_lines import case_of
from tests.command_line import Cli
from tests.quality.context_kernels import Right, function, gradients, plain

latest: dict[Any, Any] = {}


class ColumnsOfLatest(Right):
    """Wrong: backward divides by the columns of the latest forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        latest["columns"] = x.shape[-1]
        return Right.forward(ctx, x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        xhat, d = x.float() * rstd, dy.float() * weight.float()
        mean = (d * xhat).sum(-1, keepdim=True) / latest["columns"]
        return ((d - xhat * mean) * rstd).to(x.dtype), gradients(dy, x, weight, rstd)[1], None


class EpsOfLatest(Right):
    """Wrong: backward computes rstd again, with the eps of the latest forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        latest["eps"] = eps
        return Right.forward(ctx, x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return *gradients(dy, x, weight, plain(x, weight, latest["eps"])[1]), None


class OneWeight(Right):
    """Wrong: what backward gets is the fp32 copy of the weight in a buffer of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kept = latest.setdefault(("weight", len(weight)), torch.empty(len(weight)))
        kept.copy_(weight)
        y, rstd = plain(x, weight, eps)
        ctx.save_for_backward(x, kept.data, rstd)
        ctx.dtype = weight.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw = gradients(dy, *ctx.saved_tensors)
        return dx, None if dw is None else dw.to(ctx.dtype), None


class OnePack(Right):
    """Wrong: rows that lie apart are packed into a buffer of their shape, which backward gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous():
            own = latest.setdefault(("x", x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
            x = own.copy_(x).data
        return Right.forward(ctx, x, weight, eps)


KEEPS = {each.__name__: each for each in (ColumnsOfLatest, EpsOfLatest, OneWeight, OnePack, Right)}
IMPLEMENTATIONS = tuple(
    Implementation(name=name, op="rmsnorm", forward=function(each), biases=(False,)) for name, each in KEEPS.items()
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPS)
def test_what_another_call_leaves_behind_is_found_in_few_cases(cli: Cli, name: str) -> None:
    """By what its process has run before."""
    few = ("--max-examples", "40", "--allow-thin", "--no-contexts", "--report", "json:r.json")
    done = cli("verify", "--impl", f"{__file__}:{name}", "--dtype", "bf16", *few)
    found = json.loads(Path("r.json").read_text())["verdicts"][0]["failure"]
    assert (found is None) == (name == "Right") == (done.code == 0)
    assert found is None or (found["kind"], found["check"]) == ("not_repeatable", EARLIER_CALLS)


CASE = "rmsnorm fp32 M=40 N=32 eps=1e-05 rows=normal dy=normal layout=contiguous seed=3 bias=none"
STRIDED = CASE.replace("layout=contiguous", "layout=x_strided gap=8")


def within(kernel: Callable[..., Tensor], case: str = CASE, **declared: Any) -> Verdict:
    """The verdict on a case in the context ``again``, of a kernel that is right without it."""
    made = Implementation(name="mine", op="rmsnorm", forward=kernel, biases=(False,), **declared)
    assert normcheck.verify(made, op="rmsnorm", case=case)[0].status == "pass"
    (verdict,) = normcheck.verify(made, op="rmsnorm", case=case, context=("again",))
    return verdict


class OneRstd(Right):
    """Wrong: rstd lies in a buffer for so many rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = plain(x, weight, eps)
        kept = latest.setdefault(("rstd", rstd.shape), torch.empty_like(rstd)).copy_(rstd)
        ctx.save_for_backward(x, weight, kept.data)
        return y


class OneRstdOfWideRows(Right):
    """Wrong: as that, if rows are as wide as those of large models."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.shape[-1] >= 4096
        y: Tensor = (OneRstd if wide else Right).forward(ctx, x, weight, eps)
        return y


def test_what_is_kept_for_a_shape_is_found_whichever_case_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three of four cases it was one that ran before, of another N: of wide rows few are left."""
    latest.clear()
    made = Implementation(name="mine", op="rmsnorm", forward=function(OneRstdOfWideRows), biases=(False,))
    case = case_of(CASE.replace("M=40 N=32", "M=2 N=4096"))
    monkeypatch.setattr(LocalSession, "before", (replace(case, N=40, eps=0.1),))
    result = check(made, OPS["rmsnorm"], case, "cpu", Ask(Depth.ROWS))
    assert [problem.check for problem in result.problems] == [EARLIER_CALLS]
    assert "for other inputs before backward" in result.problems[0].message


@pytest.mark.parametrize("case", [CASE, STRIDED])
def test_a_backward_alone_is_judged_if_its_bits_may_differ(case: str) -> None:
    """It was not: without a y nothing was."""
    latest.clear()
    found = within(function(OneRstd), case, deterministic=False).failure
    assert found is not None and (found.kind, found.check, found.output) == (CONTEXT, "again", "dx")
    assert within(function(Right), case, deterministic=False).contexts["again"].status == "held"


def in_place_of_what_is_computed(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: an x that is no leaf is taken for a temporary one."""
    y: Tensor = Right.apply(x, weight, eps)
    if x.grad_fn is not None:
        x.detach().copy_(y.detach())
    return y


class ByAddress(Right):
    """Wrong: backward knows rstd by the address of x, which offloading changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = plain(x, weight, eps)
        latest["at", x.data_ptr()] = rstd
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return *gradients(dy, x, weight, latest.get(("at", x.data_ptr()), torch.ones(len(x), 1))), None


def test_what_is_wrong_within_a_network_alone_is_found() -> None:
    found = within(in_place_of_what_is_computed).failure
    assert found is not None and (found.check, found.output) == ("again", "x")
    latest.clear()
    found = within(function(ByAddress)).failure
    assert found is not None and (found.check, found.output) == ("again", "dx")
    assert "as offloading makes them" in found.message or "after" in found.message


def transposed(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Right: y is a view, through which autograd goes back another way once it was written to."""
    columns, gates = x.float().t().contiguous(), gate.float().t()
    rstd = 1 / torch.sqrt(columns.pow(2).sum(0) / len(columns) + eps)
    return (columns * rstd * weight.float()[:, None] * (0.5 * torch.tanh(0.5 * gates) + 0.5)).to(x.dtype).t()


@pytest.mark.parametrize("rows", [166, 513])
def test_bits_may_be_others_once_a_view_was_written_to(rows: int) -> None:
    case = f"rmsnorm_gated bf16 M={rows} N=64 eps=1e-05 rows=normal dy=normal layout=contiguous seed=5"
    fields = {"op": "rmsnorm_gated", "case": f"{case} weight_dtype=fp32 bias=none gate=normal", "context": ("again",)}
    (verdict,) = normcheck.verify(transposed, **fields)  # type: ignore[arg-type]
    assert (verdict.failure, verdict.contexts["again"].status) == (None, "held")


def test_a_call_between_has_the_strides_of_its_case() -> None:
    """It takes x and the residual with one row stride, as they have in a strided case of an even seed."""

    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        assert x.stride(0) == residual.stride(0)
        stored = x + residual
        return torch.nn.functional.rms_norm(stored, stored.shape[-1:], weight, eps), stored

    mine = Implementation(name="mine", op="fused_add_rmsnorm", forward=forward, biases=(False,))
    for seed in range(4):
        case = case_of(f"fused_add_rmsnorm fp32 M=4 N=16 layout=strided gap=8 bias=none seed={seed}")
        problems = check(mine, OPS[mine.op], case, "cpu", Ask(Depth.ROWS, other_modes=True)).problems
        assert bool(problems) == seed % 2, problems
