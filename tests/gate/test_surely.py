"""What is no proof if it happens once: a process that ends in its first case, a GPU without memory, a late result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.finding import Problem
from normcheck.gate import blame
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.discovery import implementations
from normcheck.impls.implementation import Implementation
from normcheck.isolation import forkserver
from normcheck.isolation.replies import WITH_ITS_SERVER
from normcheck.isolation.select import select_apart
from normcheck.oracle.tolerances import table
from normcheck.result import Verdict
from normcheck.runner.time_limit import TimeIsUp

CASE = Case(op="rmsnorm", dtype="fp32", M=1, N=8)
FULL = Problem("exception", "", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
WRONG = Problem("exception", "", "RuntimeError: mine")
ENDED = Problem("crash", "", "its process was ended by SIGSEGV during forward")
ENDED_WITH_SERVER = Problem("crash", "", f"{WITH_ITS_SERVER} during forward")
LATE = Problem("timeout", "", "no result after timeout=1 s, during forward")


def run(
    monkeypatch: pytest.MonkeyPatch, device: str, *problems: Problem | None, patient: bool = True
) -> tuple[Result, int]:
    """The result of a case whose runs have these problems, one after the other, and how often it ran."""
    cell = Cell(OPS["rmsnorm"], implementations()["torch"][0], "fp32", "torch")
    plan = Plan((cell,), PROFILES["quick"], 0, device, 60.0)
    left: Iterator[Problem | None] = iter(problems)
    ran = []

    def once(*_: object, **__: object) -> Result:
        ran.append(1)
        problem = next(left)
        return Result(CASE, table().model, problems=(problem,) if problem else (), after=(CASE,))

    monkeypatch.setattr(blame, "run_case", once)
    monkeypatch.setattr(blame, "_SECONDS_FOR_MEMORY", 0.0)
    return blame.run_surely(cell, CASE, plan, Ask(patient=patient)), len(ran)


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


def test_a_result_that_was_late_once_is_no_finding_but_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result, ran = run(monkeypatch, "cpu", LATE, None)
    assert (result.problems, result.late, ran) == ((), True, 2)
    assert result.notes == (
        f"{CASE} was late once, and in time when it was run again, as it may be on a busy machine: {LATE.message}",
    )


@pytest.mark.parametrize("again", [LATE, WRONG])
def test_what_is_late_and_then_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, again: Problem) -> None:
    result, ran = run(monkeypatch, "cpu", LATE, again)
    assert (result.problems, result.late, ran) == ((again,), False, 2)


def test_who_has_no_patience_runs_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    result, ran = run(monkeypatch, "cpu", LATE, None, patient=False)
    assert (result.problems, ran) == ((LATE,), 1)


def swept(implementation: Implementation, timeout: float) -> Verdict:
    cell = Cell(OPS["rmsnorm"], implementation, "fp32", implementation.source)
    profile = replace(PROFILES["quick"], max_examples=40, seconds=100.0, shrink_seconds=0.0)
    return run_cell(cell, Plan((cell,), profile, 0, "cpu", timeout), lambda cases, worst: None, with_coverage=False)


@pytest.mark.parametrize("at", [{50}, {50, 100}], ids=["once", "twice"])
def test_a_kernel_that_hangs_now_and_then_is_found_the_second_time(at: set[int]) -> None:
    """A machine may be too busy once in a cell, and a kernel whose threads wait for each other may pass many cases."""
    calls = 0

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in at:
            raise TimeIsUp  # as the limit would: no test of a second hangs on how busy this machine is
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        return y if bias is None else y + bias

    verdict = swept(Implementation(name="mine", op="rmsnorm", forward=forward), 60.0)
    late = [note for note in verdict.notes if " was late once, " in note]
    assert len(late) == 1
    if len(at) == 1:
        assert (verdict.status, verdict.cases) == ("pass", 40), verdict.detail
    else:
        assert verdict.failure is not None
        assert verdict.failure.kind == "timeout"


PLAIN = """
import torch

def rmsnorm(x, weight, bias, *, eps):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias
"""


@pytest.mark.slow
def test_a_process_that_ends_with_its_server_once_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is out of memory ends what it likes, and so does code under test that runs beside."""
    path = tmp_path / "mine.py"
    path.write_text(PLAIN, encoding="utf-8")
    (implementation,) = select_apart(str(path), ("rmsnorm",), "cpu", 60.0)
    servers = set[int]()

    def run(cell: Cell, case: Case, *more: Any, **by_name: Any) -> Result:
        if case.N > 100 and not servers:
            server = forkserver.pid()
            assert server is not None
            servers.add(server)
            os.kill(server, signal.SIGKILL)
        return run_case(cell, case, *more, **by_name)

    monkeypatch.setattr(blame, "run_case", run)
    verdict = swept(implementation, 60.0)
    ended = [note for note in verdict.notes if f"from a new server, did not: {WITH_ITS_SERVER}" in note]
    assert (verdict.status, verdict.cases, len(ended), len(servers)) == ("pass", 40, 1, 1), verdict


@pytest.mark.parametrize(("problem", "runs"), [(ENDED, 1), (ENDED_WITH_SERVER, 2)], ids=["itself", "with its server"])
def test_a_process_that_ends_after_other_cases_ran_is_a_finding_by_itself_at_once_and_with_its_server_the_second_time(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, runs: int
) -> None:
    result, ran = run(monkeypatch, "cpu", problem, problem)
    assert (result.problems, ran) == ((problem,), runs)


LATE_ONCE = """
import os, time
from pathlib import Path
import torch

once, compiled = Path(os.environ["TRITON_CACHE_DIR"], "late"), set()  # all of its processes find the same

def rmsnorm(x, weight, bias, *, eps):
    if not compiled:
        compiled.add(time.sleep(1.3))
    if x.shape[-1] > 64 and not once.exists():
        once.touch()
        time.sleep(1000)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias
"""


@pytest.mark.slow
def test_the_new_process_that_runs_it_again_has_time_to_compile(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(LATE_ONCE, encoding="utf-8")
    (implementation,) = select_apart(str(path), ("rmsnorm",), "cpu", 60.0)
    verdict = swept(implementation, 1.0)
    assert (verdict.status, verdict.cases) == ("pass", 40), verdict.detail
    (note,) = (note for note in verdict.notes if " was late once, " in note)
    assert "no result after timeout=1 s, during " in note


BUILDING = """
import os, time, uuid
import torch

tuned = set()

def rmsnorm(x, weight, bias, *, eps):
    if x.shape[-1] > 64 and not tuned:
        for _ in range({count}):
            time.sleep(0.4)
            os.mkdir(os.path.join(os.environ["TRITON_CACHE_DIR"], uuid.uuid4().hex))
        time.sleep({then})
        tuned.add(True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "then", "status"),
    [(6, 0, "pass"), (1, 1000, "fail"), (1000, 0, "fail")],
    ids=["a tuner", "it hangs once it has built something", "it builds for ever"],
)
def test_who_builds_one_thing_after_another_does_not_hang(count: int, then: float, status: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BUILDING.format(count=count, then=then), encoding="utf-8")
    (implementation,) = select_apart(str(path), ("rmsnorm",), "cpu", 60.0)
    verdict = swept(implementation, 1.0)
    assert verdict.status == status, verdict.detail
    assert not [note for note in verdict.notes if " was late once, " in note]
    if verdict.failure is not None:
        assert verdict.failure.kind == "timeout" and "no result after timeout=1 s" in verdict.failure.message
