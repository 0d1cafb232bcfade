"""A time limit for a block of code in this process's main thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUp(BaseException):
    """The time of ``alarm`` is over. Not an Exception, so that code which catches all of those lets it pass."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp inside the block after ``seconds``.

    It interrupts Python code, and a call into native code once that returns. There is no limit outside the main thread,
    nor on a platform without interval timers.
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
        if left:  # an outer timer, such as a test runner's
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3), every)
