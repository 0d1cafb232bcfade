"""The judge of this process, from the side that asks: started with the first question, kept, replaced if it ends."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_START_SECONDS = 120.0  # for its imports, of torch above all, on a machine that is busy
_ENDING_SECONDS = 10.0
_MAIN = "import sys; sys.path[:] = {}; from normcheck.training import judge; judge.main({}, {!r})"


class NoAnswer(Exception):
    """The judge gave no answer. ``late``: it was at work for longer than any file may take; else it ended."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


@dataclass(frozen=True)
class _Judge:
    """A judge's process and our side of its socket. ``owner``: the process that started it."""

    owner: int
    device: str
    process: subprocess.Popen[bytes]
    connection: socket.socket


_lock = threading.Lock()
_present: _Judge | None = None


def answer(question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The answer of this process's judge, which is started if it is not there. One question at a time, in turn.

    Raises NoAnswer if it ends, or gives none within ``seconds``; the next question then has a new judge.
    """
    with _lock:
        judge = _running(str(question["device"]))
        try:
            judge.connection.sendall(json.dumps(question).encode() + b"\n")
            return _received(judge, seconds)
        except OSError as error:
            _end()
            raise NoAnswer(f"the process that judges broke off ({error})") from None
        except BaseException:  # a late answer would be taken for that to another question
            _end()
            raise


def close() -> None:
    """End this process's judge, if there is one, with all that it has started; the next question starts another."""
    with _lock:
        _end(gently=True)


def _running(device: str) -> _Judge:
    """The judge for ``device``. A process that was forked from the one that started a judge has its own."""
    global _present
    if _present is not None and _present.owner != os.getpid():
        _present.connection.close()
        _present = None
    if _present is not None and (_present.device != device or _present.process.poll() is not None):
        _end(gently=True)
    if _present is None:
        _present = _started(device)
        try:
            _received(_present, _START_SECONDS)
        except BaseException:
            _end()
            raise
    return _present


def _started(device: str) -> _Judge:
    ours, theirs = socket.socketpair()
    with theirs:
        code = _MAIN.format(sys.path, theirs.fileno(), device)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is for the process that asks
        )
    return _Judge(os.getpid(), device, process, ours)


def _received(judge: _Judge, seconds: float) -> dict[str, Any]:
    """The next line of a judge. Raises NoAnswer."""
    end, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        judge.connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            chunk = judge.connection.recv(1 << 16)
        except TimeoutError:
            raise NoAnswer(f"the process that judges gave no answer in {seconds:g} s", late=True) from None
        if not chunk:
            raise NoAnswer("the process that judges ended")
        line += chunk
    told: dict[str, Any] = json.loads(line)
    return told


def _end(*, gently: bool = False) -> None:
    """End the present judge. It ends by itself when nobody asks any more, and its processes end with it in any case."""
    global _present
    judge, _present = _present, None
    if judge is None or judge.owner != os.getpid():
        return
    judge.connection.close()
    if gently:
        with suppress(subprocess.TimeoutExpired):
            judge.process.wait(_ENDING_SECONDS)
    judge.process.kill()
    judge.process.wait()


@atexit.register
def _at_exit() -> None:
    _end(gently=True)
