"""The descendants of a process, by their parents, in whatever session they are now: what they do, and their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def kill_descendants(root: int) -> None:
    """Kill the descendants of process ``root``, in whatever session they are; ``root`` itself is stopped and stays.

    A killed process starts no others, but may have started some during the search: the next round finds them. Zombies
    count as well, since they too may have started processes after the search.
    """
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGSTOP)
    killed: set[psutil.Process] = set()
    for _ in range(20):
        found = _descendants(root, recursive=True)
        if found <= killed:
            return
        for process in found:
            _kill(process)
        killed |= found


def busy_seconds(root: int) -> float:
    """Seconds of a processor that the descendants of process ``root`` have had, or its child has waited for.

    It counts what their own children had, once these have ended. 0 if there are none any more.
    """
    import psutil

    seconds = 0.0
    for process in _descendants(root, recursive=True):
        with suppress(psutil.Error, OSError, ValueError):
            seconds += sum(process.cpu_times()[:4])
            if process.ppid() == root:
                with open(f"/proc/{process.pid}/schedstat", encoding="ascii") as file:
                    seconds += int(file.read().split()[1]) / 1e9
    return seconds


def kill_children(parent: int, *, but: Collection[int | None]) -> None:
    """Kill the children of a process, except those in ``but``, and the descendants of the killed ones."""
    for process in _descendants(parent, recursive=False):
        if process.pid not in but:
            kill_descendants(process.pid)
            _kill(process)


def _descendants(root: int, *, recursive: bool) -> set[psutil.Process]:
    import psutil  # not at the top: the process of a user's code imports this file, and never needs psutil

    try:
        return set(psutil.Process(root).children(recursive=recursive))
    except psutil.Error:
        return set()


def _kill(process: psutil.Process) -> None:
    import psutil

    with suppress(psutil.Error):
        process.kill()
