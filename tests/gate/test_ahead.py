"""Another process compiles ahead: what a kernel's compiler keeps on disk is cheap then, and nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate import ahead
from normcheck.gate.costs import WARMED
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.isolation.process import Worker
from normcheck.isolation.select import select_apart
from normcheck.isolation.session import ProcessSession
from normcheck.result import Verdict

KERNEL = """
import os, time
from pathlib import Path
import torch

DISK, SECONDS, compiled = Path(os.environ["TRITON_CACHE_DIR"]), {seconds}, set()  # all of its processes find the same

def built(name):
    if name in compiled:
        return
    compiled.add(name)
    if {keeps} and (DISK / name).exists():
        return
    time.sleep(SECONDS)
    (DISK / name).touch()

def rmsnorm(x, weight, bias, *, eps):
    {first}
    built(str(x.shape[-1]))
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""

DIES_IF_SECOND = """owner = DISK / "owner"
    if not owner.exists():
        owner.write_text(str(os.getpid()))
    if owner.read_text() != str(os.getpid()):
        {what}
"""


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


ONE_DIES = """owner, died = DISK / "owner", DISK / "died"
    if not owner.exists():
        owner.write_text(str(os.getpid()))
    if owner.read_text() != str(os.getpid()) and not died.exists():
        died.touch()
        os._exit(1)
"""


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[ahead.Ahead]:
    """What compiled ahead in the cells of a test."""
    made: list[ahead.Ahead] = []
    begin = ahead.Ahead.__enter__
    monkeypatch.setattr(ahead.Ahead, "__enter__", lambda self: made.append(self) or begin(self))
    return made


def verdict_of(
    tmp_path: Path, *, keeps: bool = True, first: str = "pass", workers: int = 1, slower: float = 1.0
) -> Verdict:
    """The verdict of a kernel in a process of its own, which compiles for each N; ``slower``: all its times longer."""
    file = tmp_path / "mine.py"
    file.write_text(KERNEL.format(keeps=keeps, first=first, seconds=0.3 * slower), encoding="utf-8")
    (implementation,) = select_apart(f"{file}:rmsnorm", ("rmsnorm",), "cpu", 60.0)
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", f"{file}:rmsnorm")
    profile = replace(PROFILES["quick"], seconds=0.2, core_seconds=2.7 * slower)  # on a busy machine, too
    return run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0, workers=workers), lambda cases, worst: None)


def accused(verdict: Verdict) -> bool:
    """Whether the kernel was found wrong. On a busy machine it is thin, and then "asleep", as its compiler sleeps."""
    return verdict.status not in ("pass", "thin") and verdict.error != "asleep"


def until(
    tmp_path: Path, looked: list[ahead.Ahead], done: Callable[[ahead.Ahead], bool], **how: Any
) -> tuple[Verdict, ahead.Ahead]:
    """The cell again until ``done``: on a busy machine calls take as long as compiling, and nothing is done ahead.

    So compiling takes longer each time.
    """
    for attempt in range(6):
        (folder := tmp_path / str(attempt)).mkdir()
        verdict = verdict_of(folder, slower=1 + attempt / 2, **how)
        assert not accused(verdict), verdict.detail
        if done(looked[-1]):
            break
    return verdict, looked[-1]


def was_asked(one: ahead.Ahead) -> bool:
    return one.asked > 0


@pytest.mark.slow
def test_shapes_that_were_compiled_ahead_are_cheap(
    tmp_path: Path, cores: None, looked: list[ahead.Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[Worker] = []
    start = ProcessSession.another
    monkeypatch.setattr(ProcessSession, "another", lambda self: workers.append(start(self)) or workers[-1])
    _, one = until(tmp_path, looked, lambda one: one.core.costs.number(WARMED) >= 2)
    costs = one.core.costs
    assert costs.number(WARMED) >= 2
    assert costs.first_call(WARMED) < 0.3 * costs.first_call("N")
    assert not one.is_possible  # it has ended
    assert not any(worker.alive or psutil.pid_exists(worker.pid) for worker in workers)


@pytest.mark.slow
def test_it_ends_if_the_compiler_keeps_nothing(tmp_path: Path, cores: None, looked: list[ahead.Ahead]) -> None:
    _, one = until(tmp_path, looked, was_asked, keeps=False)
    assert one.asked > 0
    assert one.core.costs.number(WARMED) <= 6  # some more may have been under way


@pytest.mark.slow
@pytest.mark.parametrize("what", ["os._exit(1)", "raise ValueError('no')", "time.sleep(1000)"])
def test_whatever_happens_to_it_is_no_part_of_the_verdict(
    tmp_path: Path, cores: None, looked: list[ahead.Ahead], what: str
) -> None:
    _, one = until(tmp_path, looked, was_asked, first=DIES_IF_SECOND.format(what=what).strip())
    assert one.core.costs.number(WARMED) == 0
    assert one.asked > 0


@pytest.mark.slow
def test_one_that_dies_leaves_the_others(
    tmp_path: Path, looked: list[ahead.Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))  # two of them
    _, one = until(tmp_path, looked, lambda one: one.core.costs.number(WARMED) >= 1, first=ONE_DIES.strip())
    assert one.core.costs.number(WARMED) >= 1


@pytest.mark.parametrize(("cores", "cells", "expected"), [(2, 1, 1), (2, 2, 0), (16, 12, 0), (16, 5, 2), (16, 1, 4)])
def test_as_many_compile_ahead_as_there_are_cores_to_spare(cores: int, cells: int, expected: int) -> None:
    assert ahead.spare(cores, cells) == expected


@pytest.mark.slow
def test_there_is_none_without_a_core_to_spare(tmp_path: Path, cores: None, looked: list[ahead.Ahead]) -> None:
    verdict = verdict_of(tmp_path, workers=2)
    assert not accused(verdict), verdict.detail
    assert looked[0].asked == 0
