"""The server that workers are forked from: it imports torch once, beside the process that started it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess


def context() -> ForkServerContext:
    """Starts processes from a server that has imported what a worker needs, and has never run code under test."""
    _make_room()
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["__main__", "normcheck.preloaded"])
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

    Code under test may have stopped the server, or deleted the folder of its socket: then it is from another one.
    """
    wake()
    try:
        return _started(target, connection)
    except (OSError, EOFError):
        _replace()
        return _started(target, connection)


def _started(target: Callable[[socket.socket], None], connection: socket.socket) -> BaseProcess:
    process = context().Process(target=target, args=(connection,), name="normcheck worker")
    process.start()
    return process


def wake() -> None:
    """Let the server go on, in case that somebody has stopped it."""
    number = pid()
    if number is not None:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT)


def _replace() -> None:
    """End the server; the next process comes from a new one, whose folder is there."""
    number = pid()
    if number is not None:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    with suppress(OSError):
        vars(type(forkserver._forkserver))["_stop"](forkserver._forkserver)
    os.makedirs(tempfile.gettempdir(), mode=0o700, exist_ok=True)
    vars(multiprocessing.current_process())["_config"].pop("tempdir", None)


def warm(*, interpreted: bool) -> None:
    """Start the server now, so that it imports torch while this process does; and, on a CPU, Triton's interpreter."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # which the server inherits
    context()
    forkserver.ensure_running()
