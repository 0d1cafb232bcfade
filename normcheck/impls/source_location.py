"""Where an implementation is defined: the file and the line that a report points at.

The objects that are read here belong to code under test: whatever they do, the result is a place or ``NOWHERE``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from normcheck.impls.implementation import Implementation

_MOST_WRAPPERS = 20  # around a function
_LONGEST_PATH = 4096  # characters
_MOST_LINES = 10**7


@dataclass(frozen=True)
class Place:
    """An absolute path and a line, counted from 1; ``NOWHERE`` has neither."""

    file: str
    line: int | None


NOWHERE = Place("", None)


def of(implementation: Implementation) -> Place:
    """Where the forward of ``implementation`` is defined; line 1 of its source, if only that file is known."""
    place, source = defined(implementation.forward), implementation.source
    if place == NOWHERE and isinstance(source, str) and source.endswith(".py"):
        return place_of([os.path.abspath(source), 1])
    return place


def line_of_backward(implementation: Implementation) -> int | None:
    """The line of the backward of ``implementation``, if it has one of its own in the file of its forward."""
    place = NOWHERE if implementation.backward is None else defined(implementation.backward)
    return place.line if place.file == of(implementation).file else None


def defined(function: object) -> Place:
    """The place of a function's ``def``, or of its first decorator, inside any wrappers."""
    try:
        place = getattr(function, "place", None)  # a stand-in for a function in another process has one
        if isinstance(place, Place):
            return place
        code = code_of(function)
        return NOWHERE if code is None else place_of([os.path.abspath(code.co_filename), code.co_firstlineno])
    except KeyboardInterrupt:
        raise
    except BaseException:  # an attribute of a foreign object may raise anything
        return NOWHERE


def code_of(function: object) -> CodeType | None:
    """The code of the Python function inside any wrappers, None if there is none."""
    try:
        for _ in range(_MOST_WRAPPERS):
            inner = _inner(function)
            if inner is None:
                break
            function = inner
        code = getattr(function, "__code__", None)
        return code if isinstance(code, CodeType) else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # an attribute of a foreign object may raise anything
        return None


def place_of(place: object) -> Place:
    """The place ``[file, line]`` that another process sent, if the file exists and the line can be one; or NOWHERE."""
    match place:
        case [str() as file, int() as line] if _is_file(file) and type(line) is int and 0 < line <= _MOST_LINES:
            return Place(file, line)
    return NOWHERE


def relative(file: str) -> str:
    """``file`` relative to the current directory, with forward slashes, if it lies inside; else ``file``."""
    try:
        return Path(file).relative_to(Path.cwd()).as_posix() if file else ""
    except (OSError, ValueError):
        return file


def line_in(place: Place, frames: Sequence[str]) -> int | None:
    """The line of the innermost frame ``FILE:LINE in NAME: CODE`` that is in the file of ``place``, or None."""
    start = f"{place.file}:"
    for frame in reversed(frames) if place.file else ():
        number = frame[len(start) :].partition(" in ")[0]
        if frame.startswith(start) and number.isascii() and number.isdecimal() and 0 < len(number) < 8:
            return int(number)
    return None


def _is_file(file: str) -> bool:
    try:
        return len(file) <= _LONGEST_PATH and os.path.isabs(file) and os.path.isfile(file)
    except (OSError, ValueError):  # no file can have this name
        return False


def _inner(function: Any) -> Any:
    """What ``function`` wraps, or None if it is a plain function. Torch and Triton are not imported."""
    if isinstance(function, functools.partial):
        return function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and function.__name__ == "apply" and _is_a(owner, "torch.autograd.function", "Function"):
        return owner.forward  # type: ignore[attr-defined]
    if _is_a(type(function), "torch.nn.modules.module", "Module"):
        return vars(function)["_modules"].get("_orig_mod") or function.forward
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        return wrapped
    made_by = type(function).__module__
    if made_by.startswith("triton."):
        return getattr(function, "fn", None)
    if made_by.startswith("torch._library."):
        return getattr(function, "_init_fn", None)
    return None if inspect.isroutine(function) or isinstance(function, type) else type(function).__call__


def _is_a(kind: type, module: str, name: str) -> bool:
    return any((base.__module__, base.__name__) == (module, name) for base in kind.__mro__)
