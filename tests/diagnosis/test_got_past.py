"""Kernels that once got past: what the diagnosis names for those with wrong values, and how many it names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from normcheck.cases.ops import OPS
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.diagnosis.explain import explanation
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.implementation import Implementation
from normcheck.runner.device import device_for
from tests.case_lines import case_of
from tests.command_line import Cli
from tests.inner_loop import parametrize

FOLDER = Path(__file__).parents[1] / "quality" / "got_past"
PLAN = Plan((), PROFILES["quick"], 0, "cpu", 60.0)


def _plain(op: str, call: Callable[..., Any]) -> Callable[[ModuleType], Implementation]:
    """The implementation of a file that has a plain function or a class."""
    return lambda module: Implementation(
        name="plain",
        op=op,
        forward=lambda x, weight, bias, **options: call(module, x, weight, bias, **options),
        biases=(False,) if "rmsnorm" in op else (True, False),
    )


def _declared(module: ModuleType) -> Implementation:
    (implementation,) = module.IMPLEMENTATIONS
    return implementation


def _module_norm(module: ModuleType, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = module.Norm(x.shape[-1], eps=eps, bias=bias is not None)
    norm.weight = torch.nn.Parameter(weight)
    if bias is not None:
        norm.bias = torch.nn.Parameter(bias)
    return norm(x)


NAMES: dict[str, tuple[str, Callable[[ModuleType], Implementation], tuple[str, ...]]] = {
    "w03_two_rows": ("stats_over_2_rows", _declared, ("rmsnorm fp16 M=4 N=320 bias=none",)),
    "w09_pairs": ("weight_missing weight_missing_without_bias", _declared, ("layernorm fp16 M=3 N=64 bias=none",)),
    "w09d_class": (
        "weight_missing weight_missing_without_bias",
        _plain("layernorm", _module_norm),
        ("layernorm fp16 M=3 N=64 bias=none",),
    ),
    "w11_code_twice": (
        "codes_twice",
        _plain("rmsnorm_quant", lambda m, x, w, b, eps, scale: {"q": m.rmsnorm_quant(x, w, scale, eps)}),
        ("rmsnorm_quant fp32 M=20 N=64 bias=none scale=normal",),
    ),
    "w22_long_rows": (
        "stats_first_32768_columns",
        _plain("rmsnorm", lambda m, x, w, b, eps: m.rmsnorm(x, w, eps)),
        ("rmsnorm fp16 M=1 N=40000 rows=tail bias=none",),
    ),
    "w24_stale_eps": (
        "eps_stale",
        _declared,
        ("rmsnorm fp16 M=3 N=64 eps=0.001 bias=none", "rmsnorm fp16 M=3 N=64 eps=0.5 bias=none"),
    ),
    "w29_not_rounded": (
        "fits_round_before_quant_none",
        _declared,
        ("rmsnorm_quant fp16 M=17 N=7 rows=blend bias=none scale=tiny",),
    ),
}
"""File -> the right names, the implementation, and case lines of which the last one fails. Those that are not here are
wrong in what no value shows, or in none.
"""


@parametrize("name", NAMES, inner=2)
def test_the_fault_of_a_kernel_that_got_past_is_named(name: str) -> None:
    right, made, lines = NAMES[name]
    path = FOLDER / f"{name}.py"
    if not path.exists():
        pytest.skip("its file is not here yet")
    device_for("cpu")  # so that Triton's kernels are interpreted
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    implementation = made(module)
    cell = Cell(OPS[implementation.op], implementation, lines[0].split()[1], name)
    *before, failed = (run_case(cell, case_of(line), PLAN) for line in lines)
    assert failed.failed
    earlier = tuple(result.case.eps for result in before)
    found = explanation(cell, failed, PLAN, seconds=120.0, earlier=earlier)
    assert found is not None and found.name in right.split()


@pytest.mark.slow
def test_a_convention_that_fits_every_case_is_told_beside_the_one_that_is_declared(cli: Cli) -> None:
    done = cli("verify", "--impl", str(FOLDER / "w29_not_rounded.py"), "--dtype", "fp16", "--device", "cpu")
    said = " ".join(done.out.split())
    assert done.code == 1, done.err
    assert "Might be: fits round_before_quant=none in every case; declared io; this predicts all" in said


@pytest.mark.slow
def test_codes_that_are_rounded_twice_get_no_advice_to_declare_what_does_not_fit(cli: Cli) -> None:
    """In bf16 some of its cases look as if y were rounded to bf16 first, and others as if nothing were."""
    path = str(FOLDER / "w11_code_twice.py")
    done = cli("verify", "--impl", path, "--dtype", "bf16", "--device", "cpu")
    said = " ".join(done.out.split())
    assert "Might be: codes are rounded twice: the quotient goes through bf16 first" in said
    assert "Declare the one that is meant" not in said
