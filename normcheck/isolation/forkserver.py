"""The server that workers are forked from: it imports torch once, beside the process that started it.

multiprocessing has no public way to find its server, end it, move its socket, or cut a process off from it. So this
module, and no other, uses private names of multiprocessing; tests/isolation/test_forkserver.py says in which versions
of Python they exist.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from normcheck.isolation.descendants import kill_descendants
from normcheck.runner import nvidia_driver


def context() -> ForkServerContext:
    """Context with a server that has imported what a worker needs, and has never run code under test."""
    _shorten_socket_name()
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["__main__", "normcheck.isolation.preload"])
    return made


def _shorten_socket_name() -> None:
    """Put the server's socket below /tmp if the name of TMPDIR is too long for that of a socket."""
    settings = _settings()
    if "tempdir" not in settings and len(os.fsencode(tempfile.gettempdir())) > _LONG_BYTES and os.path.isdir("/tmp"):
        settings["tempdir"] = tempfile.mkdtemp(prefix="normcheck-", dir="/tmp")
        atexit.register(shutil.rmtree, settings["tempdir"], ignore_errors=True)


def _settings() -> dict[str, Any]:
    """multiprocessing's settings of this process, among them the folder of the server's socket."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return settings


_LONG_BYTES = 70  # a socket's name has at most 107, of which multiprocessing adds some 30


def pid() -> int | None:
    """The server's process id, None if it does not run."""
    number: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return number


def started(target: Callable[[socket.socket], None], connection: socket.socket) -> BaseProcess:
    """A new process from the server; it runs ``target(connection)``.

    If code under test has stopped the server, killed it, changed its limits, or deleted the folder of its socket, the
    process comes from a new server.
    """
    if not sound():
        replace()
    wake()
    try:
        return _started(target, connection)
    except (OSError, EOFError):
        replace()
        return _started(target, connection)


def _started(target: Callable[[socket.socket], None], connection: socket.socket) -> BaseProcess:
    process = context().Process(target=target, args=(connection,), name="normcheck worker")
    with _kept_awake():
        process.start()
    _made.setdefault(pid(), _state(pid()))
    _ours.add(pid())
    return process


_WAKE_SECONDS, _MOST_WAKES = 1.0, 120  # a server that does not answer after so many is killed


@contextmanager
def _kept_awake() -> Iterator[None]:
    """Inside the block, wake the server every second, in case somebody stops it; kill it if it never answers."""
    done = threading.Event()

    def wake_often() -> None:
        for _ in range(_MOST_WAKES):
            if done.wait(_WAKE_SECONDS):
                return
            wake()
        _send(signal.SIGKILL)

    waker = threading.Thread(target=wake_often, daemon=True)
    waker.start()
    try:
        yield
    finally:
        done.set()
        waker.join()


@dataclass(frozen=True)
class _State:
    """Settings of the server that its processes inherit, and that any process of the same user can change."""

    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]
    nice: int
    oom: str


_made: dict[int | None, _State | None] = {}
"""Process id of a server -> its state after it started."""

_ours: set[int | None] = set()
"""Process ids of servers that normcheck has started or used."""

_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})


def _state(number: int | None) -> _State | None:
    """The state of a server, None if it has ended."""
    if number is None:
        return None
    try:
        limits = tuple(resource.prlimit(number, limit) for limit in _LIMITS)
        with open(f"/proc/{number}/oom_score_adj", encoding="ascii") as file:
            oom = file.read()
        cores, nice = frozenset(os.sched_getaffinity(number)), os.getpriority(os.PRIO_PROCESS, number)
    except OSError:
        return None
    return _State(limits, cores, nice, oom)


def sound() -> bool:
    """Whether the server, if there is one, still has the state with which it started."""
    number = pid()
    return number not in _made or _made[number] == _state(number)


def wake() -> None:
    """Let the server continue, in case somebody has stopped it."""
    _send(signal.SIGCONT)


def _send(which: signal.Signals) -> None:
    number = pid()
    if number is not None:
        with suppress(ProcessLookupError):
            os.kill(number, which)


def replace() -> None:
    """Kill the server and all processes that come from it; the next process comes from a new server."""
    number = pid()
    try:
        if number is not None:
            kill_descendants(number)
    finally:  # Ctrl-C in there must not leave it stopped
        _send(signal.SIGKILL)
    with suppress(OSError):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    _made.pop(number, None)
    os.makedirs(tempfile.gettempdir(), mode=0o700, exist_ok=True)
    _settings().pop("tempdir", None)


def end() -> None:
    """Kill the server, unless this process had it before normcheck came: stopped or still importing, it would stay."""
    if pid() in _ours:
        _send(signal.SIGKILL)


def forget() -> None:
    """In a process from the server: forget its connections to the server and to the resource tracker."""
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]


def start_early(device: str) -> None:
    """Start the server now: it imports torch, and without a GPU Triton's interpreter, while this process does."""
    if device == "cpu" or (device == "auto" and not nvidia_driver.present()):
        os.environ["TRITON_INTERPRET"] = "1"  # which the server inherits
    context()
    forkserver.ensure_running()
    _ours.add(pid())
