"""SIGTERM, as ``kill`` and a CI job that is cancelled send it, treated like Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt in the main thread, so that processes are ended and reports written.

    In another thread it changes nothing: only the main one may set what a signal does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
