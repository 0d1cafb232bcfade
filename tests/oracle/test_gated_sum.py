"""Modulated norms of a gated sum: the reference against the definitions in mpmath, and the sums that are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import MODULATED_ADD, OPS
from normcheck.oracle import rounding
from normcheck.oracle.conventions import candidates, in_words, with_convention
from normcheck.oracle.gated_sum import sum_of
from normcheck.oracle.tolerances import Model, table
from tests.inner_loop import parametrize
from tests.oracle.definitions import Numbers, assert_held_to, assert_tells, dot, exact, held_of, in_blocks, rows, slopes

NAMES = tuple(op.name for op in MODULATED_ADD)


def case_of(op: str = NAMES[0], **fields: Any) -> Case:
    own = {"op": op, "dtype": "fp16", "M": 6, "N": 5, "seed": 3, "bias": False, "samples": "few"}
    return Case(**{**own, **fields})


def model_of(**declared: Any) -> Model:
    own = {"sum": "rounded", "round_gated": "none", "rounding": "once", "round_factor": "none", **declared}
    return replace(table().model, **own)


def inputs_of(case: Case) -> Inputs:
    return make(case, OPS[case.op], "cpu")


def definition(case: Case, x: Numbers, residual: Numbers, *modulation: Numbers) -> tuple[Numbers, Numbers]:
    """y and residual_out of a case, in exact numbers: nothing is rounded."""
    y, sums = [], []
    gate, scale, shift = (rows(numbers, case.N) for numbers in modulation)
    for number, (row, other) in enumerate(zip(rows(x, case.N), rows(residual, case.N), strict=True)):
        sample = number // (case.M // case.batch)
        s = [r + g * v for v, r, g in zip(row, other, gate[sample], strict=True)]
        mean = sum(s) / case.N if OPS[case.op].centered else mpmath.mpf(0)
        rstd = 1 / mpmath.sqrt(sum((v - mean) ** 2 for v in s) / case.N + mpmath.mpf(case.eps))
        y += [(v - mean) * rstd * (1 + a) + b for v, a, b in zip(s, scale[sample], shift[sample], strict=True)]
        sums += s
    return y, sums


@parametrize("samples", ["one", "few", "each"], inner=1)
@pytest.mark.parametrize("weights", ["normal", "probe"])
@pytest.mark.parametrize("op", NAMES)
def test_the_reference_is_the_definition(op: str, samples: str, weights: str) -> None:
    """The gradients are central differences of sum(dy * y) + sum(dresidual_out * residual_out), of the exact sum."""
    case = case_of(op, samples=samples, weights=weights, weight_dtype="fp32", residual_dtype="fp32")
    held, inputs = held_of(case, model_of(sum="exact")), inputs_of(case)
    names = {
        "dx": "x",
        "dresidual": "residual",
        "dresidual_gate": "residual_gate",
        "dscale": "scale",
        "dshift": "shift",
    }
    with mpmath.workdps(65):
        leaves = {gradient: exact(getattr(inputs, name)) for gradient, name in names.items()}
        assert inputs.dresidual_out is not None
        cotangents = exact(inputs.dy), exact(inputs.dresidual_out)

        def total() -> mpmath.mpf:
            return sum(map(dot, cotangents, definition(case, *leaves.values())))

        y, sums = definition(case, *leaves.values())
        assert_held_to(held, {"y": y, "residual_out": sums, **slopes(leaves, total)}, least=1e-14)


def test_a_sum_in_half_precision_is_one_number_unless_fp32_has_it_not() -> None:
    for dtype, wide in (("bf16", "same"), ("fp16", "same"), ("bf16", "fp32"), ("fp16", "fp32")):
        case = case_of(dtype=dtype, M=64, N=512, weight_dtype=wide, samples="few")
        part = sum_of(case, inputs_of(case), rounding.rules(OPS[case.op], model_of()), "rounded").part(0, case.M)
        apart = (part.low < part.high).double().mean()
        assert float(apart) < 1e-3 and ((dtype, wide) != ("fp16", "fp32") or float(apart) > 0), dtype
        assert bool(((part.low <= part.stored) & (part.stored <= part.high)).all())
        assert bool(((part.exact - part.stored).abs() <= part.exact.abs() * 2.0**-8 + 1e-7).all())


@pytest.mark.parametrize("wide", ["same", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_order_of_product_and_sum_is_within_the_ends(dtype: str, wide: str) -> None:
    case = case_of(
        dtype=dtype, M=64, N=256, residual="opposite", samples="few", weight_dtype=wide * (dtype != "fp32") or "same"
    )
    inputs, op = inputs_of(case), OPS[case.op]
    assert inputs.residual is not None and inputs.residual_gate is not None
    gate, x = inputs.residual_gate.repeat_interleave(case.M // case.batch, 0), inputs.x.reshape(case.M, case.N)
    residual = inputs.residual.reshape(case.M, case.N)
    in_fp32 = residual.float() + gate.float() * x.float()
    fma = (residual.double() + gate.double() * x.double()).float()
    eager = residual + gate * x
    for found, how in ((in_fp32, "none"), (fma, "none"), (eager.float(), "io")):
        part = sum_of(case, inputs, rounding.rules(op, model_of(round_gated=how)), "rounded").part(0, case.M)
        stored = found.to(residual.dtype).double()
        assert bool(((part.low <= stored) & (stored <= part.high)).all()), how
    if dtype != "fp32" and wide == "same":
        part = sum_of(case, inputs, rounding.rules(op, model_of()), "rounded").part(0, case.M)
        assert float(((eager.double() < part.low) | (eager.double() > part.high)).double().mean()) > 0.05


def test_where_the_gate_is_zero_the_sum_is_the_residual_and_dx_zero() -> None:
    case = case_of(dtype="fp32", weights="probe", N=18)
    held, inputs = held_of(case, model_of()), inputs_of(case)
    assert inputs.residual is not None and inputs.residual_gate is not None
    at = (inputs.residual_gate == 0).repeat_interleave(case.M // case.batch, 0)
    assert bool(at.any())
    assert torch.equal(held["residual_out"].expected[at], inputs.residual.double().reshape(at.shape)[at])
    assert bool((held["residual_out"].bound.upper[at] == rounding.NO_ROOM).all())
    assert bool((held["dx"].expected[at] == 0).all()) and bool((held["dx"].bound.upper[at] == rounding.NO_ROOM).all())


@pytest.mark.parametrize("op", NAMES)
def test_samples_in_several_blocks_have_what_one_block_gives(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for samples, rows_of_block in (("few", 4), ("one", 4), ("many", 5)):
        case = case_of(op, M=12, samples=samples)
        found = list(in_blocks(case, model_of(sum="mixed"), rows_of_block, monkeypatch))
        assert "dresidual_gate" in {name for name, *_ in found}
        for name, one, other in found:
            summed = name == "dresidual_gate" and one.shape[0] != case.M
            assert torch.allclose(one, other, rtol=1e-4 if summed else 1e-12, atol=0), (name, samples)


def test_what_is_rounded_is_told_in_half_precision() -> None:
    op, model = OPS[NAMES[1]], table().model
    every = candidates(op, model)
    words = ("sum", "round_gated", "rounding", "round_factor")
    assert all(len({dict(each)[word] for each in every}) > 1 for word in words)
    assert_tells(case_of(dtype="bf16"), every, words)
    factors = [each for each in every if dict(each)["round_factor"] != "apart"]
    assert_tells(case_of(dtype="bf16", weight_dtype="fp32"), factors, ("sum", "rounding"))
    assert_tells(case_of(dtype="bf16", residual_dtype="fp32"), every, words[1:])
    assert_tells(case_of(dtype="fp32"), every, ())
    assert candidates(op, model_of()) == ((),)
    assert in_words(op, every[:1]) == [
        "norms the sum as it is stored, as vLLM and Liger do",
        "adds residual_gate times x in fp32",
        "rounds y alone, as a fused kernel does",
        "computes 1 + scale in fp32",
    ]


@pytest.mark.parametrize("convention", candidates(OPS[NAMES[0]], table().model)[::5], ids=str)
def test_each_convention_has_bounds_that_are_finite(convention: Any) -> None:
    held = held_of(case_of(M=4, N=24), with_convention(table().model, convention))
    assert held.keys() == {
        *("residual_out", "y", "mean", "rstd", "dx", "dresidual", "dresidual_gate", "dscale", "dshift")
    }
    assert all(bool(torch.isfinite(part.bound.upper).all()) for part in held.values())
