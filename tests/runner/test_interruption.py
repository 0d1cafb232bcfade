"""SIGTERM as Ctrl-C, in the block alone, and in the main thread alone."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from normcheck.runner.interruption import interruptible


def test_sigterm_is_an_interrupt_in_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_changes_nothing() -> None:
    seen = []

    def look() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
