"""Norms by the length of x: the reference against the definitions in mpmath, the bounds, and each convention of eps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import make
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import check
from normcheck.gate.explain_bound import element
from normcheck.impls.implementation import Implementation
from normcheck.oracle import rounding
from normcheck.oracle.conventions import candidates, in_words, plainest, told_in_fp32
from normcheck.oracle.tolerances import Model, table
from tests.oracle.definitions import Numbers, assert_held_to, dot, exact, held_of, slopes
from tests.some import some

OP = OPS["l2norm"]
CONVENTIONS = ("sum", "max", "mean")


def case_of(**fields: Any) -> Case:
    own = {"M": 2, "N": 6, "seed": 3, "bias": False, "weights": "none", **fields}
    return Case(**{"op": OP.name, "dtype": "fp16", **own})


def model_of(eps: str) -> Model:
    return replace(table().model, eps=eps)


def definition(case: Case, how: str, x: Numbers) -> tuple[Numbers, Numbers]:
    """y and rstd of a case, in exact numbers."""
    y, rstd, eps = [], [], mpmath.mpf(case.eps)
    for first in range(0, len(x), case.N):
        own = x[first : first + case.N]
        squares = sum(v * v for v in own)
        added = {"sum": eps, "mean": eps * case.N}
        length = max(mpmath.sqrt(squares), eps) if how == "max" else mpmath.sqrt(squares + added[how])
        rstd.append(1 / length)
        y += [v * rstd[-1] for v in own]
    return y, rstd


@pytest.mark.parametrize("how", CONVENTIONS)
@pytest.mark.parametrize("kind", ["normal", "tiny_variance"])
@pytest.mark.parametrize("eps", [0.5, 1e-6])
def test_the_reference_is_the_definition(how: str, kind: str, eps: float) -> None:
    """dx is a central difference of sum(dy * y). Tiny rows are shorter than an eps of 0.5."""
    case = case_of(rows=kind, eps=eps)
    held, inputs = held_of(case, model_of(how)), make(case, OP, "cpu")
    with mpmath.workdps(65):
        x, dy = exact(inputs.x), exact(inputs.dy)
        y, rstd = definition(case, how, x)
        gradients = slopes({"dx": x}, lambda: dot(dy, definition(case, how, x)[0]))
        assert_held_to(held, {"y": y, "rstd": rstd, **gradients})


@pytest.mark.parametrize("how", CONVENTIONS)
def test_the_length_of_y_is_one_and_dx_is_at_right_angles_to_x(how: str) -> None:
    """Of rows that are longer than eps, by no formula of the reference."""
    case = case_of(M=5, N=64, eps=1e-12, dtype="fp32")
    held, inputs = held_of(case, model_of(how)), make(case, OP, "cpu")
    assert torch.allclose(held["y"].expected.square().sum(1), torch.ones(5, dtype=torch.float64), rtol=1e-9)
    assert bool(((held["dx"].expected * inputs.x.double()).sum(1).abs() < 1e-9).all())


@pytest.mark.parametrize("how", CONVENTIONS)
def test_a_row_of_zeros_is_zeros_and_its_gradient_dy_over_the_length(how: str) -> None:
    case = case_of(rows="zero", eps=0.25)
    held, inputs = held_of(case, model_of(how)), make(case, OP, "cpu")
    length = {"sum": 0.5, "max": 0.25, "mean": (0.25 * case.N) ** 0.5}[how]
    assert bool((held["y"].expected == 0).all()) and bool((held["y"].bound.upper < 1e-7).all())
    assert torch.allclose(held["dx"].expected, inputs.dy.double() / length, rtol=1e-12)


def test_without_eps_zeros_and_squares_that_fp32_flushes_have_no_bound() -> None:
    for rows in ("zero", "subnormal"):
        held = held_of(case_of(rows=rows, eps=0.0, dtype="bf16"), model_of("sum"))
        assert bool(torch.isinf(held["y"].bound.upper).all()), rows
    assert bool(torch.isfinite(held_of(case_of(eps=0.0), model_of("max"))["y"].bound.upper).all())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_squares_whose_sum_may_overflow_have_no_bound(dtype: str) -> None:
    """As of an RMSNorm: a correct kernel in fp32 has an infinite sum, and zeros. In fp16 no sum is so large."""
    case = case_of(M=3, rows="largest", dtype=dtype)
    unbounded = torch.isinf(held_of(case, model_of("sum"))["y"].bound.upper).all(1)
    assert unbounded.tolist().count(True) == 1
    assert bool(torch.isfinite(held_of(case_of(M=3, rows="largest"), model_of("sum"))["y"].bound.upper).all())


def test_a_row_that_may_be_as_long_as_eps_may_have_either_gradient() -> None:
    case = case_of(M=1, N=4, eps=0.5, dtype="fp32")
    inputs = make(case, OP, "cpu")
    inputs.x.copy_(torch.full((1, 4), 0.25))  # a length of 0.5, to the bit
    part = held_of(case, model_of("max"), inputs)["dx"]
    dy = inputs.dy.double()
    for dx in (dy * 2, (dy - dy.mean()) * 2):
        assert bool(((part.expected - dx).abs() <= part.bound.upper).all())
    inputs.x.mul_(1.001)
    part = held_of(case, model_of("max"), inputs)["dx"]
    assert bool(((part.expected - dy * 2 / 1.001).abs() > part.bound.upper).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dx_may_be_made_of_y_as_it_was_stored_and_of_nothing_coarser(dtype: str) -> None:
    case = case_of(M=40, N=64, dtype=dtype, eps=1e-6)
    part, inputs = held_of(case, model_of("sum"))["dx"], make(case, OP, "cpu")
    x, dy = inputs.x.float(), inputs.dy.float()
    rstd = torch.rsqrt(x.square().sum(1, keepdim=True) + case.eps)

    def is_right(y: Tensor) -> bool:
        dx = ((dy - y * (y * dy).sum(1, keepdim=True)) * rstd).to(inputs.x.dtype)
        return bool(((dx.double() - part.expected).abs() <= part.bound.upper).all())

    y = x * rstd
    assert is_right(y) and is_right(y.to(inputs.x.dtype).float())
    mantissa = {"fp16": 7, "bf16": 4, "fp32": 15}[dtype]
    scale = torch.exp2(mantissa - torch.frexp(y)[1].float())
    assert not is_right((y * scale).round() / scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_left_open(dtype: str) -> None:
    every = candidates(OP, table().model)
    assert every == tuple((("eps", how),) for how in CONVENTIONS)
    assert {plainest(each, case_of(dtype=dtype)) for each in every} == set(every)
    assert {plainest(each, case_of(dtype=dtype, eps=0.0)) for each in every} == {every[0]}
    assert {plainest(each, case_of(dtype=dtype, N=1)) for each in every} == {*every[:2]}
    assert candidates(OP, model_of("max")) == ((),)
    assert in_words(OP, told_in_fp32(every[:1])) == ["adds eps to the sum of squares, as fla does"]
    assert in_words(OP, every) == ["no case tells the values of eps sum, max, mean apart"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", CONVENTIONS)
def test_every_term_has_a_reason_and_together_they_are_the_bound(how: str, dtype: str) -> None:
    case = case_of(M=4, N=24, dtype=dtype, rows="tiny_variance", eps=1e-6)
    held = held_of(case, model_of(how))
    assert set(held) == {"rstd", "y", "dx"}
    for name, part in some(held.items()):
        found = element(part, (1, 3)[: 1 if name == "rstd" else 2])
        assert found.terms and all(reason and "{" not in reason for _, _, reason in found.terms), (name, found.terms)
        total = found.rest + sum(value for _, value, _ in found.terms)
        assert total == pytest.approx(max(found.above, found.below), rel=2e-3)
        assert not found.rest or name == "rstd", found


WIDENS = {
    "y_l2norm": {"y"},
    "eps": {"rstd", "y", "dx"},
    "rms": {"rstd", "y", "dx"},
    "c1": {"dx"},
    "dx_elementwise": {"dx"},
}


@pytest.mark.parametrize("how", CONVENTIONS)
@pytest.mark.parametrize("name", WIDENS)
def test_every_count_widens_what_it_is_about(how: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the larger of the two, eps is in the bounds of a row that may be shorter."""
    case = case_of(M=4, N=24, dtype="fp32", rows="tiny_variance", eps=0.5 if (how, name) == ("max", "eps") else 1e-8)
    own, of = rounding.rules, held_of(case, model_of(how))
    more = {**table().count, name: table().count[name] + 50}
    monkeypatch.setattr(rounding, "rules", lambda *args, **options: replace(own(*args, **options), count=more))
    grown = held_of(case, model_of(how))
    assert {n for n in of if bool((grown[n].bound.upper > of[n].bound.upper * (1 + 1e-9)).any())} == WIDENS[name]


