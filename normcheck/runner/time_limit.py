"""A time limit for a piece of this process's own main thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUp(BaseException):
    """The time limit of ``alarm``. Not an Exception, so that code which swallows those does not swallow it."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp inside the block after ``seconds``.

    It interrupts Python code and whatever returns to it; a call that never does is not interrupted. Outside the main
    thread, or where the platform has no interval timer, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    begun = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody else's timer, such as that of a test runner
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3), every)
