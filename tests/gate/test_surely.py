"""What is no proof if it happens once: a process that ends in its first case, a GPU without memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.finding import Problem
from normcheck.checks.probes import Depth
from normcheck.gate import blame
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.discovery import implementations
from normcheck.oracle.tolerances import table

CASE = Case(op="rmsnorm", dtype="fp32", M=1, N=8)
FULL = Problem("exception", "", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
WRONG = Problem("exception", "", "RuntimeError: mine")


def run(monkeypatch: pytest.MonkeyPatch, device: str, *problems: Problem | None) -> tuple[Result, int]:
    """The result of a case whose runs have these problems, one after the other, and how often it ran."""
    cell = Cell(OPS["rmsnorm"], implementations()["torch"][0], "fp32", "torch")
    plan = Plan((cell,), PROFILES["quick"], 0, device, 60.0)
    left: Iterator[Problem | None] = iter(problems)
    ran = []

    def run_case(*_: object, **__: object) -> Result:
        ran.append(1)
        problem = next(left)
        return Result(CASE, table().model, problems=(problem,) if problem else ())

    monkeypatch.setattr(blame, "run_case", run_case)
    monkeypatch.setattr(blame, "_SECONDS_FOR_MEMORY", 0.0)
    return blame.run_surely(cell, CASE, plan, {}, Depth.ROWS), len(ran)


def test_memory_that_was_missing_once_is_no_finding_but_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result, ran = run(monkeypatch, "cuda", FULL, None)
    assert (result.problems, ran) == ((), 2)
    assert result.notes == (f"the GPU's memory ran out in {CASE}, and did not soon after: {FULL.message}",)


def test_memory_that_is_missing_again_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    result, ran = run(monkeypatch, "cuda", FULL, FULL)
    assert (result.problems, ran) == ((FULL,), 2)


@pytest.mark.parametrize(("device", "problem"), [("cuda", WRONG), ("cpu", FULL)])
def test_other_exceptions_are_findings_at_once(monkeypatch: pytest.MonkeyPatch, device: str, problem: Problem) -> None:
    result, ran = run(monkeypatch, device, problem, None)
    assert (result.problems, ran) == ((problem,), 1)
