"""A lock for which processes of one user wait: for a GPU's memory, or for what one of them compiles."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WAIT_SECONDS = 60.0
"""For whoever holds the lock, if nothing else is said."""

_LOOK_SECONDS = 0.05
_BYTE = struct.Struct("hhqqi4x")  # Linux's struct flock: kind, whence, start, length, and no process


@contextmanager
def locked(what: str, seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Within it, no other process of this user holds the lock of ``what``, unless it waited for more than ``seconds``.

    Threads of one process wait for each other as well. The lock ends with the process that holds it.
    """
    path = Path(tempfile.gettempdir()) / f"normcheck-{os.getuid()}"
    file = -1
    with suppress(OSError):  # a full or foreign folder: nobody waits
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if file >= 0:
            _wait(file, what, time.monotonic() + seconds)
        yield
    finally:
        if file >= 0:
            os.close(file)


def _wait(file: int, what: str, end: float) -> None:
    """Lock the byte of ``what`` in ``file``, which closing it unlocks, or wait until ``end``.

    A lock of this open file, and not of this process: so threads wait, too, and closing another file ends nothing.
    """
    place = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _BYTE.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
            return
        time.sleep(_LOOK_SECONDS)
