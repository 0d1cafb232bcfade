"""What to do about a cell that did not pass, though nothing wrong was found in it."""

from __future__ import annotations

from normcheck.errors import MORE_MEMORY
from normcheck.result import ASLEEP, IMPORT, MEMORY, Verdict

REMEDIES = {
    IMPORT: "correct the file that was not imported",
    ASLEEP: "a kernel that computes, and does not wait for anything, is judged",
    MEMORY: MORE_MEMORY,
    "": "report it, with the command and what normcheck doctor says",
}
"""What to do about cells that were not judged, by ``Verdict.error``."""

_MORE_TIME = {
    "ci": "choose --profile deep, whose core has more time",
    "deep": "run it on a machine that has less to do beside it",
}


def of_thin(verdict: Verdict, *, profile: str, most: float, required: bool = False, in_python: bool = False) -> str:
    """What makes a thin cell a pass, by what limited it. ``most``: cases that it was allowed; ``required``: whether
    more than its core may have been asked of it; ``in_python``: whether arguments of a call are meant, and no options.
    """
    limit, missed = ("", ()) if verdict.core is None else (verdict.core.limit, verdict.core.missed)
    if limit == "data":
        return "take the data that it refuses"
    if limit == "cases" or (not missed and verdict.cases >= most):
        return "raise max_examples" if in_python else "raise --max-examples"
    if missed:
        step = _MORE_TIME.get(profile, "choose --profile ci, whose core has more time")
        return step.replace("--profile ", "profile=") if in_python else step
    return "give it more time (--time-budget), or a larger --profile" if required else "mend what its line says"


def options_of_thin(verdict: Verdict, *, profile: str, most: float) -> tuple[str, ...]:
    """The options that ``of_thin`` means, behind those of the command that was run; () if no option is the remedy."""
    core = verdict.core
    limit, missed = ("", ()) if core is None else (core.limit, core.missed)
    if limit == "data":
        return ()
    if limit == "cases" or (not missed and verdict.cases >= most):
        planned = 0 if core is None else core.planned
        return "--max-examples", str(max(2 * verdict.cases, 2 * planned, 100))
    if missed and profile == "quick":
        return "--profile", "ci"
    return ("--profile", "deep") if missed and profile == "ci" else ()
