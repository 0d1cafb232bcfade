"""vLLM's test as a recipe: its data and reference are those of its source, and long rows hide faults from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import CLEAN, Kernel
from normcheck.audit.mutants.residual import Adding
from normcheck.audit.recipe_judge import CAUGHT, MISSED, NOT_EXERCISED, Judgement, judge_kernel, judge_mutant, tasks_of
from normcheck.audit.recipes import RECIPES, Recipe
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from tests.inner_loop import parametrize
from tests.some import some

VLLM, ADDED = RECIPES["vllm-rmsnorm"], RECIPES["vllm-residual"]
CLEAN_OF = {
    op: (Adding() if OPS[op].adds_residual else CLEAN).implementation("clean", op) for op in (*VLLM.ops, *ADDED.ops)
}


def faulty(**steps: Any) -> Implementation:
    return Kernel(**steps).implementation("faulty", "rmsnorm")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_correct_sum_passes(dtype: str) -> None:
    """Of the stored sum, of the one in fp32 and of both; in place as well; y and residual_out as a pair or by name."""
    controls = [c for c in catalogue.controls() if c.op in ADDED.ops]
    assert {"add_rounded", "add_exact", "add_mixed", "add_eager", "add_in_place"} <= {c.name for c in controls}
    for control in controls:
        assert judge_kernel(ADDED, control, dtype) == Judgement(MISSED), control.name


def from_columns(first: int, faulty: Implementation) -> Implementation:
    """A kernel that takes a path of its own for long rows: ``faulty`` from N = ``first`` on, the clean one before."""
    clean = CLEAN_OF[faulty.op]

    def forward(x: Tensor, *arguments: Any, **options: Any) -> Any:
        chosen = faulty if x.shape[-1] >= first else clean
        return chosen.forward(x, *arguments, **options)

    return replace(clean, name="long_rows", forward=forward)


def adding(**steps: Any) -> Implementation:
    return Adding(**steps).implementation("faulty", "fused_add_rmsnorm")


NO_VARIANCE = faulty(rstd=lambda c: torch.full_like(c.v, c.eps**-0.5))
NOT_STORED = {
    "zeros": adding(finish=lambda s, out: {**out, "residual_out": s.stored * 0}),
    "x": adding(finish=lambda s, out: {**out, "residual_out": s.x.clone()}),
    "as it came": adding(finish=lambda s, out: {**out, "residual_out": s.residual.clone()}),
    "negated": adding(finish=lambda s, out: {**out, "residual_out": -s.residual}),
}
LONG = [(VLLM, NO_VARIANCE), *((ADDED, kernel) for kernel in NOT_STORED.values())]
LONG_IDS = ["the variance is ignored", *(f"residual_out is {what}" for what in NOT_STORED)]


@parametrize(("r", "kernel"), LONG, ids=LONG_IDS, inner=1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_faults_of_long_rows_pass_vllm(r: Recipe, kernel: Implementation, dtype: str) -> None:
    """Its x and residual are as small as 1 / N: from N = 5120 eps outweighs the variance, and atol any sum.

    At N = 768 atol outweighs the sum, and eps not yet the variance; at N = 8 neither.
    """
    clean = CLEAN_OF[kernel.op]
    at_768 = MISSED if OPS[kernel.op].adds_residual else CAUGHT
    for first, status in ((5120, MISSED), (768, at_768), (8, CAUGHT)):
        assert judge_mutant(r, from_columns(first, kernel), clean, dtype).status == status, first


@parametrize(("r", "kernel"), LONG, ids=LONG_IDS, inner=1)
def test_and_fail_normcheck(r: Recipe, kernel: Implementation) -> None:
    cell = Cell(OPS[kernel.op], from_columns(5120, kernel), "fp16", "tests")
    profile = replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0)
    verdict = run_cell(cell, Plan((cell,), profile, 0, "cpu", 120.0), lambda cases, worst: None, with_coverage=False)
    assert verdict.failure
    assert verdict.failure.kind == "mismatch"
    wrong = "residual_out" if OPS[kernel.op].adds_residual else "rstd"
    assert verdict.failure.output == wrong


def test_vllm_reads_rows_with_gaps() -> None:
    """A kernel that takes them for packed is caught, though its first rows are right."""
    stride = catalogue.mutants()["mS11"].make("fused_add_rmsnorm")
    clean = CLEAN_OF["fused_add_rmsnorm"]
    assert judge_mutant(ADDED, stride, clean, "fp32").status == CAUGHT
    assert judge_mutant(replace(ADDED, widths=(1,)), stride, clean, "fp32").status == NOT_EXERCISED
    task = tasks_of(ADDED, "fused_add_rmsnorm", "fp32")[1]
    assert task.residual is not None
    assert (task.x.shape, task.x.stride(), task.residual.stride()) == ((4096, 8), (16, 1), (16, 1))
    assert not torch.equal(task.x, task.residual)


def test_rows_with_gaps_are_asked_of_kernels_that_take_them() -> None:
    packed = replace(CLEAN_OF["rmsnorm"], strided=False)
    assert judge_kernel(VLLM, packed, "fp32") == Judgement(MISSED)
    only_gaps = replace(VLLM, widths=(2,))
    assert judge_kernel(only_gaps, packed, "fp32").reason == "layout=x_strided: strided=False is declared"


def test_vllm_draws_numbers_as_small_as_one_over_n() -> None:
    for task in tasks_of(ADDED, "fused_add_rmsnorm", "fp32"):
        assert task.residual is not None
        N = task.x.shape[1]
        for t in (task.x, task.residual):
            assert 0.8 < t.std() * 2 * N < 1.25
    assert task.eps == 1e-6
    assert abs(task.weight.mean() - 1) < 0.01
    assert 0.09 < task.weight.std() < 0.11


def test_the_reference_of_vllm_norms_the_sum_in_fp32_and_rounds_before_the_weight() -> None:
    for task in some(tasks_of(ADDED, "fused_add_rmsnorm", "bf16")):
        assert task.residual is not None
        wide = task.x.double() + task.residual.double()
        normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + task.eps)
        twice = normed.to(torch.bfloat16) * task.weight
        assert torch.equal(task.expected["residual_out"], wide.to(torch.bfloat16))
        assert (task.expected["y"] == twice).double().mean() > 0.99  # but for ties of fp32


def test_the_casting_of_llama_passes_vllm_either_way() -> None:
    """An rmsnorm and an rmsnorm_llama are one to it."""
    rounded = faulty(xhat=lambda c: (c.xc * c.r).to(c.io).float())
    assert judge_mutant(VLLM, rounded, CLEAN_OF["rmsnorm"], "bf16") == Judgement(MISSED)
    for mutant in ("llama-unrounded", "llama-truncated", "llama-rstd-rounded"):
        fault = catalogue.mutants()[mutant].make("rmsnorm_llama")
        assert judge_mutant(VLLM, fault, CLEAN_OF["rmsnorm_llama"], "bf16") == Judgement(MISSED)


@pytest.mark.slow
def test_a_sum_that_depends_on_the_column_or_on_n_passes_vllm() -> None:
    for mutant in ("mS07", "mS08", "mS13", "mS14"):
        fault = catalogue.mutants()[mutant]
        for dtype in some(fault.dtypes):
            made = fault.make("fused_add_rmsnorm")
            assert judge_mutant(ADDED, made, CLEAN_OF["fused_add_rmsnorm"], dtype) == Judgement(MISSED), mutant


def test_a_fault_of_one_call_is_caught_though_the_others_pass() -> None:
    wrong = faulty(preact=lambda c: torch.zeros_like(c.x))
    assert judge_mutant(VLLM, from_columns(8192, wrong), CLEAN_OF["rmsnorm"], "fp32") == Judgement(CAUGHT, ("y",))


def test_a_residual_has_no_reference_of_gradients() -> None:
    with pytest.raises(ValueError, match=r"^recipe=vllm-residual: expected dy=None with op=fused_add_rmsnorm, which "):
        replace(ADDED, dy="mse_mean")
