"""Clear refusals of an unusual case: an exception with a message there is as good as ``UnsupportedCase``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normcheck.cases.case import Case
from normcheck.checks.contract import Problem
from normcheck.errors import Broken, UnsupportedCase


def refusal(case: Case, problem: Problem) -> str:
    """Why an exception counts as a clear refusal of an unusual case; "" where it does not, as a GPU that went wrong."""
    if not case.unusual or problem.kind != "exception" or problem.gpu_failed:
        return ""
    return f"{', '.join(case.unusual)}: {' '.join(problem.message.split())[:200]}"


@contextmanager
def refused_clearly(case: Case) -> Iterator[None]:
    """Around a backward: its clear refusal is raised as UnsupportedCase, so that what forward returned is judged."""
    try:
        yield
    except Broken as broken:
        reason = refusal(case, Problem(broken.kind, broken.output, broken.message))
        if reason:
            raise UnsupportedCase(reason) from broken
        raise
