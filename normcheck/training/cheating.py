"""What of a kernel's faults is no mistake, but a way to look right without computing. docs/reward.md has the list."""

from __future__ import annotations

from normcheck.checks.check import Result
from normcheck.checks.contract import Problem
from normcheck.isolation.intact import WATCHED
from normcheck.isolation.replies import NONSENSE, NOT_PLAIN
from normcheck.isolation.watched_memory import UNTOLD
from normcheck.oracle.judge import Checked
from normcheck.runner.arena import LATE

_SIGNS = (
    ("input_modified", "", "writes to its inputs"),
    ("exception", WATCHED, "tampers with what watches it"),
    ("crash", NONSENSE, "answers in place of its process"),
    ("crash", UNTOLD, "hides what it allocates"),
    ("shape", NOT_PLAIN, "returns a tensor that computes when it is looked at"),
    ("not_repeatable", LATE, "returns before it has computed"),
)
"""Kind of a problem, words of its message, what the kernel does by it."""


def cheat_of(problem: Problem) -> str:
    """What the kernel does, and the message of the problem; "" for a mistake."""
    for kind, words, what in _SIGNS:
        if problem.kind == kind and words in problem.message:
            return f"{what}: {problem.message}"
    return ""


def never_written(result: Result, output: str) -> bool:
    """Whether nothing of this ``output`` was written in this case: all of it is wrong, and what torch.empty returns."""
    unwritten = any(p.kind == "unwritten" and p.output == output for p in result.problems)
    return unwritten and any(c.output == output and _all_wrong(c) for c in result.wrong)


def _all_wrong(checked: Checked) -> bool:
    wrong = checked.comparison.wrong
    return wrong is not None and bool(wrong.all())
