"""Jobs in processes that may die: every job has its result, and the right one is blamed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
import pytest

from normcheck.isolation import pool
from normcheck.isolation.pool import Pool, spread
from tests.inner_loop import parametrize


def start() -> None:
    """Nothing to make ready."""


def work(job: str) -> str:
    assert gc.isenabled()  # not only until ``start`` is imported
    if job == "dies":
        os._exit(0)
    if job == "waits":
        time.sleep(0.3)  # it is running when the other one takes the pool along
    return f"{job} in {os.getpid()}"


def died(job: str) -> str:
    return f"{job} died"


def apart(job: str) -> bool:
    return job == "alone"


@pytest.mark.slow
def test_a_death_is_blamed_on_the_job_that_did_it() -> None:
    jobs = ("waits", "dies", "last", "alone")
    found = dict(spread(work, jobs, workers=2, start=start, died=died, apart=apart))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[1] == "dies died"
    for index in (0, 2, 3):
        assert found[index].startswith(f"{jobs[index]} in ")
    assert len({found[0], found[3].replace("alone", "waits")}) == 2  # a process of its own


RUN = """
import gc, time
from normcheck.isolation.pool import spread
list(spread(time.sleep, {}, workers=2, start=gc.collect, died=None, apart=lambda job: False))
"""


@contextmanager
def first(jobs: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A process that has spread ``jobs`` over two others, and those, whose end is waited for; else they are killed."""
    with subprocess.Popen([sys.executable, "-c", RUN.format(jobs)], stderr=subprocess.DEVNULL) as process:
        own = psutil.Process(process.pid)
        assert within(60.0, lambda: sum("spawn_main" in " ".join(p.cmdline()) for p in own.children()) == 2)
        time.sleep(0.5)  # until both are at work
        children = own.children(recursive=True)
        yield process, children
    ended = within(30.0, lambda: not any(child.is_running() for child in children))
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    assert ended


@pytest.mark.slow
@parametrize("which", [signal.SIGTERM, signal.SIGKILL], inner=1)
def test_no_process_outlives_the_first_one(which: signal.Signals) -> None:
    with first("(600, 600)") as (process, _):
        process.send_signal(which)
        assert process.wait(10) == -which


@pytest.mark.slow
def test_one_that_waits_for_its_next_job_does_not_either() -> None:
    with first("(0, 600)") as (process, children):
        assert all(child.is_running() for child in children)
        process.kill()


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_processes_that_were_begun_before_serve_first() -> None:
    begun = Pool(2, start)
    begun.begin()
    early = {child.pid for child in multiprocessing.active_children()}
    found = dict(spread(work, ("one", "two"), workers=2, start=start, died=died, apart=apart, begun=begun))
    assert {int(word.rpartition(" ")[2]) for word in found.values()} <= early
    assert not early & {child.pid for child in multiprocessing.active_children()}


def starts_slowly() -> None:
    time.sleep(300.0)


def test_processes_that_nobody_needs_end_at_once() -> None:
    """Though they are not ready."""
    begun, began = Pool(2, starts_slowly), time.monotonic()
    begun.begin()
    early = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    begun.end()
    assert psutil.wait_procs(early, timeout=30.0)[1] == []
    assert time.monotonic() - began < 60.0


def test_one_worker_is_this_process() -> None:
    found = spread(work, ("one", "two"), workers=1, start=start, died=died, apart=apart)
    assert list(found) == [(0, f"one in {os.getpid()}"), (1, f"two in {os.getpid()}")]


def begins(job: str) -> float:
    began = time.monotonic()
    time.sleep(0.1)
    return began


@pytest.mark.slow
def test_the_caller_chooses_at_what_is_known_by_then() -> None:
    known: dict[str, float] = {}
    jobs = ("cheap 1", "dear 1", "cheap 2", "cheap 3", "cheap 4", "dear 2", "dear 3")
    began: dict[str, float] = {}
    beside: list[int] = []

    def dearest(waiting: Sequence[str], running: Sequence[str]) -> int:
        beside.append(len(running))
        return max(range(len(waiting)), key=lambda place: known.get(waiting[place][:4], 9.0))

    found = spread(
        begins,
        jobs,
        workers=2,
        start=start,
        died=lambda job: 0.0,
        apart=apart,
        choose=dearest,
    )
    for index, at in found:
        known[jobs[index][:4]] = float(jobs[index].startswith("dear"))
        began[jobs[index]] = at
    assert max(began["dear 2"], began["dear 3"]) < min(began["cheap 3"], began["cheap 4"])
    assert beside[0] == 0 and set(beside[1:]) <= {0, 1} and len(beside) == len(jobs)


def test_an_interrupt_that_meets_the_lock_of_a_wait_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's threading has it, if the handler raises between the release of a lock and its next turn."""

    def broken(running: object, **limits: object) -> object:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(pool, "wait", broken)
    with pytest.raises(KeyboardInterrupt):
        pool._waited_for({}, None)
    monkeypatch.setattr(pool, "wait", lambda running, **limits: (_ for _ in ()).throw(RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        pool._waited_for({}, None)
