"""flashinfer's test of codes as a recipe: its data and reference are its source's, and what its tolerance lets by.

The kernel's code is the second argument of its comparison, so rtol=1 allows an error as large as that code, whatever
the right one is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normcheck.audit import catalogue
from normcheck.audit.mutants.quantised import Quantising
from normcheck.audit.recipe_judge import (
    CAUGHT,
    MISSED,
    NOT_EXERCISED,
    Judgement,
    judge_kernel,
    judge_mutant,
    tasks_of,
)
from normcheck.audit.recipes import RECIPES, Recipe
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell

OP = "rmsnorm_quant"
FLASHINFER = RECIPES["flashinfer-quant"]
SMALL = replace(FLASHINFER, shapes=(tuple((M, N) for M, N in FLASHINFER.shapes[0] if M * N <= 2**16),))
CLEAN = Quantising().implementation("clean", OP)

PASSING = {
    "twice the scale": Quantising(by=lambda v, scale: v / (2 * scale)),
    "every code is the largest": Quantising(by=lambda v, scale: torch.copysign(torch.full_like(v, 448.0), v)),
    "codes below 1 are 0": Quantising(by=lambda v, scale: torch.where((v / scale).abs() < 1, 0.0, v / scale)),
    "rstd is left out": Quantising(norm=lambda x, w, eps, io: x.float() if w is None else x.float() * w.float()),
}
"""Faults that pass in all calls."""

ZEROS = Quantising(by=lambda v, scale: v * 0)


def judged(kernel: Quantising, r: Recipe, dtype: str = "bf16") -> str:
    return judge_mutant(r, kernel.implementation("faulty", OP), CLEAN, dtype).status


@pytest.mark.slow
def test_these_faults_pass_flashinfer_as_a_right_kernel_does() -> None:
    """In all of its calls of one dtype, whose inputs are made once; those of ``SMALL`` in every dtype are below."""
    assert judge_kernel(FLASHINFER, CLEAN, "bf16") == Judgement(MISSED)
    for what, kernel in PASSING.items():
        assert judged(kernel, FLASHINFER, "bf16") == MISSED, what


@pytest.mark.parametrize("kernel", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize("dtype", FLASHINFER.dtypes)
def test_they_pass_its_small_calls_in_every_dtype(kernel: Quantising, dtype: str) -> None:
    assert judged(kernel, SMALL, dtype) == MISSED


@pytest.mark.parametrize("kernel", [*PASSING.values(), ZEROS], ids=[*PASSING, "every code is 0"])
def test_and_fail_normcheck(kernel: Quantising) -> None:
    cell = Cell(OPS[OP], kernel.implementation("faulty", OP), "bf16", "tests")
    profile = replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0)
    verdict = run_cell(cell, Plan((cell,), profile, 0, "cpu", 120.0), lambda cases, worst: None, with_coverage=False)
    assert verdict.failure
    assert (verdict.failure.kind, verdict.failure.output) == ("mismatch", "q")


def test_zeros_pass_many_calls_with_the_largest_scale() -> None:
    """A code is about randn times randn over 10 there, and atol is 1."""
    assert judged(ZEROS, SMALL) == CAUGHT
    largest = [replace(SMALL, shapes=((shape,),), scales=(10.0,), widths=(1,)) for shape in SMALL.shapes[0]]
    passed = [r.shapes[0][0] for r in largest if judged(ZEROS, r) == MISSED]
    assert (19, 1024) in passed and len(passed) > len(largest) / 2


@pytest.mark.parametrize("dtype", FLASHINFER.dtypes)
def test_every_correct_kernel_of_a_given_scale_passes(dtype: str) -> None:
    found = {c.name: judge_kernel(SMALL, c, dtype) for c in catalogue.controls() if c.op == OP}
    assert {name for name, judgement in found.items() if judgement == Judgement(MISSED)} == {
        "codes_given",
        "codes_vllm_static",
    }
    assert {judgement.status for judgement in found.values()} == {MISSED, NOT_EXERCISED}
    assert found["codes_flashinfer"].reason == "its codes are float8_e5m2, not e4m3fn"


def test_mutants_that_return_a_scale_or_other_codes_are_not_exercised() -> None:
    for id, reason in (("mQ20", "it returns its scale"), ("mQ02", "its codes are int8, not e4m3fn")):
        judgement = judge_mutant(SMALL, catalogue.mutants()[id].make(OP), CLEAN, "fp16")
        assert judgement == Judgement(NOT_EXERCISED, reason=reason)


def test_nan_is_caught() -> None:
    nan = Quantising(by=lambda v, scale: torch.where(v.abs() < 1e-3, torch.nan, v / scale))
    assert judged(nan, SMALL) == CAUGHT


def test_the_inputs_and_the_reference_are_those_of_the_source() -> None:
    tasks = tasks_of(SMALL, OP, "fp16")
    scales = [float(task.scale) for task in tasks if task.scale is not None]
    assert len(scales) == len(tasks) == 6 * len(SMALL.shapes[0])
    assert sorted(set(scales)) == pytest.approx([0.01, 1.0, 10.0], rel=1e-7)
    assert {task.x.stride(0) // task.x.shape[1] for task in tasks if len(task.x) > 1} == {1, 2}
    for task in tasks[::7]:
        assert task.scale is not None
        assert (task.scale.dtype, task.scale.shape, task.eps, task.bias) == (torch.float32, (1,), 1e-6, None)
        x = task.x.double()
        y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * task.weight.double()
        exact = (y / task.scale.double()).clamp(-448, 448).to(torch.float8_e4m3fn)
        q = task.expected["q"]
        assert q.dtype == torch.float8_e4m3fn
        assert (q.view(torch.uint8) == exact.view(torch.uint8)).double().mean() > 0.999  # but for what rounds to a tie


def test_codes_need_scales_and_have_no_gradients() -> None:
    for change in ({"scales": ()}, {"dy": "mse_mean"}):
        with pytest.raises(ValueError, match=r"^recipe=flashinfer-quant: expected scales and dy=None with op=rmsnorm_"):
            replace(FLASHINFER, **change)
