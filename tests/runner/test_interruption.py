"""SIGTERM as Ctrl-C, in the block alone, and in the main thread alone; SIGINT though a shell has it ignored."""

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


def test_sigint_is_one_again_if_it_is_named() -> None:
    """A shell starts what a script runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interruptible(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing() -> None:
    seen = []

    def look() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
