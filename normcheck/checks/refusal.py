"""Clear refusals: an exception with a message counts like ``UnsupportedCase`` if the case is unusual."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normcheck.cases.case import Case
from normcheck.checks.contract import Problem
from normcheck.errors import Broken, UnsupportedCase, one_line


def refusal(case: Case, problem: Problem) -> str:
    """The reason, if ``problem`` is a clear refusal of an unusual case; "" if it is not, such as a GPU that failed."""
    if not case.unusual or problem.kind != "exception" or problem.gpu_failed:
        return ""
    return f"{', '.join(case.unusual)}: {one_line(problem.message, 200)}"


@contextmanager
def refused_clearly(case: Case) -> Iterator[None]:
    """Around a backward: raise its clear refusal as UnsupportedCase, so that forward's outputs are still judged."""
    try:
        yield
    except Broken as broken:
        reason = refusal(case, Problem(broken.kind, broken.output, broken.message))
        if reason:
            raise UnsupportedCase(reason) from broken
        raise
