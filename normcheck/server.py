"""The server that workers are forked from: it imports torch once, beside the process that started it."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    """Starts processes from a server that has imported what a worker needs, and has never run code under test."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["__main__", "normcheck.preloaded"])
    return made


def pid() -> int | None:
    """The server's process, None where it does not run."""
    number = vars(forkserver._forkserver)["_forkserver_pid"]
    return number if isinstance(number, int) else None


def warm(*, interpreted: bool) -> None:
    """Start the server now, so that it imports torch while this process does; and, on a CPU, Triton's interpreter."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # which the server inherits
    context()
    forkserver.ensure_running()
