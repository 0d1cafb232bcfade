"""Turns at most of a GPU's memory, for which the processes that judge on one GPU wait in line.

Each process has a share of the memory. A case that needs more than a share runs in a turn, in which the share does not
count; other processes go on with smaller cases.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

WAIT_SECONDS = 60.0
"""For another process's turn to end. After that both share what memory there is."""

_LOOK_SECONDS = 0.05


@contextmanager
def turn() -> Iterator[None]:
    """Within it, this process may use all of its GPU's memory that is free, and no other process has a turn."""
    share = torch.cuda.get_per_process_memory_fraction()
    with in_line(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)):
        torch.cuda.set_per_process_memory_fraction(1.0)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(share)


@contextmanager
def in_line(what: str, seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Within it, no other process of this user is in line for ``what``, unless it waited for more than ``seconds``."""
    path = Path(tempfile.gettempdir()) / f"normcheck-{os.getuid()}-{what}"
    lock = -1
    with suppress(OSError):  # a full or foreign folder: nobody waits
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if lock >= 0:
            _wait(lock, time.monotonic() + seconds)
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _wait(lock: int, end: float) -> None:
    """Lock the file, which closing it unlocks, or wait until ``end``."""
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)
