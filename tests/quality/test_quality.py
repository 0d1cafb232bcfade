"""Tests of the tester: what the default profile finds, what it shrinks to, and what it must not accuse."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from normcheck.audit import catalogue
from normcheck.audit.mutants.mutant import Mutant
from normcheck.cases.ops import OPS as TABLE
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.result import Verdict

TORCH_MUTANTS = {
    mutant.id: mutant
    for mutant in catalogue.mutants().values()
    if not (mutant.not_exercised or mutant.device) and mutant.promised == "quick" and mutant.language == "torch"
}
"""Those that run anywhere in a second; ``test_mutants_triton.py`` has those that the interpreter runs."""

CELLS = [
    (mutant.id, op, mutant.dtypes[(i + j) % len(mutant.dtypes)])
    for i, mutant in enumerate(TORCH_MUTANTS.values())
    for j, op in enumerate(mutant.ops)
][::240]
"""A sample of all, always the same one, to see what a finding names and shrinks to. ``normcheck audit``, which CI runs
as well, kills every one and runs the correct kernels."""


def verdict_of(implementation: Implementation, dtype: str, *, cases: int | None = None, seed: int = 0) -> Verdict:
    """The verdict of a cell under the default profile, or over a fixed number of cases."""
    profile = PROFILES["quick"]
    if cases is not None:
        profile = replace(profile, max_examples=cases, seconds=600.0, large_share=0.0)
    cell = Cell(TABLE[implementation.op], implementation, dtype, "tests")
    plan = Plan((cell,), profile, seed, "cpu", 120.0)
    return run_cell(cell, plan, lambda cases, worst: None, with_coverage=cases is None)


def needs_more_than_a_small_case(mutant: Mutant) -> bool:
    """Whether no small case alone shows it: only a size above one that it names, as M > 1056, or a number of calls."""
    return re.search(r"\b[MN] > \d\d|\bcalls$", mutant.when) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("id", "op", "dtype"), CELLS)
def test_every_fault_is_found_and_shrinks(id: str, op: str, dtype: str) -> None:
    mutant = TORCH_MUTANTS[id]
    verdict = verdict_of(mutant.make(op), dtype)
    assert verdict.status == "fail"
    failure = verdict.failure
    assert failure is not None
    assert failure.output in mutant.outputs, failure.message
    assert failure.kind in mutant.kinds, failure.message
    rows, columns = (int(word.split("=")[1]) for word in failure.case.split()[2:4])
    assert rows * columns <= 64 or needs_more_than_a_small_case(mutant), failure.case


@pytest.mark.slow
def test_a_fault_of_one_dtype_passes_in_another() -> None:
    mutant = TORCH_MUTANTS["store-truncated"]
    assert "fp32" not in mutant.dtypes
    for op in mutant.ops:
        assert verdict_of(mutant.make(op), "fp32", cases=8).failure is None
