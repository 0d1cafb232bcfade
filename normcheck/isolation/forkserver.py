"""The server that workers are forked from: it imports torch once, beside the process that started it."""

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
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from normcheck.isolation.descendants import kill_descendants


def context() -> ForkServerContext:
    """Starts processes from a server that has imported what a worker needs, and has never run code under test."""
    _make_room()
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["__main__", "normcheck.isolation.preload"])
    return made


def _make_room() -> None:
    """Put the server's socket elsewhere than below a TMPDIR whose name is longer than that of a socket may be."""
    settings = vars(multiprocessing.current_process())["_config"]
    if "tempdir" not in settings and len(os.fsencode(tempfile.gettempdir())) > _LONG and os.path.isdir("/tmp"):
        settings["tempdir"] = tempfile.mkdtemp(prefix="normcheck-", dir="/tmp")
        atexit.register(shutil.rmtree, settings["tempdir"], ignore_errors=True)


_LONG = 70  # bytes; a socket's name has at most 107, of which multiprocessing adds some 30


def pid() -> int | None:
    """The server's process, None where it does not run."""
    number = vars(forkserver._forkserver)["_forkserver_pid"]
    return number if isinstance(number, int) else None


def started(target: Callable[[socket.socket], None], connection: socket.socket) -> BaseProcess:
    """A process from the server that runs ``target(connection)``.

    Code under test may have stopped the server, killed it, changed its limits, or deleted the folder of its socket:
    then the process is from another server.
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
    with _pressed():
        process.start()
    _made.setdefault(pid(), _state(pid()))
    return process


_PRESSED_EVERY, _PATIENCE = 1.0, 120  # seconds; and how often before a server that does not answer is given up


@contextmanager
def _pressed() -> Iterator[None]:
    """Wake the server as long as it is waited for, in case that somebody stops it; kill it when it never answers."""
    done = threading.Event()

    def press() -> None:
        for _ in range(_PATIENCE):
            if done.wait(_PRESSED_EVERY):
                return
            wake()
        _send(signal.SIGKILL)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    try:
        yield
    finally:
        done.set()
        pressing.join()


@dataclass(frozen=True)
class _State:
    """What a process that was forked from the server inherits, and any process of the same user can change."""

    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]
    nice: int
    oom: str


_made: dict[int | None, _State | None] = {}
"""Server -> the state in which it came up."""

_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})


def _state(number: int | None) -> _State | None:
    """The state of a server, None where it is gone."""
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
    """Whether the server, if there is one, is as it came up."""
    number = pid()
    return number not in _made or _made[number] == _state(number)


def wake() -> None:
    """Let the server go on, in case that somebody has stopped it."""
    _send(signal.SIGCONT)


def _send(which: signal.Signals) -> None:
    number = pid()
    if number is not None:
        with suppress(ProcessLookupError):
            os.kill(number, which)


def replace() -> None:
    """End the server, and with it all that comes from it; the next process comes from a new one."""
    number = pid()
    if number is not None:
        kill_descendants(number)
    _send(signal.SIGKILL)
    with suppress(OSError):
        vars(type(forkserver._forkserver))["_stop"](forkserver._forkserver)
    _made.pop(number, None)
    os.makedirs(tempfile.gettempdir(), mode=0o700, exist_ok=True)
    vars(multiprocessing.current_process())["_config"].pop("tempdir", None)


def warm(*, interpreted: bool) -> None:
    """Start the server now, so that it imports torch while this process does; and, on a CPU, Triton's interpreter."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # which the server inherits
    context()
    forkserver.ensure_running()
