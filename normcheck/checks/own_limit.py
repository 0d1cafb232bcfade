"""A kernel that raises on purpose to state a limit, such as ``RuntimeError("feature dim >= 64KB")``.

At sizes that every model has, that is a finding, with advice. Beyond them it is a refusal.
"""

from __future__ import annotations

import re
import sysconfig
from typing import NamedTuple

from normcheck.cases.case import Case
from normcheck.cases.layouts import STRIDED
from normcheck.checks.contract import Problem
from normcheck.errors import one_line

_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+) in [^:]*: (?P<code>.*)", re.DOTALL)
_RAISED = re.compile(r"(?:forward|backward)\b[^:]* raised (?P<type>\w+):")
_STATEMENT = re.compile(r"(?:^|[:;]\s*)(?:raise\s+(?:\w+\.)*(?P<type>\w+)|(?P<assertion>assert)\b)")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_NOT_ITS_OWN = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|triton)[/\\]")
"""Packages whose exceptions report a failure, such as a kernel that does not compile, and not a limit of a kernel."""


MOST_ROWS, MOST_COLUMNS = 65535, 8192
"""Sizes up to which a model may come. A kernel that takes no larger ones has a limit, and no fault."""

_LIMIT = re.compile(r"(?P<axis>[MN]) above (?:\d+), refused by the kernel itself")


def refusal(case: Case, problem: Problem) -> str:
    """The reason, if ``problem`` states a limit in words, and ``case`` is larger than what models have; "" if not."""
    axis, most = ("N", MOST_COLUMNS) if case.N > MOST_COLUMNS else ("M", MOST_ROWS)
    stated = _stated(problem)
    if stated is None or not stated.words or (case.N <= MOST_COLUMNS and case.M <= MOST_ROWS):
        return ""
    return f"{axis} above {most}, refused by the kernel itself in {stated.place}: {one_line(stated.words, 200)}"


def axis_of(reason: str) -> str:
    """ "N" or "M", the axis of which ``reason`` states a limit; "" of any other reason."""
    found = _LIMIT.match(reason)
    return found["axis"] if found else ""


def in_words(reason: str, least: int, judged: int) -> str:
    """What a kernel refuses, with its own words. ``least``: the smallest size refused; ``judged``: the largest judged.

    Sizes are those of the axis that ``reason`` is about.
    """
    which = f"{least} and more" if judged < least else f"{least}, and not of {judged}"
    return f"refuses {axis_of(reason)} of {which}, {reason.partition(', ')[2]}"


def advice(problem: Problem, case: Case) -> str:
    """What to do about an exception in ``case`` that states a limit; "" if it states none, or if a GPU failed."""
    stated = _stated(problem)
    if stated is None:
        return ""
    declared = "strided=False, supports(case)" if case.layout in STRIDED else "supports(case)"
    return (
        f"The kernel raises this itself, in {stated.place}. If that is a limit of the kernel, "
        f"raise normcheck.UnsupportedCase there, or declare the limit with {declared} or shapes=: such cases are "
        "then skipped, and counted."
    )


class _Stated(NamedTuple):
    """Where a limit is stated, and its words: "" of a bare assert."""

    place: str
    words: str


def _stated(problem: Problem) -> _Stated | None:
    """The limit that an exception states; None if it states none, or if a GPU failed.

    It states one if its innermost frame is a ``raise`` of its very type, or an ``assert``, in a file of the kernel or
    of its library. The frames of an exception raised while another was handled end with that other one instead.
    """
    frame = _FRAME.fullmatch(problem.frames[-1]) if problem.frames else None
    raised = _RAISED.match(problem.message)
    if problem.kind != "exception" or problem.gpu_failed or frame is None or raised is None:
        return None
    statement = _STATEMENT.search(frame["code"])
    if statement is None or _is_foreign(frame["file"]):
        return None
    if ("AssertionError" if statement["assertion"] else statement["type"]) != raised["type"]:
        return None
    return _Stated(f"line {frame['line']} of {frame['file']}", problem.message[raised.end() :].strip())


def _is_foreign(file: str) -> bool:
    """Whether ``file`` is torch's, Triton's or Python's own."""
    if _PACKAGES.search(file):
        return bool(_NOT_ITS_OWN.search(file))
    return file.startswith(sysconfig.get_path("stdlib"))
