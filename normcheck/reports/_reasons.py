"""Why cells were not judged, and cases not run: each reason once, with all that it holds for."""

from __future__ import annotations

from normcheck.result import SweepResult, Verdict


def reasons(run: SweepResult, status: str, error: str = "") -> dict[str, list[tuple[Verdict, str]]]:
    """Reason -> the cells of this status, and of this ``error``, that have it, in the order of the run."""
    found: dict[str, list[tuple[Verdict, str]]] = {}
    for verdict in run.verdicts:
        if (verdict.status, verdict.error) == (status, error):
            found.setdefault(verdict.detail or "no reason given", []).append((verdict, ""))
    return found


def case_reasons(run: SweepResult, *, every: bool = False) -> dict[str, list[tuple[Verdict, str]]]:
    """Reason -> the cells in which cases were skipped for it, with how many. ``every``: also of skipped cells."""
    found: dict[str, list[tuple[Verdict, str]]] = {}
    for verdict in run.verdicts:
        if every or verdict.status != "skip":
            for reason, count in verdict.skipped.items():
                found.setdefault(reason, []).append((verdict, f" ({count:,})"))
    return found
