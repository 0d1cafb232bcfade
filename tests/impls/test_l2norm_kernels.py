"""Our kernels of norms by length are within their bounds in every layout, in one block or several; users' functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.bench.speed import BACKWARD, FORWARD, Point
from normcheck.bench.suites import OWN_COUNTS
from normcheck.cases.case import Case
from normcheck.cases.case_line import parse
from normcheck.cases.claims import claims_of
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES, Plan
from normcheck.golden.record import record_plan
from normcheck.impls import torch_l2norm
from normcheck.impls.adapt import adapt, require_named
from normcheck.impls.discovery import wrapped
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import EPS_OF
from normcheck.impls.triton import IMPLEMENTATIONS as TRITON
from normcheck.runner.device import device_for
from tests.inner_loop import parametrize

DEVICE = device_for("auto")
OP = OPS["l2norm"]
OURS = {own.name: own for own in TRITON if own.op == OP.name}
TORCH = {own.name: own for own in torch_l2norm.IMPLEMENTATIONS}


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own = {"M": 20, "N": 129, "dtype": "bf16", "seed": 2, "bias": False, "rows": "blend", "weights": "none", **fields}
    return check(implementation, OP, Case(**{"op": OP.name, **own}), DEVICE, Ask())  # type: ignore[arg-type]


@parametrize("layout", ["contiguous", "misaligned", "x_strided", "dy_strided", "strided", "rank3"], inner=1)
@pytest.mark.parametrize("name", EPS_OF)
def test_our_kernels_are_right_in_every_layout(name: str, layout: str) -> None:
    gap = 8 if "strided" in layout else 0
    result = result_of(OURS[name], layout=layout, gap=gap, eps=0.1)
    assert not result.failed, result
    assert {c.output for c in result.checked} == {"y", "rstd", "dx"}


@pytest.mark.parametrize("name", EPS_OF)
def test_rows_wider_than_a_block_are_as_right(name: str) -> None:
    """Of the rows one is shorter than eps."""
    from normcheck.impls.kernels import l2norm

    case = Case(op=OP.name, dtype="fp32", M=4, N=50, bias=False, weights="none", seed=1, eps=0.5)
    inputs = make(case, OP, DEVICE)
    inputs.x[1] *= 2.0**-10
    found = []
    for block in (64, 16):
        own: dict[str, Any] = {"eps": case.eps, "how": EPS_OF[name], "max_block": block}
        saved = l2norm.forward(inputs.x, **own)
        found.append({**saved, **l2norm.backward(inputs.dy, inputs.x, rstd=saved["rstd"], **own)})
    assert found[0].keys() == {"y", "rstd", "dx"}
    for output, whole in found[0].items():
        torch.testing.assert_close(found[1][output], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EPS_OF)
def test_a_nan_stays_in_its_row(name: str) -> None:
    result = result_of(OURS[name], M=5, N=40, rows="nan")
    assert not result.failed, result


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("layout", ["contiguous", "heads", "rank4"])
def test_those_of_torch_are_right(name: str, layout: str) -> None:
    for M in (24, 0):
        result = result_of(TORCH[name], M=M, N=128, layout=layout)
        assert not (result.failed or result.refused), result


def in_fp32(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def normalize(x: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.normalize(x.float(), dim=-1, eps=eps).to(x.dtype)


def of_mlx(x: Tensor, eps: float) -> Tensor:
    return (torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps) * x.shape[-1] ** -0.5).to(x.dtype)


def behind_the_root(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (wide.norm(dim=-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize(("function", "how"), [(in_fp32, "sum"), (normalize, "max"), (of_mlx, "mean")])
def test_the_convention_of_a_function_is_found(function: Any, how: str) -> None:
    result = result_of(wrapped(adapt(function), OP.name, "mine", ""))
    assert not result.failed
    assert result.conventions == ((("eps", how),),)


def test_none_that_fits_is_a_finding() -> None:
    result = result_of(wrapped(adapt(behind_the_root), OP.name, "mine", ""), eps=1e-3)
    assert result.failed and result.conventions == ()


def test_a_function_that_must_have_a_weight_is_of_another_op() -> None:
    def weighted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    def either(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        return in_fp32(x, eps)

    with pytest.raises(UsageError, match=r"expected weighted\(x, eps\) -> y, as l2norm has no weight"):
        require_named(adapt(weighted), weighted, OP, "f.py:weighted")
    require_named(adapt(either), either, OP, "f.py:either")
    assert not result_of(wrapped(adapt(either), OP.name, "mine", "")).failed


def test_no_vectors_are_counted_by_a_bench_and_nothing_is_recorded() -> None:
    point = Point(op=OP.name, dtype="bf16", M=3, N=5, bias=False)
    assert [OWN_COUNTS[way].bytes(point) for way in (FORWARD, BACKWARD)] == [2 * 2 * 15, 3 * 2 * 15]
    plan = Plan((Cell(OP, TORCH["torch"], "bf16", "torch"),), PROFILES["quick"], 0, "cpu", 60.0)
    (skipped,) = record_plan(plan, lambda number, cell: None).skipped
    assert skipped.reason == "an op without a weight has no recorded cases yet"


def test_no_case_has_a_weight_whatever_is_declared() -> None:
    made = Implementation(name="mine", op=OP.name, forward=lambda x, *rest, **named: x, trailing=True)
    claims = claims_of(OP, made, "bf16")
    assert (claims.weights, claims.biases, claims.weight_dtypes) == ((False,), (False,), ("same",))
    assert "trailing" not in claims.layouts
    assert parse("l2norm bf16 M=2 N=3").weights == "none"
    with pytest.raises(UsageError, match="weights=normal in the case line: expected one of none"):
        parse("l2norm bf16 M=2 N=3 weights=normal")