ROOTS: Mapping[str, Callable[[Tensor, float, int], Tensor]] = {
    "sum": lambda s, eps, n: torch.rsqrt(s + eps),
    "max": lambda s, eps, n: torch.rsqrt(s.clamp(min=eps * eps)),
    "mean": lambda s, eps, n: torch.rsqrt(s / n + eps) * n**-0.5,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", CONVENTIONS)
def test_each_convention_is_right_by_itself_and_wrong_by_the_others(how: str, dtype: str) -> None:
    def forward(x: Tensor, weight: None, bias: None, *, eps: float) -> dict[str, Tensor]:
        wide = x.float()
        rstd = ROOTS[how](wide.square().sum(-1, keepdim=True), eps, x.shape[-1])
        return {"y": (wide * rstd).to(x.dtype), "rstd": rstd.detach()}

    case = case_of(M=20, N=40, rows="blend", dtype=dtype, eps=1e-3)
    for declared in (*CONVENTIONS, "any"):
        made = Implementation(name="mine", op=OP.name, forward=forward, model={"eps": declared})
        result = check(made, OP, case, "cpu", Ask())
        assert result.failed == (declared not in (how, "any")), declared
        if declared == "any":
            assert result.conventions == ((("eps", how),),)


@pytest.mark.parametrize("fact", ["centered", "zero_centered", "rounds_xhat", "clamped", "gated", "quantises"])
def test_a_row_without_a_bound_is_refused(fact: str) -> None:
    fields = {"name": "new", "centered": False, "l2": True, "biases": (False,), "formula": "", "source": ""}
    assert Op(**fields).weights_of((True, False)) == (False,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op=new: expected"):
        Op(**{**fields, fact: True})  # type: ignore[arg-type]
