"""Gated norms: the reference against the definitions in mpmath, the bounds of an activation, and each convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import GATE_KINDS
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.gate.explain_bound import element
from normcheck.oracle import rounding
from normcheck.oracle.activation import ACTIVATIONS, GATES, GROUPS, Activated, activated
from normcheck.oracle.compare import Expectation
from normcheck.oracle.conventions import candidates, in_words, plainest, told_in_fp32, with_convention
from normcheck.oracle.gated import why_no_groups
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judging import judge_forward
from normcheck.oracle.tolerances import Model, table
from tests.oracle.definitions import Numbers, assert_held_to, dot, exact, held_of, slopes
from tests.some import some

OP = OPS["rmsnorm_gated"]


WHOLE = replace(table().model, group=0)


def case_of(**fields: Any) -> Case:
    return Case(**{"op": OP.name, "dtype": "fp16", "M": 2, "N": 6, "seed": 3, "bias": False, **fields})


def model_of(**declared: Any) -> Model:
    return replace(table().model, **{"gate": "after", "activation": "silu", "rounding": "once", "group": 0, **declared})


def definition(case: Case, model: Model, x: Numbers, gate: Numbers, weight: Numbers) -> tuple[Numbers, Numbers]:
    """y and rstd of a case, in exact numbers."""
    act = [z / (1 + mpmath.exp(-z)) if model.activation == "silu" else 1 / (1 + mpmath.exp(-z)) for z in gate]
    before = model.gate == "before"
    h = [v * a for v, a in zip(x, act, strict=True)] if before else x
    y, rstd, size = [], [], model.group or case.N
    for first in range(0, len(h), size):
        own = h[first : first + size]
        rstd.append(1 / mpmath.sqrt(sum(v * v for v in own) / size + mpmath.mpf(case.eps)))
        y += [v * rstd[-1] * weight[(first + i) % case.N] for i, v in enumerate(own)]
    return (y if before else [v * a for v, a in zip(y, act, strict=True)]), rstd


@pytest.mark.parametrize("group", [0, 3, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", ["normal", "turning"])
def test_the_reference_is_the_definition(gate: str, activation: str, group: int, kind: str) -> None:
    """The gradients are central differences of sum(dy * y)."""
    case, model = case_of(gate=kind), model_of(gate=gate, activation=activation, group=group)
    held, inputs = held_of(case, model), make(case, OP, "cpu")
    assert inputs.gate is not None and inputs.weight is not None
    with mpmath.workdps(65):
        leaves = {"dx": exact(inputs.x), "dgate": exact(inputs.gate), "dw": exact(inputs.weight)}
        dy = exact(inputs.dy)

        def outputs() -> tuple[Numbers, Numbers]:
            return definition(case, model, *leaves.values())

        y, rstd = outputs()
        assert_held_to(held, {"y": y, "rstd": rstd, **slopes(leaves, lambda: dot(dy, outputs()[0]))})


Z = torch.cat(
    [
        torch.linspace(-110, 110, 4001),
        torch.linspace(-2, 2, 2001),
        torch.tensor([0.0, -0.0, -1.278464542761074, -88.72, -88.73, -103.9, 2.0**-130, -(2.0**-149)]),
    ]
)
SIGMOIDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.sigmoid,
    "by_exp": lambda z: 1 / (1 + torch.exp(-z)),
    "by_exp2": lambda z: 1 / (1 + torch.exp2(z * -1.4426950408889634)),
    "by_tanh": lambda z: 0.5 * (1 + torch.tanh(0.5 * z)),
    "of_abs": lambda z: torch.where(z < 0, torch.exp(-z.abs()), 1.0) / (1 + torch.exp(-z.abs())),
}


def of_activation(name: str) -> Activated:
    return activated(rounding.rules(OP, model_of()), Z.double(), name)


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_an_activation_in_fp32_is_within_its_bound(sigmoid: str) -> None:
    s = SIGMOIDS[sigmoid](Z)
    for name, value, slope in (
        ("sigmoid", s, s * (1 - s)),
        ("silu", Z * s, s * (1 + Z * (1 - s))),
        ("silu", Z * s, s + Z * s * (1 - s)),
    ):
        of = of_activation(name)
        assert bool(((value.double() - of.value).abs() <= of.off).all())
        assert bool(((slope.double() - of.slope).abs() <= of.slope_off).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_activation_in_half_precision_is_not(dtype: torch.dtype) -> None:
    z = Z.to(dtype)
    for name, of_z in (("sigmoid", torch.sigmoid(z)), ("silu", torch.nn.functional.silu(z))):
        of = activated(rounding.rules(OP, model_of()), z.double(), name)
        assert bool(((of_z.double() - of.value).abs() > of.off).any())


def test_the_two_activations_are_apart() -> None:
    silu, sigmoid = of_activation("silu"), of_activation("sigmoid")
    near_one = (Z - 1).abs() < 1e-4
    apart = (silu.value - sigmoid.value).abs() > silu.off + sigmoid.off
    assert bool(apart[~near_one & (Z > -15) & (Z.abs() > 1e-6)].all())


def test_at_a_gate_of_zero_silu_has_no_room() -> None:
    case = case_of(gate="turning", N=18, dtype="fp32")
    held = held_of(case, model_of())["y"]
    assert bool((held.expected[:, 0] == 0).all()) and bool((held.bound.upper[:, 0] == rounding.NO_ROOM).all())
    halves = held_of(case, model_of(activation="sigmoid"))["y"].expected[:, 0]
    x, weight = make(case, OP, "cpu").x.double(), make(case, OP, "cpu").weight
    assert weight is not None
    whole = (x * (x.square().mean(1, keepdim=True) + case.eps).rsqrt() * weight.double())[:, 0]
    assert torch.allclose(halves, whole / 2, rtol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_open_gate_leaves_a_plain_norm_and_nearly_its_bound(activation: str) -> None:
    case = case_of(gate="open", N=64, dtype="fp32")
    gated = held_of(case, model_of(activation=activation))["y"]
    inputs = make(case, OP, "cpu")
    assert inputs.gate is not None
    factor = inputs.gate.double() if activation == "silu" else 1.0
    plain_case = Case(op="rmsnorm", dtype="fp32", M=case.M, N=case.N, seed=case.seed, bias=False)
    seen: list[Expectation] = []
    judge = judge_of(
        OPS["rmsnorm"], plain_case, make(plain_case, OPS["rmsnorm"], "cpu"), table().model, {}, watch=seen.append
    )
    judge_forward(judge, {"y": inputs.x})
    (plain,) = seen
    assert torch.allclose(gated.expected, plain.expected * factor, rtol=1e-12)
    assert bool((gated.bound.upper <= 1.2 * plain.bound.upper * factor).all())


def test_groups_are_norms_of_their_own() -> None:
    case, model = case_of(N=12, M=5), model_of(group=4, gate="before")
    inputs = make(case, OP, "cpu")

    def y_of(inputs: Inputs) -> Tensor:
        seen: list[Expectation] = []
        judge_forward(judge_of(OP, case, inputs, model, {}, watch=seen.append), {"y": inputs.x})
        return seen[0].expected

    scaled = inputs.x.clone()
    scaled[:, 4:8] *= 2.0**4
    differ = (y_of(inputs) != y_of(replace(inputs, x=scaled))).any(0)
    assert differ.tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert why_no_groups(case, model) == ""
    assert why_no_groups(case, model_of(group=5)) == "N=12 is no multiple of group=5, as declared"


def test_fp32_tells_all_but_the_roundings() -> None:
    left = tuple(each for each in candidates(OP, WHOLE) if dict(each)["gate"] == "before")
    assert in_words(OP, told_in_fp32(left)) == [
        "gates before the norm, as Mamba2 and Nemotron-H do",
        "no case tells the activations silu, sigmoid apart",
    ]
    added = OPS["fused_add_rmsnorm"]
    assert in_words(added, told_in_fp32(candidates(added, table().model))) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_left_open(dtype: str) -> None:
    every, apart = candidates(OP, table().model), 4 if dtype == "fp32" else 10
    assert len(every) == 10 * len(GROUPS)  # before the norm, if each product is rounded, the first one may be or not
    assert len({plainest(each, case_of(dtype=dtype)) for each in every}) == apart
    assert len({plainest(each, case_of(dtype=dtype, N=256)) for each in every}) == apart * 3  # of 64, of 128, or whole
    assert candidates(OP, model_of()) == ((),)
    left = candidates(OP, model_of(gate="before", rounding="each"))
    assert left == ((("round_gated", "io"),), (("round_gated", "none"),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convention", candidates(OP, WHOLE), ids=str)
def test_every_term_has_a_reason_and_together_they_are_the_bound(convention: Any, dtype: str) -> None:
    case = case_of(M=4, N=24, dtype=dtype, gate="turning")
    for name, part in some(held_of(case, with_convention(WHOLE, convention)).items()):
        found = element(part, (1, 3)[: 1 if name in ("dw", "rstd") else 2])
        assert found.terms and all(reason and "{" not in reason for _, _, reason in found.terms), (name, found.terms)
        total = found.rest + sum(value for _, value, _ in found.terms)
        assert total == pytest.approx(max(found.above, found.below), rel=2e-3)
        assert not found.rest or name == "rstd", found


COUNTS = ("exp", "exp_argument", "sigmoid", "sigmoid_absolute", "activation", "slope", "gated", "dgate")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", COUNTS)
def test_every_count_widens_what_it_is_about(gate: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = case_of(M=4, N=24, dtype="fp32", gate="turning"), model_of(gate=gate)
    own, of = rounding.rules, held_of(case, model)
    more = {**table().count, name: table().count[name] + 50}
    monkeypatch.setattr(rounding, "rules", lambda *args, **options: replace(own(*args, **options), count=more))
    grown = held_of(case, model)
    wider = {n for n in of if bool((grown[n].bound.upper > of[n].bound.upper * (1 + 1e-9)).any())}
    expected = {
        "after": {"slope": {"dgate"}, "gated": {"y"}, "dgate": {"dgate"}, "activation": {"y", "dx", "dw"}},
        "before": {"slope": {"dgate"}, "gated": {"dx"}, "dgate": {"dgate"}},
    }[gate].get(name, {"y", "dx", "dgate", "dw"} | ({"rstd"} if gate == "before" else set()))
    assert wider == expected


@pytest.mark.parametrize("convention", candidates(OP, WHOLE), ids=str)
def test_each_convention_has_bounds_that_are_finite_for_ordinary_rows(convention: Any) -> None:
    for kind in GATE_KINDS:
        held = held_of(case_of(M=4, N=32, gate=kind), with_convention(WHOLE, convention))
        for name, part in some(held.items()):
            assert bool(torch.isfinite(part.bound.upper).all()) or kind == "inf", (name, kind)
