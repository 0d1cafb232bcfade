"""Our kernels of rotated heads are within their bounds in every layout and for any heads; functions of users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.cases.split import HEAD_COLUMNS
from normcheck.checks.ask import Ask
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.impls import torch_rotary
from normcheck.impls.adapt import adapt, require_named
from normcheck.impls.discovery import wrapped
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import IMPLEMENTATIONS as TRITON
from normcheck.runner.device import device_for

DEVICE = device_for("auto")
OP = OPS["qk_norm_rope"]
OURS = {own.name: own for own in TRITON if own.op == OP.name}
LAYOUTS = ("contiguous", "misaligned", "x_strided", "dy_strided", "strided", "dy_expanded")


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own = {"M": 5, "N": 768, "dtype": "bf16", "seed": 2, "bias": False, "head": "64", "kv_heads": "sixth"}
    own |= {"rotary": "half", "angles": "scaled", "weights": "probe", **fields}
    return check(implementation, OP, Case(op=OP.name, **own), DEVICE, Ask())  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_our_kernels_are_right_in_every_layout(name: str, layout: str) -> None:
    result = result_of(OURS[name], layout=layout, gap=8 if "strided" in layout else 0, weight_dtype="fp32")
    assert not result.failed, result
    assert {c.output for c in result.checked} == {"y", "dx", "rstd"}


@pytest.mark.parametrize("rotary", ["all", "quarter", "62"])
@pytest.mark.parametrize("head", HEAD_COLUMNS)
def test_our_kernels_are_right_for_any_heads(head: str, rotary: str) -> None:
    for name in OURS:
        assert not result_of(OURS[name], N=2304, head=head, rotary=rotary, dtype="fp16", kv_heads="one").failed


@pytest.mark.parametrize("rows", [0, 1, 97])
def test_our_kernels_are_right_for_any_rows(rows: int) -> None:
    assert not result_of(OURS["triton"], M=rows, N=192, dtype="fp32").failed


@pytest.mark.parametrize("made", torch_rotary.IMPLEMENTATIONS, ids=lambda made: made.name)
def test_those_of_torch_are_right(made: Implementation) -> None:
    for fields in ({}, {"M": 0}, {"weight_dtype": "fp32", "layout": "strided", "gap": 3}):
        result = result_of(made, **fields)
        assert not (result.failed or result.refused), result


def function_of(**own: Any) -> Any:
    def function(
        x: Tensor, q_weight: Tensor, k_weight: Tensor, q_heads: int, k_heads: int, cos: Tensor, sin: Tensor, eps: float
    ) -> Tensor:
        named = {"q_weight": q_weight, "k_weight": k_weight, "q_heads": q_heads, "k_heads": k_heads}
        return torch_rotary.forward(x, None, None, eps=eps, cos=cos, sin=sin, **named, **own)["y"]  # type: ignore[arg-type]

    return function


def of(function: Any) -> Implementation:
    return wrapped(adapt(function), OP.name, "mine", "")


@pytest.mark.parametrize("rounding", ["once", "normed", "rotated", "each"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_convention_of_a_function_is_found(interleaved: bool, rounding: str) -> None:
    result = result_of(of(function_of(interleaved=interleaved, rounding=rounding)), weights="normal", N=1536)
    assert not result.failed, result
    assert result.conventions == ((("pairs", "interleaved" if interleaved else "neox"), ("rounding", rounding)),)


def test_none_that_fits_is_a_finding() -> None:
    def turned_back(
        x: Tensor, q_weight: Tensor, k_weight: Tensor, q_heads: int, k_heads: int, cos: Tensor, sin: Tensor, eps: float
    ) -> Tensor:
        y: Tensor = function_of()(x, q_weight, k_weight, q_heads, k_heads, cos, -sin, eps)
        return y

    result = result_of(of(turned_back), weights="normal")
    assert result.failed and result.conventions == ()


def test_x_may_be_overwritten_if_that_is_declared() -> None:
    def in_place(x: Tensor, weight: None, bias: None, *, eps: float, **named: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            x.copy_(torch_rotary.forward(x.clone(), None, None, eps=eps, **named)["y"])
        return {"y": x}

    own: dict[str, Any] = {"name": "mine", "op": OP.name, "forward": in_place, "model": {}}
    assert not result_of(Implementation(**own, overwrites=("x",))).problems
    found = result_of(Implementation(**own)).problems
    assert "input_modified" in {problem.kind for problem in found}


def test_v_must_keep_its_bits() -> None:
    def rounds_v(
        x: Tensor, q_weight: Tensor, k_weight: Tensor, q_heads: int, k_heads: int, cos: Tensor, sin: Tensor, eps: float
    ) -> Tensor:
        y: Tensor = function_of()(x, q_weight, k_weight, q_heads, k_heads, cos, sin, eps)
        of_v = (q_heads + k_heads) * q_weight.shape[0]
        return torch.cat((y[:, :of_v], (y[:, of_v:] * (1 + 2.0**-10)).to(y.dtype)), 1)

    assert result_of(of(rounds_v), dtype="fp16", weights="normal").failed


def test_what_a_function_takes_by_name_says_whose_op_it_is() -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    own = adapt(function_of())
    assert set(own.named) == {*OP.by_name, *OP.counts}
    with pytest.raises(UsageError, match=r"parameters named cos and sin and q_weight and k_weight and q_heads"):
        require_named(adapt(plain), plain, OP, "f.py:plain")
    with pytest.raises(UsageError, match=r"or --op qk_norm_rope"):
        require_named(own, plain, OPS["rmsnorm"], "f.py:once")
