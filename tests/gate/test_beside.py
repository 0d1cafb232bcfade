"""Idle cores take cases of the same cell: sooner done, and nothing else is another than with one core."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.beside import Beside, Done
from normcheck.gate.plan import PROFILES, Plan, planner_of
from normcheck.gate.sequence import Sequence
from normcheck.gate.sweep import run_cell
from normcheck.gate.tally import Tally
from normcheck.impls import discovery
from normcheck.isolation.select import select_apart
from normcheck.result import Verdict

KERNEL = """
import os, time
import torch

called = []

def rmsnorm(x, weight, bias, *, eps):
    called.append(x.shape)
    time.sleep({seconds})
    {first}
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""

SOMETIMES_LATE = "time.sleep(0.3 * (hash(tuple(called)) % 25 == 0))"
WRONG_AT_A_SIZE = "weight = weight * (1.0 + (x.shape[-1] == 768))"
MOST = 45
DIES_AFTER_MANY = "len(called) < 40 or os._exit(3)"


def verdict_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    *,
    first: str = "pass",
    seconds: float = 0.01,
    most: int = MOST,
) -> tuple[Verdict, list[str]]:
    """The verdict of a kernel that sleeps in each call, and its cases in the order in which they were counted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    counted: list[str] = []

    count = Tally.add

    def add(self: Tally, result: Result) -> None:
        counted.append(str(result.case))
        count(self, result)

    file = tmp_path / f"with_{cores}.py"
    file.write_text(KERNEL.format(first=first, seconds=seconds), encoding="utf-8")
    (implementation,) = select_apart(f"{file}:rmsnorm", ("rmsnorm",), "cpu", 60.0)
    cell = Cell(OPS["rmsnorm"], replace(implementation, builds=False), "fp16", f"{file}:rmsnorm")
    profile = replace(PROFILES["quick"], seconds=0.1, core_seconds=600.0, max_examples=most, shrink_seconds=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(Tally, "add", add)
        verdict = run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0), lambda cases, worst: None)
    return verdict, counted


def cases_of(*, look: bool, seconds: float = 0.01) -> tuple[list[str], list[str]]:
    """Cases of a cell in their order, of which some follow the core, and those that ``coming`` had not told before.

    It tells no large one.
    """
    implementation = next(i for i in discovery.select("torch", ("rmsnorm",)) if i.op == "rmsnorm")
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "torch")
    plan = Plan((cell,), replace(PROFILES["quick"], max_examples=410, seconds=1000.0), 0, "cpu", 60.0)
    core, ran, untold = planner_of(cell, plan), list[str](), list[str]()
    sequence = Sequence(cell, plan, core, lambda: len(ran))
    told: list[str] = []
    for asked in sequence:
        line = f"{asked.planned.case} {asked.planned.probe}"
        assert not (asked.is_large and line in told)
        if look and line not in told and not asked.is_large:
            untold.append(line)
        ran.append(line)
        told = [f"{planned.case} {planned.probe}" for planned in sequence.coming(4)] if look else []
        sequence.saw(asked, refused=False, seconds=seconds)
    return ran, untold


@pytest.mark.slow
def test_what_comes_is_told_before_its_turn_and_changes_nothing() -> None:
    cases, _ = cases_of(look=False)
    own, untold = cases_of(look=True)
    assert own == cases and len(cases) == 410
    opened = next(number for number, line in enumerate(cases) if line not in untold)
    assert len(untold) <= opened + 2  # those that open the core, and where it is drawn anew or ends


@pytest.mark.slow
def test_the_cases_and_their_order_do_not_hang_on_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, cases = verdict_of(tmp_path, monkeypatch, 1, first=SOMETIMES_LATE)
    assert len(cases) == alone.cases == MOST
    result, taken = Beside.result, list[Done]()

    def counted(self: Beside, *arguments: Any) -> Done | None:
        done = result(self, *arguments)
        taken.extend([done] * (done is not None))
        return done

    monkeypatch.setattr(Beside, "result", counted)
    beside, own = verdict_of(tmp_path, monkeypatch, 3, first=SOMETIMES_LATE)
    assert own == cases
    assert (beside.status, beside.cases, beside.shapes) == (alone.status, alone.cases, alone.shapes)
    assert beside.worst == alone.worst
    assert beside.core and alone.core and beside.core.missed == alone.core.missed
    assert len(taken) > MOST / 3  # the cases that open a core run alone


@pytest.mark.slow
def test_the_first_wrong_case_is_that_of_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, cases = verdict_of(tmp_path, monkeypatch, 1, first=WRONG_AT_A_SIZE, most=300)
    beside, own = verdict_of(tmp_path, monkeypatch, 4, first=WRONG_AT_A_SIZE, most=300)
    assert alone.failure is not None and beside.failure is not None
    assert (beside.status, beside.failed_at, own) == (alone.status, alone.failed_at, cases)
    assert "N=768" in beside.failure.case and beside.failure.kind == alone.failure.kind


@pytest.mark.slow
def test_one_that_dies_after_many_cases_dies_beside_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, _ = verdict_of(tmp_path, monkeypatch, 2, first=DIES_AFTER_MANY, most=300)
    assert verdict.failure is not None and verdict.failure.kind == "crash"


@pytest.mark.slow
def test_a_process_that_somebody_else_has_killed_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, killed = Beside.look, []

    def kills(self: Beside, *arguments: Any) -> None:
        look(self, *arguments)
        workers = [session._client._worker for session in self._sessions]
        for worker in [worker for worker in workers if worker is not None and worker.alive][: 1 - len(killed)]:
            killed.append(worker)
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(Beside, "look", kills)
    verdict, cases = verdict_of(tmp_path, monkeypatch, 2)
    assert killed and verdict.failure is None and len(cases) == MOST
