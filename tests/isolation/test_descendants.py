"""What a process has started is found and killed, also what is started meanwhile, in sessions of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from normcheck.isolation.descendants import kill_children, kill_descendants

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="adopts orphans, as Linux can")

ADOPTS = "import ctypes, os, sys, time; ctypes.CDLL(None).prctl(36, 1); root = os.getpid()\n"
"""What every process that runs code under test does first: what loses its parent becomes its child."""

CHAIN = """
for _ in range(200):
    if os.fork():
        break
    os.setsid()
    time.sleep(0.03)
"""
"""Each process starts one more, in a session of its own, 30 ms after it was started itself."""

ORPHANS = """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        break
"""
"""Three processes whose parents have ended, and which are adopted."""

STAYS = "\nif os.getpid() == root: print(flush=True)\ntime.sleep(60)"


@contextmanager
def started(code: str) -> Iterator[psutil.Process]:
    """A process that runs ``code``, and has told that it is there."""
    process = subprocess.Popen([sys.executable, "-c", ADOPTS + code + STAYS], stdout=subprocess.PIPE)
    assert process.stdout
    try:
        process.stdout.readline()
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def living(root: psutil.Process) -> list[psutil.Process]:
    return [p for p in root.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("code", [CHAIN, ORPHANS], ids=["chain", "orphans"])
def test_nothing_is_left_of_what_a_process_has_started(code: str) -> None:
    with started(code) as root:
        kill_descendants(root.pid)
        gone_by = time.monotonic() + 5  # a killed process ends when the system lets it run once more
        while living(root) and time.monotonic() < gone_by:
            time.sleep(0.01)
        assert living(root) == []
        assert root.is_running()


def test_children_are_killed_but_for_some() -> None:
    with started(CHAIN) as root, started("") as other:
        own = psutil.Process()
        kill_children(own.pid, but={other.pid, *(p.pid for p in own.children() if p not in (root, other))})
        assert root.wait(10) is not None
        assert other in living(own)


def test_a_process_that_is_gone_has_started_nothing() -> None:
    with started("") as root:
        pass
    kill_descendants(root.pid)
    kill_children(root.pid, but=())
