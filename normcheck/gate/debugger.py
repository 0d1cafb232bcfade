"""Implementation under Python's debugger: pdb opens where its forward and its backward return, or where they raise."""

from __future__ import annotations

import bdb
import functools
import pdb
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any

from normcheck.errors import UnsupportedCase, error_text, one_line
from normcheck.impls import source_location
from normcheck.impls.implementation import Implementation

FOREVER_SECONDS = 1e6
"""Time limit of a case while somebody looks at it."""


def debugged(implementation: Implementation) -> Implementation:
    """The same implementation, which stops where each of its functions first returns, and where one first raises."""
    stopped: set[str] = set()
    backward = implementation.backward
    return replace(
        implementation,
        forward=_watched(implementation.forward, "forward", stopped),
        backward=backward and _watched(backward, "backward", stopped),
    )


def _watched(function: Callable[..., Any], name: str, stopped: set[str]) -> Callable[..., Any]:
    """``function``, watched by the debugger. ``stopped``: where it has opened, of "forward", "backward", "raised"."""
    code = source_location.code_of(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if name in stopped:
            with _stop_where_it_raises(code, stopped):
                return function(*arguments, **options)
        with _stop_where_it_raises(code, stopped), _stop_where_it_returns(code, name, stopped):
            returned = function(*arguments, **options)
        if name not in stopped:
            stopped.add(name)
            why = "is no Python function" if code is None else "returned None, or is not run by Python itself"
            _say(f"{name} {why}: this is normcheck's own call, and returned is what came of it")
            _Debugger().set_trace(sys._getframe())
        return returned

    return call


@contextmanager
def _stop_where_it_returns(code: CodeType | None, name: str, stopped: set[str]) -> Iterator[None]:
    """Open the debugger in the first frame of ``code`` that is called within, when it returns something."""
    before = sys.gettrace()

    def called(frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or frame.f_code is not code:
            return None
        opened = _AtReturn(code, name, stopped)
        opened.set_trace(frame)
        opened.set_return(frame)
        return opened.trace_dispatch

    sys.settrace(called)
    try:
        yield
    finally:
        if name not in stopped:  # else the debugger's commands have decided what is traced
            sys.settrace(before)


@contextmanager
def _stop_where_it_raises(code: CodeType | None, stopped: set[str]) -> Iterator[None]:
    """Open the debugger on the first exception raised within, in the innermost frame of the file of ``code``."""
    try:
        yield
    except (UnsupportedCase, KeyboardInterrupt):
        raise
    except Exception as error:
        if "raised" not in stopped:
            stopped.add("raised")
            frames = error.__traceback__ and error.__traceback__.tb_next
            _say(f"raised {one_line(error_text(error))}; q goes on to the report")
            opened = _Debugger(code)
            opened.reset()  # without it, leaving the debugger raises
            opened.interaction(None, frames)
        raise


class _Debugger(pdb.Pdb):
    """A debugger on the terminal, even if standard output is redirected. Leaving it by ``q`` interrupts the run."""

    def __init__(self, code: CodeType | None = None) -> None:
        super().__init__(nosigint=True)
        self.stdout = sys.__stdout__ or sys.stdout
        self._code = code

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """As of pdb, but leaving raises KeyboardInterrupt: for code under test, BdbQuit is an error like others."""
        try:
            return super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            _say("left the debugger, nothing was judged; c goes on to the report")
            raise KeyboardInterrupt from None

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """As of pdb; of a traceback that ends in a library, the user's innermost frame is the present one."""
        stack, present = super().get_stack(f, t)
        if f is None and self._code is not None:
            own = [i for i, (frame, _) in enumerate(stack) if frame.f_code.co_filename == self._code.co_filename]
            present = own[-1] if own else present
        return stack, present


class _AtReturn(_Debugger):
    """A debugger that first opens when a frame of ``code`` returns something."""

    def __init__(self, code: CodeType, name: str, stopped: set[str]) -> None:
        super().__init__(code)
        self._name, self._stopped = name, stopped

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """As of pdb, with a line before it that says what is at hand."""
        if self._name not in self._stopped:
            if return_value is None:  # it may be raising
                self.set_continue()
                return
            self._stopped.add(self._name)
            _say(f"{self._name} returns: {_at_hand(self._name, return_value)}; its own variables have their names")
        super().user_return(frame, return_value)


def _at_hand(name: str, returned: Any) -> str:
    """How to get at what a function returned, for the debugger's prompt."""
    if isinstance(returned, Mapping):
        outputs = ", ".join(f"__return__[{one_line(repr(key), 60)}]" for key in returned)
        return f"what it returns is {outputs or '__return__, empty'}"
    return f"{'y' if name == 'forward' else 'what it returns'} is __return__"


def _say(words: str) -> None:
    print(f"normcheck: {words}", file=sys.stderr)
