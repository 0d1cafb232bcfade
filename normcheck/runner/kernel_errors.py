"""Exceptions of code under test: whose they are, the kernel's or normcheck's, and what a report shows of them."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import torch

from normcheck.cases import guard_bands
from normcheck.errors import Broken, ItselfFailed, UnsupportedCase, error_text, itself_failed, one_line
from normcheck.impls import adapt, source_location
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels import on_cpu
from normcheck.runner import overwriting
from normcheck.runner.arena import Arena
from normcheck.runner.time_limit import TimeIsUp

T = TypeVar("T")

_OWN_FILES = (
    *(__file__, str(Path(__file__).with_name("call.py"))),
    *(adapt.__file__, inspect.getfile(Arena), guard_bands.__file__, overwriting.__file__),
)
_INTERPRETER = re.compile(
    r"triton/runtime/(interpreter|jit)\.py$|normcheck/impls/kernels/(interpreter|on_cpu|configurations)\.py$"
)
_FRAMES = 6  # how many of the innermost frames of a traceback a report shows


@contextmanager
def guarded(what: str, implementation: Implementation | None = None) -> Iterator[None]:
    """Run code under test: quiet it, see ``quiet``; raise its exceptions as Broken.

    An exception in which it ``has_part_in`` no frame is normcheck's, such as of what takes a result: ItselfFailed.
    """
    try:
        with quiet():
            yield
    except (UnsupportedCase, Broken, ItselfFailed, KeyboardInterrupt, TimeIsUp):
        raise
    except BaseException as error:  # not only Exception: pytest.skip raises a BaseException
        if not has_part_in(error):
            raise ItselfFailed(itself_failed(error)) from error
        within, said = _within_interpreter(error), error_text(error)
        if isinstance(within, UnsupportedCase):
            raise within from error
        if within is not error:
            said = f"{error_text(within)}, in a kernel that Triton's interpreter runs, as there is no GPU"
        elif said.rstrip().endswith(":"):  # a bare assert; an error that says what is wrong speaks for itself
            said = said.rstrip() + on_cpu.because_of_no_gpu(error)
        raise Broken("exception", "", f"{what} raised {said}", _frames(error, within, implementation)) from error


_quieted = [False]  # whether a call in this process is quiet already


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of code under test, and have it print to standard error.

    Both are of a process, not of a thread. So what is called within it, by whatever thread, leaves them as they are.
    """
    if _quieted[0]:
        yield
        return
    _quieted[0] = True
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        _quieted[0] = False


def called(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """The value of a function of code under test. An exception that has this frame is that code's own."""
    return function(*arguments, **options)


def has_part_in(error: BaseException) -> bool:
    """Whether code under test has a part in an exception: it was ``called``, a frame is neither normcheck's nor torch's
    nor Python's, or the GPU failed, which shows in whatever asks it next.

    Code under test runs in other places than a call: in the mapping that it returned, or in what it has replaced.
    """
    if any(words in error_text(error) for words in _OF_THE_GPU):
        return True
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code is called.__code__ or not _NOT_ITS.match(code.co_filename) for code in codes)


_OF_THE_GPU = ("CUDA error", "Triton Error", "out of memory")
_PYTHON, _NORMCHECK, _TORCH = (
    re.escape(str(folder))
    for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1], Path(torch.__file__).parent)
)
_NOT_ITS = re.compile(rf"<frozen |({_NORMCHECK}|{_TORCH}|{_PYTHON}(?!/(site|dist)-packages/))/")


def _within_interpreter(error: BaseException) -> BaseException:
    """What was raised within a kernel, if Triton's interpreter raised ``error`` of it; else ``error``."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _tracebacks(error: BaseException, last: BaseException) -> Iterator[traceback.FrameSummary]:
    """The frames of ``error`` and of those behind it, up to ``last``."""
    yield from traceback.extract_tb(error.__traceback__)
    while error is not last and error.__cause__ is not None:
        error = error.__cause__
        yield from traceback.extract_tb(error.__traceback__)


def _frames(error: BaseException, last: BaseException, implementation: Implementation | None) -> tuple[str, ...]:
    """The innermost frames of a traceback, without normcheck's own, with the implementation's innermost among them.

    ``last``: the exception behind ``error`` up to which frames are shown. The last line is the one behind that, if
    there is one: it is the cause.
    """
    frames = [f for f in _tracebacks(error, last) if f.filename not in _OWN_FILES]
    frames = [f for f in frames if last is error or not _INTERPRETER.search(f.filename)]
    file = source_location.of(implementation).file if implementation else ""
    own, shown_frames = [f for f in frames if f.filename == file][-1:], frames[-_FRAMES:]
    if own and own[0] not in shown_frames:
        shown_frames = [*own, *shown_frames[1:]]
    lines = tuple(f"{f.filename}:{f.lineno} in {f.name}: {(f.line or '')[:400]}" for f in shown_frames)
    cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
    return lines if cause is None else (*lines, f"because of {one_line(error_text(cause), 400)}")
