"""Correct kernels that are transcribed from libraries: they are the libraries' own bits, and nobody accuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normcheck.audit import catalogue
from normcheck.audit.mutants.libraries import CONTROLS
from normcheck.audit.recipe_judge import MISSED, NOT_EXERCISED, judge_kernel
from normcheck.audit.recipes import recipe
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.result import Verdict

BY_NAME = {control.name: control for control in CONTROLS}


def verdict_of(implementation: Implementation, dtype: str, seed: int) -> Verdict:
    """The verdict of a core of few rows, each of which is normed by itself, and of few columns."""
    quick = PROFILES["quick"]
    extent = replace(quick.extent.with_dear_rows, elements=20_000, columns=300, fine=False)
    profile = replace(quick, seconds=0.0, extent=extent)
    cell = Cell(OPS[implementation.op], implementation, dtype, "tests")
    return run_cell(cell, Plan((cell,), profile, seed, "cpu", 120.0), lambda cases, worst: None)


def test_an_audit_has_them() -> None:
    assert set(BY_NAME) <= {control.name for control in catalogue.controls()}


def test_a_recipe_asks_them_only_what_they_support() -> None:
    """A recipe that adds a bias says nothing about a kernel without one."""
    control = BY_NAME["timm_rms_norm"]
    refused = judge_kernel(recipe("torch-testing"), control, "fp32")
    assert (refused.status, refused.reason) == (NOT_EXERCISED, "bias=yes: biases=(False,) is declared")
    assert judge_kernel(recipe("kernelbench"), control, "fp32").status == MISSED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [(control.name, dtype) for control in CONTROLS for dtype in control.dtypes if control.dtypes[1:]]
)
def test_nobody_accuses_them_in_any_dtype(name: str, dtype: str) -> None:
    """Those of several dtypes: an audit, which CI runs as well, has large cases of each in one of its dtypes."""
    verdict = verdict_of(BY_NAME[name], dtype, seed=sum(map(ord, name + dtype)))
    assert verdict.failure is None, (verdict.failure.case, verdict.failure.message)
    assert verdict.status == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm_rms_norm", "torch_nn_layer_norm", "transformers_t5"])
def test_what_is_right_in_fp32_only_says_so(name: str) -> None:
    """Where a dtype is not declared, the kernel is wrong in it: the declaration hides nothing."""
    control = BY_NAME[name]
    assert control.dtypes == ("fp32",)
    for dtype in ("fp16", "bf16"):
        assert verdict_of(replace(control, dtypes=DTYPES), dtype, seed=0).status == "fail"


def test_the_modules_of_torch_give_the_same_bits() -> None:
    x, weight, bias = torch.randn(3, 7), torch.randn(7), torch.randn(7)
    rms, layer = torch.nn.RMSNorm(7, eps=1e-3), torch.nn.LayerNorm(7, eps=1e-3)
    with torch.no_grad():
        rms.weight.copy_(weight)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    assert torch.equal(BY_NAME["torch_nn_rms_norm"].forward(x, weight, None, eps=1e-3), rms(x))
    assert torch.equal(BY_NAME["torch_nn_layer_norm"].forward(x, weight, bias, eps=1e-3), layer(x))
