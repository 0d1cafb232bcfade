"""Signals that end a run as Ctrl-C does: SIGTERM, as ``kill`` and a CI job that is cancelled send it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(*more: signal.Signals) -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt in the main thread, so that processes are ended and reports written.

    So do ``more``: SIGINT for a run that has no other end, since a shell has what a script runs in its background
    ignore that, and Python then leaves it ignored.
    In another thread it changes nothing: only the main one may set what a signal does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, *more)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
