"""Tests of the tester: what the default profile finds, what it shrinks to, and what it must not accuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from normcheck import discovery
from normcheck.plan import PROFILES, Cell, Plan
from normcheck.result import Verdict
from normcheck.sweep import run_cell

KERNELS = Path(__file__).parent / "kernels"
sys.path.insert(0, str(KERNELS))

import correct  # noqa: E402
import faulty  # noqa: E402


def verdict_of(implementation: object, dtype: str, *, cases: int | None = None, seed: int = 0) -> Verdict:
    """The verdict of a cell under the default profile, or over a fixed number of cases."""
    profile = PROFILES["quick"]
    if cases is not None:
        profile = replace(profile, max_examples=cases, seconds=600.0, large_share=0.0)
    cell = Cell(discovery.ops()[implementation.op], implementation, dtype, "tests")
    return run_cell(cell, Plan((cell,), profile, seed, "cpu", 120.0), lambda cases, worst: None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("fault_id", sorted(faulty.FAULTS))
def test_every_fault_is_found_and_shrinks(fault_id: str) -> None:
    fault = faulty.FAULTS[fault_id]
    for implementation in fault.implementations.values():
        for dtype in fault.dtypes:
            verdict = verdict_of(implementation, dtype)
            where = f"{fault_id} {implementation.op} {dtype}"
            assert verdict.status == "fail", where
            failure = verdict.failure
            assert failure is not None
            assert failure.kind in ("mismatch", "non_finite"), where
            assert failure.output in fault.outputs, (where, failure.output)
            rows, columns = (int(word.split("=")[1]) for word in failure.case.split()[2:4])
            assert rows * columns <= 64, (where, failure.case)


@pytest.mark.parametrize("make", sorted({i.name for i in correct.IMPLEMENTATIONS}))
@pytest.mark.parametrize("op", sorted(discovery.ops()))
def test_no_correct_kernel_is_accused(make: str, op: str) -> None:
    """16 makes x 4 ops x 3 dtypes x 60 cases: 11,520 cases."""
    (implementation,) = (i for i in correct.IMPLEMENTATIONS if i.name == make and i.op == op)
    for dtype in implementation.dtypes:
        verdict = verdict_of(implementation, dtype, cases=60, seed=sum(map(ord, make + op)))
        assert verdict.failure is None, (verdict.failure.case, verdict.failure.message)
        assert verdict.cases == 60


def test_a_fault_of_one_dtype_passes_in_another() -> None:
    fault = faulty.FAULTS["store-truncated"]
    assert "fp32" not in fault.dtypes
    for implementation in fault.implementations.values():
        assert verdict_of(implementation, "fp32", cases=80).status == "pass"
