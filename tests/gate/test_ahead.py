"""Another process compiles ahead: what a kernel's compiler keeps on disk is cheap then, and nothing else changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.cases.planned import Planned
from normcheck.checks.cell import Cell
from normcheck.errors import Broken
from normcheck.gate import ahead
from normcheck.gate.configurations import InTurn
from normcheck.gate.plan import PROFILES, Plan, planner_of
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.isolation.process import Worker
from normcheck.isolation.sandbox import Sandbox
from normcheck.isolation.select import select_apart
from normcheck.isolation.session import ProcessSession
from normcheck.result import Verdict
from tests.case_lines import case_of
from tests.some import some

FILE = "mine.py"
KERNEL = """
import os, time
from pathlib import Path
import torch

DISK, SECONDS, compiled = Path(os.environ["TRITON_CACHE_DIR"]), {seconds}, set()  # all of its processes find the same
OWN = str(os.getpid())

def built(name):
    if name in compiled:
        return
    compiled.add(name)
    if (DISK / name).exists():
        if OWN == (DISK / "owner").read_text() != (DISK / name).read_text():
            (DISK / "found").touch()  # the process that is judged finds what another has compiled
        return
    time.sleep(SECONDS)
    (DISK / name).write_text(OWN)

def rmsnorm(x, weight, bias, *, eps):
    if not (DISK / "owner").exists():
        (DISK / "owner").write_text(OWN)
    if (DISK / "owner").read_text() != OWN:
        {second}
    built(str(x.shape[-1]))
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""

FEW, MANY = 30, 60
"""Within so few cases something compiles ahead; within so many what it compiled is asked for."""


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[ahead.Ahead]:
    """What compiled ahead in the cells of a test."""
    made: list[ahead.Ahead] = []
    begin = ahead.Ahead.__enter__
    monkeypatch.setattr(ahead.Ahead, "__enter__", lambda self: made.append(self) or begin(self))
    return made


def verdict_of(tmp_path: Path, *, second: str = "pass", slower: float = 1.0, most: int = FEW) -> Verdict:
    """The verdict of a kernel in a process of its own, which compiles for each N; ``slower``: all its times longer.

    ``second``: what it does in any other process.
    """
    file = tmp_path / FILE
    file.write_text(KERNEL.format(second=second, seconds=0.3 * slower), encoding="utf-8")
    (implementation,) = select_apart(f"{file}:rmsnorm", ("rmsnorm",), "cpu", 60.0)
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", f"{file}:rmsnorm")
    profile = replace(PROFILES["quick"], seconds=0.2, core_seconds=2.7 * slower, max_examples=most)
    return run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0), lambda cases, worst: None)


def accused(verdict: Verdict) -> bool:
    """Whether the kernel was found wrong. On a busy machine it is thin, and then "asleep", as its compiler sleeps."""
    return verdict.status not in ("pass", "thin") and verdict.error != "asleep"


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether ``holds`` becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def until(
    tmp_path: Path, looked: list[ahead.Ahead], done: Callable[[Path, ahead.Ahead], bool], **how: Any
) -> ahead.Ahead:
    """The cell again until ``done``: on a busy machine calls take as long as compiling, and nothing is done ahead.

    So compiling takes longer each time.
    """
    for attempt in range(6):
        (folder := tmp_path / str(attempt)).mkdir()
        verdict = verdict_of(folder, slower=1 + attempt / 2, **how)
        assert not accused(verdict), verdict.detail
        if done(Path(Sandbox.of(f"{folder / FILE}:rmsnorm").folder) / "triton", looked[-1]):
            return looked[-1]
    raise AssertionError("nothing was done ahead")


