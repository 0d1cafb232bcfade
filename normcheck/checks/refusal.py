"""What an exception of a kernel says: a clear refusal counts like ``UnsupportedCase`` if the case is unusual; an error
for want of a statistic is told as that."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from contextlib import contextmanager

from normcheck.cases.case import Case, unusual
from normcheck.cases.op import Op
from normcheck.checks import own_limit
from normcheck.checks.contract import Problem
from normcheck.errors import Broken, UnsupportedCase, one_line


def refusal(case: Case, problem: Problem) -> str:
    """The reason, if ``problem`` is a clear refusal of an unusual case, or states a limit of large sizes.

    "" if it is neither, such as a GPU that failed.
    """
    if not unusual(case) or problem.kind != "exception" or problem.gpu_failed:
        return own_limit.refusal(case, problem)
    return f"{', '.join(unusual(case))}: {one_line(problem.message, 200)}"


def is_of_exception(case: Case, reason: str) -> bool:
    """Whether a reason is that of an exception which was taken for a refusal, see ``refusal``."""
    return bool(unusual(case)) and reason.startswith(f"{', '.join(unusual(case))}: ")


@contextmanager
def refused_clearly(case: Case) -> Iterator[None]:
    """Around a backward: raise its clear refusal as UnsupportedCase, so that forward's outputs are still judged."""
    try:
        yield
    except Broken as broken:
        reason = refusal(case, Problem(broken.kind, broken.output, broken.message, broken.frames))
        if reason:
            raise UnsupportedCase(reason) from broken
        raise


@contextmanager
def told_as_missing(op: Op, saved: Container[str]) -> Iterator[None]:
    """Around a backward that gets ``saved``: raise an error that follows from a missing statistic as ``missing``.

    A statistic may be missing, if backward does not read it.
    """
    try:
        yield
    except Broken as broken:
        for name in op.statistics:
            if name not in saved and _is_for_want_of(name, broken):
                message = f"forward did not return {name}, and backward reads it: {broken.message}"
                raise Broken("missing", name, message, broken.frames) from broken
        raise


def _is_for_want_of(name: str, broken: Broken) -> bool:
    """Whether the key was not there, or the line that raised names it and its value was None."""
    if broken.kind != "exception":
        return False
    lines = [line for _, within, line in (frame.partition(" in ") for frame in broken.frames) if within]
    named = re.search(rf"\b{name}\b", lines[-1] if lines else "")
    return f"KeyError: '{name}'" in broken.message or ("NoneType" in broken.message and named is not None)
