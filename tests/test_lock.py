"""Processes and threads wait in line for one thing, go past each other for another, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from normcheck.lock import locked


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def stay(what: str, seconds: float, times: Any, together: Any) -> None:
    together.wait()  # a fork takes long on a busy machine
    with locked(what, seconds):
        times.put(("in", time.monotonic()))
        time.sleep(0.3)
        times.put(("out", time.monotonic()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whats", "seconds", "apart"), [("aaa", 30.0, True), ("aaa", 0.0, False), ("abc", 30.0, False)]
)
def test_of_those_in_one_line_one_goes_on(whats: str, seconds: float, apart: bool) -> None:
    context = multiprocessing.get_context("fork")
    times, together = context.Queue(), context.Barrier(3)
    processes = [context.Process(target=stay, args=(what, seconds, times, together)) for what in whats]
    for process in processes:
        process.start()
    seen = sorted((times.get(timeout=30) for _ in range(6)), key=lambda pair: pair[1])
    for process in processes:
        process.join()
    assert ([word for word, _ in seen] == ["in", "out"] * 3) == apart


def test_threads_wait_as_well() -> None:
    inside, most = threading.Semaphore(1), []

    def one(_: int) -> None:
        with locked("threads", 30.0):
            most.append(inside.acquire(blocking=False))
            time.sleep(0.05)
            inside.release()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3)))
    assert most == [True] * 3


def test_a_line_ends_with_the_process_that_is_first_in_it() -> None:
    context = multiprocessing.get_context("fork")
    times, together = context.Queue(), context.Barrier(1)
    first = context.Process(target=stay, args=("killed", 30.0, times, together))
    first.start()
    assert times.get(timeout=30)[0] == "in" and first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    begun = time.monotonic()
    with locked("killed", 30.0):
        assert time.monotonic() - begun < 20
    first.join()


def test_if_the_folder_takes_no_file_nobody_waits(folder: Path) -> None:
    (folder / f"normcheck-{os.getuid()}").symlink_to("/dev/null")  # somebody else's: it is not followed
    begun = time.monotonic()
    with locked("a", 30.0), locked("a", 30.0):
        assert time.monotonic() - begun < 20
