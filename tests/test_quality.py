"""Tests of the tester: what the default profile finds, what it shrinks to, and what it must not accuse."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from normcheck.audit.mutants.correct import CONTROLS
from normcheck.audit.mutants.kernel import OPS
from normcheck.audit.mutants.mutant import Mutant
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.result import Verdict

TORCH_MUTANTS = {
    mutant.id: mutant
    for mutant in discovery.mutants().values()
    if not (mutant.not_exercised or mutant.device) and mutant.promised == "quick" and mutant.language == "torch"
}
"""Those that run anywhere in a second; ``test_mutants_triton.py`` has those that the interpreter runs."""

CELLS = [
    (mutant.id, op, mutant.dtypes[(i + j) % len(mutant.dtypes)])
    for i, mutant in enumerate(TORCH_MUTANTS.values())
    for j, op in enumerate(mutant.ops)
][::15]
"""A sample of all, always the same one. ``normcheck audit``, which CI runs as well, runs the whole."""


def verdict_of(implementation: Implementation, dtype: str, *, cases: int | None = None, seed: int = 0) -> Verdict:
    """The verdict of a cell under the default profile, or over a fixed number of cases."""
    profile = PROFILES["quick"]
    if cases is not None:
        profile = replace(profile, max_examples=cases, seconds=600.0, large_share=0.0)
    cell = Cell(discovery.ops()[implementation.op], implementation, dtype, "tests")
    return run_cell(cell, Plan((cell,), profile, seed, "cpu", 120.0), lambda cases, worst: None)


def needs_more_than_a_small_case(mutant: Mutant) -> bool:
    """Whether no small case alone shows it: only a size above one that it names, as M > 1056, or a number of calls."""
    return re.search(r"\b[MN] > \d\d|\bcalls$", mutant.when) is not None


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


@pytest.mark.parametrize(("number", "make"), tuple(enumerate(sorted({i.name for i in CONTROLS}))))
def test_no_correct_kernel_is_accused(number: int, make: str) -> None:
    """Each make in one op and dtype, with seeds of their own. CI also runs ``normcheck audit``, which has all."""
    op = sorted(OPS)[number % len(OPS)]
    (implementation,) = (i for i in CONTROLS if i.name == make and i.op == op)
    seed = sum(map(ord, make + op))
    dtype = implementation.dtypes[seed % len(implementation.dtypes)]
    verdict = verdict_of(implementation, dtype, cases=20, seed=seed)
    assert verdict.failure is None, (verdict.failure.case, verdict.failure.message)
    assert verdict.cases == 20


def test_a_fault_of_one_dtype_passes_in_another() -> None:
    mutant = TORCH_MUTANTS["store-truncated"]
    assert "fp32" not in mutant.dtypes
    for op in mutant.ops:
        assert verdict_of(mutant.make(op), "fp32", cases=40).failure is None
