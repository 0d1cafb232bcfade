"""Verdicts -> status and exit code."""

from __future__ import annotations

from collections.abc import Sequence

from normcheck.result import Verdict

PASS, FOUND, BROKEN, NOTHING, INTERRUPTED = 0, 1, 3, 5, 130  # 2 is a wrong command line: errors.py


def decide(
    verdicts: Sequence[Verdict], required: Sequence[str], *, complete: bool = True
) -> tuple[str, int, tuple[str, ...]]:
    """(status, exit code, messages) of a run.

    A finding decides first; then whether normcheck itself failed; then whether everything that was required ran, for
    each op that was asked of it; a run that checked nothing never passes. An interrupted run says so.
    """
    statuses = [v.status for v in verdicts]
    messages = tuple(
        f"required {name} did not run {op}: {detail}" for name in required for op, detail in _absent(verdicts, name)
    )
    if "fail" in statuses:
        status, code = "fail", FOUND
    elif "error" in statuses:
        status, code = "error", BROKEN
    elif messages or "pass" not in statuses:
        status, code = "nothing", NOTHING
    else:
        status, code = "pass", PASS
    return (status, code, messages) if complete else (status, INTERRUPTED, messages)


def _absent(verdicts: Sequence[Verdict], name: str) -> list[tuple[str, str]]:
    """Ops of implementation ``name`` of which no cell ran, each with why."""
    own = [v for v in verdicts if v.implementation == name]
    absent = []
    for op in dict.fromkeys(v.op for v in own):
        cells = [v for v in own if v.op == op]
        if all(v.status == "skip" for v in cells):
            absent.append((op, cells[0].detail))
    return absent if own else [("anything", "it is not among the cells")]
