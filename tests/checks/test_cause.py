"""The cause of a wrong dx: told first and in one line, and only where the graph and the numbers of the case say it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from normcheck import Implementation
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.cause import cause
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.finding import finding
from normcheck.impls.adapt import adapt
from normcheck.reports._failure import put_failure
from normcheck.result import Finding
from tests.command_line import Cli

KINDS = ("normal", "offset", "tiny_variance", "constant", "outlier", "shifted", "small_offset")


def rmsnorm_twice(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The commonest RMSNorm there is."""
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def layernorm_twice(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    xf = x.float()
    rstd = torch.rsqrt(xf.var(-1, unbiased=False, keepdim=True) + eps)
    return ((x - xf.mean(-1, keepdim=True)) * rstd * weight.float() + bias.float()).to(x.dtype)


def layernorm_three_times(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = x.float().mean(-1, keepdim=True)
    rstd = torch.rsqrt((x.float() - mean).pow(2).mean(-1, keepdim=True) + eps)
    return ((x.float() - mean) * rstd * weight.float() + bias.float()).to(x.dtype)


def of(op: str, function: Callable[..., Any]) -> Implementation:
    return Implementation(name="mine", op=op, forward=adapt(function)[0])


def result_of(implementation: Implementation, **fields: Any) -> Result:
    op = OPS[implementation.op]
    case = Case(**{"op": op.name, "dtype": "fp16", "M": 4, "N": 24, "bias": op.biases[0], **fields})
    return check(implementation, op, case, "cpu", UNPROBED)


def cause_of(result: Result) -> str:
    return cause(OPS[result.case.op], result)


def found(implementation: Implementation, result: Result) -> Finding:
    cell = Cell(OPS[implementation.op], implementation, result.case.dtype, "mine.py")
    return finding(cell, result, "cpu")


UPCASTS = [("rmsnorm", rmsnorm_twice, "twice"), ("layernorm", layernorm_twice, "twice"),
           ("layernorm", layernorm_three_times, "3 times")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("op", "function", "times"), UPCASTS, ids=lambda v: getattr(v, "__name__", v))
def test_every_double_upcast_has_its_cause(op: str, function: Callable[..., Any], times: str, dtype: str) -> None:
    expected = f"x is upcast {times}; each gradient is rounded to {dtype} before they are added. Upcast once."
    failed = []
    for kind in KINDS:
        for N in (1, 2, 24, 129):
            result = result_of(of(op, function), dtype=dtype, rows=kind, N=N, seed=1)
            if result.failed:
                failed.append(cause_of(result))
                assert {c.output for c in result.wrong} == {"dx"}
    assert len(failed) > 6
    assert set(failed) == {expected}


def with_a_gradient(of_x: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """rmsnorm, x upcast twice, with something of x added that changes only its gradient."""

    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = rmsnorm_twice(x, weight, eps)
        more = of_x(x, y)
        return y + (more - more.detach())

    return forward


@pytest.mark.parametrize(
    ("what", "of_x"),
    [
        ("too much by far", lambda x, y: x * 1000),
        ("too much by a little", lambda x, y: x * 0.02),
        ("NaN", lambda x, y: (x - x).sqrt().nan_to_num(0.0)),
    ],
)
def test_another_mistake_has_not_this_cause(what: str, of_x: Callable[[Tensor, Tensor], Tensor]) -> None:
    result = result_of(of("rmsnorm", with_a_gradient(of_x)), dy="shifted")
    assert result.failed
    assert result.joined > 1
    assert cause_of(result) == "", what


class TwiceInside(torch.autograd.Function):
    """An RMSNorm whose one gradient is wrong by about a rounding: x is upcast twice, but autograd sees it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rmsnorm_twice(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            dx, dw = torch.autograd.grad(rmsnorm_twice(x, weight, ctx.eps), (x, weight), *gradients)
        return dx, dw, None


def test_an_autograd_function_hands_over_one_gradient() -> None:
    result = result_of(of("rmsnorm", lambda x, weight, eps: TwiceInside.apply(x, weight, eps)))
    assert {c.output for c in result.wrong} == {"dx"}
    assert result.joined == 1
    assert cause_of(result) == ""


def test_a_backward_of_its_own_has_no_graph() -> None:
    mine = replace(
        CLEAN.implementation("mine", "layernorm"), backward=lambda dy, *_, **__: {"dx": dy, "dw": dy[0], "db": dy[0]}
    )
    result = result_of(mine)
    assert result.failed
    assert (result.joined, cause_of(result)) == (0, "")


def test_torch_in_half_precision_has_another_cause() -> None:
    def native(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    result = result_of(of("layernorm", native), rows="shifted")
    assert result.failed
    assert (result.joined, cause_of(result)) == (1, "")
    assert found(of("layernorm", native), result).advice == ""


@pytest.mark.parametrize("fields", [{"rows": "nan"}, {"dy": "inf"}, {"dtype": "fp32"}], ids=str)
def test_where_nothing_is_rounded_there_is_no_cause(fields: dict[str, str]) -> None:
    result = result_of(of("rmsnorm", with_a_gradient(lambda x, y: x * 3)), **fields)
    assert cause_of(result) == ""


def test_a_wrong_y_comes_before_it() -> None:
    result = result_of(of("rmsnorm", lambda x, weight, eps: rmsnorm_twice(x, weight, eps) * 1.01))
    assert "y" in {c.output for c in result.wrong}
    assert cause_of(result) == ""


def test_the_cause_is_the_first_line_under_the_headline() -> None:
    mine = of("rmsnorm", rmsnorm_twice)
    told = found(mine, result_of(mine))
    stream = io.StringIO()
    put_failure(Console(file=stream, width=120), "rmsnorm mine fp16", told)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "FAIL rmsnorm mine fp16: dx is wrong (end to end)"
    assert lines[1] == f"  Cause: {told.cause}"
    assert lines[2].startswith("  Mismatched elements: ")
    assert told.advice == ""


@pytest.mark.slow
def test_the_graph_is_counted_where_it_is(cli: Cli, tmp_path: Path) -> None:
    """In the process of the implementation."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n\ndef mine(x, weight, eps):\n"
        "    r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)\n"
        "    return (x.float() * r * weight.float()).to(x.dtype)\n"
    )
    line = "rmsnorm fp16 M=4 N=24 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0 bias=none"
    done = cli("repro", f"{file}:mine", line, "--device", "cpu", "--isolation")
    assert done.code == 1
    assert "  Cause: x is upcast twice; each gradient is rounded to fp16 before" in done.out
