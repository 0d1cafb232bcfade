"""Implementation under Python's debugger: pdb opens where the implementation raises, or right after its forward."""

from __future__ import annotations

import bdb
import functools
import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from normcheck.errors import UnsupportedCase, error_text, one_line
from normcheck.impls.implementation import Implementation

FOREVER_SECONDS = 1e6
"""Time limit of a case while somebody looks at it."""


def debugged(implementation: Implementation) -> Implementation:
    """The same implementation, which stops once: where it first raises, or after its first forward."""
    stopped: list[str] = []
    backward = implementation.backward

    @functools.wraps(implementation.forward)
    def forward(x: Any, weight: Any, bias: Any, *, eps: float, **options: float) -> Any:
        with _stop_where_it_raises(stopped):
            returned = implementation.forward(x, weight, bias, eps=eps, **options)
        with quitting():  # in here, since outside BdbQuit would look like an exception of the implementation
            if not stopped:
                stopped.append("after forward")
                _debugger().set_trace(sys._getframe())
            return returned

    return replace(implementation, forward=forward, backward=backward and _watched(backward, stopped))


def _watched(backward: Callable[..., Any], stopped: list[str]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def call(*arguments: Any, **options: Any) -> Any:
        with _stop_where_it_raises(stopped, again=True):
            return backward(*arguments, **options)

    return call


@contextmanager
def _stop_where_it_raises(stopped: list[str], *, again: bool = False) -> Iterator[None]:
    """Open the debugger on an exception raised within. ``again``: even if it stopped after forward already."""
    try:
        yield
    except (UnsupportedCase, bdb.BdbQuit, KeyboardInterrupt):
        raise
    except Exception as error:
        if "raised" not in stopped and (again or not stopped):
            stopped.append("raised")
            frames = error.__traceback__ and error.__traceback__.tb_next
            print(f"normcheck: raised {one_line(error_text(error))}; q goes on to the report", file=sys.stderr)
            opened = _debugger()
            opened.reset()  # without it, leaving the debugger raises
            opened.interaction(None, frames)
        raise


def _debugger() -> pdb.Pdb:
    """A debugger on the terminal, even if standard output is redirected."""
    opened = pdb.Pdb(nosigint=True)
    opened.stdout = sys.__stdout__ or sys.stdout
    return opened


@contextmanager
def quitting() -> Iterator[None]:
    """Leaving the debugger by ``q``, or at the end of its input, interrupts the run."""
    try:
        yield
    except bdb.BdbQuit:
        print("normcheck: left the debugger, nothing was judged; c goes on to the report", file=sys.stderr)
        raise KeyboardInterrupt from None