@pytest.mark.slow
def test_what_another_process_has_compiled_is_found(
    tmp_path: Path, cores: None, looked: list[ahead.Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[Worker] = []
    start, look = ProcessSession.another, ahead.Ahead.look

    def patient(self: ahead.Ahead) -> None:
        """On a busy machine the other process comes too late for all of these cases."""
        look(self)
        assert within(30.0, lambda: all(helper.is_idle or helper.has_answered for helper in self._helpers))

    monkeypatch.setattr(ahead.Ahead, "look", patient)
    monkeypatch.setattr(ProcessSession, "another", lambda self: workers.append(start(self)) or workers[-1])
    one = until(tmp_path, looked, lambda disk, one: (disk / "found").exists(), most=MANY)
    assert not one.is_possible  # it has ended
    assert not any(worker.alive or psutil.pid_exists(worker.pid) for worker in some(workers))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["os._exit(1)", "raise ValueError('no')", "time.sleep(1000)"])
def test_whatever_happens_to_it_is_no_part_of_the_verdict(
    tmp_path: Path, cores: None, looked: list[ahead.Ahead], what: str
) -> None:
    one = until(tmp_path, looked, lambda disk, one: one.asked > 0, second=what)
    assert not one.core.prices.is_tried("process")


class Process:
    """A process that compiles ahead, which has always answered; ``dies``: it ends when it is asked for a case."""

    has_answered = True

    def __init__(self, *, dies: bool) -> None:
        self.dies, self.sent, self.killed = dies, list[dict[str, Any]](), False

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def receive(self, seconds: float, what: str) -> dict[str, Any]:
        if self.dies and self.sent and self.sent[-1]["do"] == "warm":
            raise Broken("crash", "", "it has ended")
        return {}

    def kill(self) -> None:
        self.killed = True


def start_these(processes: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """These processes are started, in this order."""
    started = iter(processes)
    session = SimpleNamespace(another=lambda: next(started))
    monkeypatch.setattr(ahead, "ProcessSession", SimpleNamespace)
    monkeypatch.setattr(ahead, "session_of", lambda implementation: session)


CELL = Cell(OPS["rmsnorm"], Implementation(name="mine", op="rmsnorm", forward=lambda *_, **__: None), "fp16", "mine.py")


def ends_after(steps: int, monkeypatch: pytest.MonkeyPatch, *, keeps: bool) -> int | None:
    """Which of so many ``steps`` ends it, None if none does. What a compiler ``keeps`` costs nothing again.

    A new N takes two seconds, of a clock that this test has.
    """
    process = Process(dies=False)
    start_these([process], monkeypatch)
    plan = Plan((CELL,), replace(PROFILES["quick"], core_seconds=30.0), 0, "cpu", 60.0)
    core, compiled, ended = planner_of(CELL, plan), set[int](), None
    with ahead.Ahead(CELL, plan, core, InTurn(CELL, plan, core)) as one:
        for number in range(steps):
            step = core.next()
            assert step is not None
            n = step.planned.case.N
            core.saw(step, refused=False, seconds=0.001 if n in compiled else 2.0)
            elsewhere = {case_of(message["case"]).N for message in process.sent if message["do"] == "warm"}
            compiled |= {n, *elsewhere} if keeps else {n}
            one.look()
            if not one.is_possible:
                ended = number
                break
        assert one.asked > 2 and core.prices.is_tried("process")
        assert (core.prices.of("process") < 0.3 * core.prices.dearest) == keeps
        assert (core.prices.warming_is_idle, process.killed) == (not keeps, not keeps)
    return ended


@pytest.mark.slow
def test_it_ends_if_the_compiler_keeps_nothing_and_else_it_makes_shapes_cheap(
    cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = ends_after(200, monkeypatch, keeps=False)
    assert last is not None
    assert ends_after(last + 10, monkeypatch, keeps=True) is None


PLAN = Plan((CELL,), PROFILES["quick"], 0, "cpu", 60.0)


def dear_core() -> Any:
    """A core in which building is dear, with eight shapes to compile; ``done``: which N were, and whether well."""
    shapes = iter([Planned(Case(op="rmsnorm", dtype="fp16", M=2, N=n), Depth.MEMORY) for n in range(1, 9)])
    done = list[tuple[int, bool]]()
    return SimpleNamespace(
        is_priced=True,
        prices=SimpleNamespace(warming_is_idle=False, forget_warmed=lambda: None),
        ahead=lambda: next(shapes, None),
        compiled=lambda planned, *, well: done.append((planned.case.N, well)),
        done=done,
    )


def test_one_that_dies_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [Process(dies=number == 0) for number in range(4)]
    start_these(processes, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))  # three of them
    core = dear_core()
    with ahead.Ahead(CELL, PLAN, core, InTurn(CELL, PLAN, core)) as one:
        for _ in range(20):
            one.look()
        assert [process.killed for process in processes] == [True, False, False, False]
        core.is_priced = False
        one.look()
        assert [process.killed for process in processes] == [True, True, True, False] and one.is_possible
        core.is_priced = True  # once more: as many may be started again, but for the one that died
        one.look()
        assert one.is_possible and not processes[3].killed
    assert [n for n, well in core.done if not well] == [1]
    assert sorted(n for n, _ in core.done) == list(range(1, 9))
    assert all(process.killed for process in processes) and not one.is_possible


@pytest.mark.parametrize(("cores", "cells", "expected"), [(2, 1, 1), (2, 2, 0), (16, 12, 0), (16, 5, 2), (16, 1, 4)])
def test_as_many_compile_ahead_as_there_are_cores_to_spare(cores: int, cells: int, expected: int) -> None:
    assert ahead.spare(cores, cells) == expected


@pytest.mark.parametrize(
    ("workers", "gpu", "asked"), [(1, "free", 8), (2, "free", 0), (1, "full", 0), (1, "filled", 1)]
)
def test_there_is_none_without_a_core_to_spare_or_on_a_full_gpu(
    workers: int, gpu: str, asked: int, cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that spill held 8 GiB a process, those that compiled ahead as well: 80 GB were full.

    ``filled``: it is by the first shape that was compiled ahead.
    """
    process = Process(dies=False)
    start_these([process], monkeypatch)
    monkeypatch.setattr(ahead, "_is_full", lambda device: gpu == "full" or (gpu == "filled" and one.asked > 0))
    plan, core = replace(PLAN, workers=workers), dear_core()
    with ahead.Ahead(CELL, plan, core, InTurn(CELL, plan, core)) as one:
        for _ in range(20):
            one.look()
        assert one.asked == asked
        assert one.is_possible == (gpu == "full" or asked == 8)  # one that is full may yet have room
        assert process.killed == (gpu == "filled")


@pytest.mark.parametrize(("device", "free", "full"), [("cuda", 7, True), ("cuda", 9, False), ("cpu", 7, False)])
def test_a_gpu_is_full_before_its_last_gibibytes(
    device: str, free: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    assert ahead._is_full(device) is full
