"""Modulated norms: the reference against the definitions in mpmath, samples of a batch, and each convention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch

from normcheck.cases.case import SAMPLES, Case
from normcheck.cases.data_kinds import WEIGHT_KINDS
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import make
from normcheck.cases.ops import MODULATED, OPS
from normcheck.gate.explain_bound import element
from normcheck.oracle import rounding
from normcheck.oracle.conventions import candidates, in_words, told_in_fp32, with_convention
from normcheck.oracle.tolerances import Model, table
from tests.inner_loop import parametrize
from tests.oracle.definitions import Numbers, assert_held_to, assert_tells, dot, exact, held_of, in_blocks, rows, slopes
from tests.some import some

NAMES = tuple(op.name for op in MODULATED)
OUTPUTS = {"y", "rstd", "dx", "dscale", "dshift"}


def case_of(op: str = "layernorm_modulate", **fields: Any) -> Case:
    own = {"op": op, "dtype": "fp16", "M": 6, "N": 5, "seed": 3, "bias": False, "samples": "few"}
    return Case(**{**own, **fields})


def model_of(**declared: Any) -> Model:
    return replace(table().model, **{"rounding": "once", "round_factor": "none", **declared})


def definition(case: Case, x: Numbers, *modulation: Numbers) -> Numbers:
    """y of a case, in exact numbers."""
    y: Numbers = []
    scale, shift = (rows(numbers, case.N) for numbers in modulation)
    for number, row in enumerate(rows(x, case.N)):
        sample = number // (case.M // case.batch)
        mean = sum(row) / case.N if OPS[case.op].centered else mpmath.mpf(0)
        rstd = 1 / mpmath.sqrt(sum((v - mean) ** 2 for v in row) / case.N + mpmath.mpf(case.eps))
        y += [(v - mean) * rstd * (1 + a) + b for v, a, b in zip(row, scale[sample], shift[sample], strict=True)]
    return y


@pytest.mark.parametrize("weights", ["normal", "probe"])
@parametrize("samples", ["one", "few", "each"], inner=1)
@pytest.mark.parametrize("op", NAMES)
def test_the_reference_is_the_definition(op: str, samples: str, weights: str) -> None:
    """The gradients are central differences of sum(dy * y)."""
    case = case_of(op, samples=samples, weights=weights, weight_dtype="fp32")
    held, inputs = held_of(case, model_of()), make(case, OPS[op], "cpu")
    assert inputs.scale is not None and inputs.shift is not None
    assert inputs.x.shape == (case.batch, case.M // case.batch, case.N)
    assert inputs.scale.shape == (case.batch, case.N)
    with mpmath.workdps(65):
        leaves = {"dx": exact(inputs.x), "dscale": exact(inputs.scale), "dshift": exact(inputs.shift)}
        dy = exact(inputs.dy)

        def y() -> Numbers:
            return definition(case, *leaves.values())

        assert_held_to(held, {"y": y(), **slopes(leaves, lambda: dot(dy, y()))})


def test_where_scale_is_minus_one_y_is_the_shift() -> None:
    case = case_of(dtype="fp32", weights="probe", N=18)
    inputs = make(case, OPS[case.op], "cpu")
    assert inputs.scale is not None and inputs.shift is not None
    rows = torch.arange(case.M) // (case.M // case.batch)
    at = (inputs.scale == -1)[rows]
    held = held_of(case, model_of())["y"]
    assert bool(at.any()) and bool((held.bound.upper[at] == rounding.NO_ROOM).all())
    assert torch.equal(held.expected[at], inputs.shift.double()[rows][at])


@pytest.mark.parametrize("op", NAMES)
def test_samples_in_several_blocks_have_what_one_block_gives(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for samples, rows_of_block in (("few", 4), ("one", 4), ("each", 4), ("many", 5)):
        case = case_of(op, M=12, samples=samples)
        for name, one, other in some(in_blocks(case, model_of(), rows_of_block, monkeypatch)):
            assert torch.allclose(one, other, rtol=1e-12, atol=0), (name, samples)


def test_another_samples_numbers_are_far_outside() -> None:
    case = case_of(N=64, M=20, samples="few", weights="small")
    op, inputs = OPS[case.op], make(case_of(N=64, M=20, samples="few", weights="small"), OPS[case.op], "cpu")
    assert inputs.scale is not None and inputs.shift is not None
    rolled = replace(inputs, scale=inputs.scale.roll(1, 0), shift=inputs.shift.roll(1, 0))
    one, other = (held_of(case, model_of(), given)["y"] for given in (inputs, rolled))
    assert op.modulated and bool(((one.expected - other.expected).abs() > one.bound.upper).float().mean() > 0.9)


def test_the_samples_of_rows() -> None:
    found = {m: [case_of(M=m, samples=samples).batch for samples in SAMPLES] for m in (0, 1, 2, 5, 9, 20, 65, 97, 300)}
    assert found == {
        0: [1, 1, 1, 1],
        1: [1, 1, 1, 1],
        2: [1, 2, 2, 2],
        5: [1, 5, 5, 5],
        9: [1, 3, 3, 9],
        20: [1, 2, 10, 20],
        65: [1, 5, 13, 65],
        97: [1, 97, 97, 97],
        300: [1, 2, 150, 300],
    }
    assert case_of(M=24, samples="6").shape == (6, 4, 5)


def test_what_is_rounded_is_told_in_half_precision() -> None:
    op, model = OPS["rmsnorm_modulate"], table().model
    every = candidates(op, model)
    assert [len({dict(each)[name] for each in every}) for name in ("rounding", "round_factor")] == [3, 3]
    assert_tells(case_of(dtype="bf16"), every, ("rounding", "round_factor"))
    factors = [each for each in every if dict(each)["round_factor"] != "apart"]
    assert_tells(case_of(dtype="bf16", weight_dtype="fp32"), factors, ("rounding",))
    assert_tells(case_of(dtype="fp32"), every, ())
    assert candidates(op, model_of()) == ((),)
    assert in_words(op, every[-1:]) == [
        "rounds xhat, its product and the sum, as eager torch does",
        "adds xhat to its rounded product with scale, as x + x * scale of eager torch",
    ]
    assert in_words(op, told_in_fp32(every)) == []


EVERY = candidates(OPS["layernorm_modulate"], table().model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convention", EVERY, ids=str)
def test_every_term_has_a_reason_and_together_they_are_the_bound(convention: Any, dtype: str) -> None:
    case = case_of(M=4, N=24, dtype=dtype)
    held = held_of(case, with_convention(table().model, convention))
    assert held.keys() == OUTPUTS | {"mean"}
    for name, part in some(held.items()):
        found = element(part, (1, 3)[: 1 if name in ("mean", "rstd") else 2])
        assert found.terms and all(reason and "{" not in reason for _, _, reason in found.terms), (name, found.terms)
        total = found.rest + sum(value for _, value, _ in found.terms)
        assert total == pytest.approx(max(found.above, found.below), rel=2e-3)
        assert not found.rest or name == "rstd", found


@pytest.mark.parametrize("weights", WEIGHT_KINDS)
@pytest.mark.parametrize("convention", EVERY, ids=str)
def test_each_convention_has_bounds_that_are_finite(convention: Any, weights: str) -> None:
    held = held_of(case_of(weights=weights), with_convention(table().model, convention))
    assert all(bool(torch.isfinite(part.bound.upper).all()) for part in held.values())


@pytest.mark.parametrize(
    ("name", "convention", "expected"),
    [
        ("factor", {}, {"y", "dx"}),
        ("xhat_centered", {"rounding": "each"}, {"y", "dscale"}),
    ],
)
def test_every_count_widens_what_it_is_about(
    name: str, convention: dict[str, str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model, own = case_of(M=4, N=24), model_of(**convention), rounding.rules
    of = held_of(case, model)
    more = {**table().count, name: table().count[name] + 5000}
    monkeypatch.setattr(rounding, "rules", lambda *args, **options: replace(own(*args, **options), count=more))
    grown = held_of(case, model)
    assert {n for n in of if bool((grown[n].bound.upper > of[n].bound.upper * (1 + 1e-9)).any())} == expected
