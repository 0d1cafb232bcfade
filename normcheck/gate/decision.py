"""Verdicts -> status and exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from normcheck.gate import known_failures
from normcheck.gate.baseline import Baseline, drifted, remarks
from normcheck.gate.known_failures import Known
from normcheck.gate.remarks import NO_BACKWARD, refusals
from normcheck.result import Run, Verdict

PASS, FOUND, BROKEN, NOTHING, INTERRUPTED = 0, 1, 3, 5, 130  # 2 is a wrong command line: errors.py


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a run is held against, beside the bounds.

    ``required``: implementations that must have run; ``known``: cells that are known to fail; ``baseline``: what may
    not have drifted. ``part``: the cells of the run are not all that these are about. ``judged``: False for a shard,
    which sees only some of a cell's cases: there nothing is stale and nothing has drifted, before ``normcheck merge``.
    ``dtypes``: those that were asked for by name, in each of which what is required must have run. ``allow_thin``: a
    cell whose core was not finished does not fail the run.
    """

    required: tuple[str, ...] = ()
    known: tuple[Known, ...] = ()
    baseline: Baseline | None = None
    part: bool = False
    judged: bool = True
    dtypes: tuple[str, ...] = ()
    allow_thin: bool = False


STRICT = ("ci", "deep")
"""Profiles of which no cell may be thin; of others those that are required may not."""

MOST_REFUSED = 1 / 3
"""Share of what an implementation declares that it may refuse and still count as having run."""


def decide(
    verdicts: Sequence[Verdict], terms: Terms, *, complete: bool = True, profile: str = "quick"
) -> tuple[str, int, tuple[str, ...]]:
    """(status, exit code, messages) of a run.

    A finding that is not known decides first, and so do a known failure that is none any more, and drift; then whether
    normcheck itself failed; then whether everything that was required ran, for each op that was asked of it, and all of
    what a pass stands on; a run that checked nothing never passes. An interrupted run says so.
    """
    faults: tuple[str, ...] = ()
    if terms.judged:
        faults = known_failures.stale(terms.known, verdicts, part=terms.part or not complete)
        faults += drifted(terms.baseline, verdicts) if terms.baseline else ()
    absent = tuple(
        f"required {name} did not run {op}: {detail}"
        for name in terms.required
        for op, detail in _absent(verdicts, name, terms)
    )
    absent += () if terms.allow_thin else _thin(verdicts, terms, profile)
    if faults or any(v.status == "fail" and not v.known for v in verdicts):
        status, code = "fail", FOUND
    elif any(v.status == "error" for v in verdicts):
        status, code = "error", BROKEN
    elif absent or all(v.status == "skip" for v in verdicts):
        status, code = "nothing", NOTHING
    else:
        status, code = "pass", PASS
    messages = (*faults, *absent)
    return (status, code, messages) if complete else (status, INTERRUPTED, messages)


def concluded(run: Run, terms: Terms) -> Run:
    """``run`` with the status, exit code and messages that it has under ``terms``, and with its known cells marked."""
    run = replace(run, verdicts=tuple(known_failures.marked(verdict, terms.known) for verdict in run.verdicts))
    status, code, messages = decide(run.verdicts, terms, complete=run.complete, profile=run.profile)
    if terms.baseline and terms.judged:
        messages += remarks(terms.baseline, run, part=terms.part or not run.complete)
    if not terms.judged and (terms.known or terms.baseline):
        messages += ("a shard: stale known failures and drift are found by normcheck merge",)
    if status == "pass" and not any(v.status in ("pass", "thin") for v in run.verdicts):
        messages += ("nothing passed: each cell that ran is a known failure",)
    return replace(run, status=status, exit_code=code, messages=messages)


def _thin(verdicts: Sequence[Verdict], terms: Terms, profile: str) -> tuple[str, ...]:
    """What is too little to be a pass: a message for each thin cell that must not be, and what refuses too much."""
    messages = []
    for v in verdicts:
        said = f"{v.implementation} {v.op} {v.dtype}"
        if v.status == "thin" and (profile in STRICT or v.implementation in terms.required):
            messages.append(f"{said} is thin: {v.detail}; more time or --allow-thin lets it pass")
        refused = v.core.refused if v.core is not None and v.status in ("pass", "thin") else 0.0
        if refused > MOST_REFUSED and v.implementation in terms.required:
            messages.append(f"required {said} refuses {refused:.0%} of what it declares: declare less, or take more")
    return tuple(messages)


def _absent(verdicts: Sequence[Verdict], name: str, terms: Terms) -> list[tuple[str, str]]:
    """What of implementation ``name`` did not run, each with why: an op, an op in a dtype asked for, a backward."""
    own = [v for v in verdicts if v.implementation == name]
    absent = []
    for op in dict.fromkeys(v.op for v in own):
        cells = [v for v in own if v.op == op]
        if all(v.status == "skip" for v in cells):
            absent.append((op, cells[0].detail))
        else:
            absent += [(f"{op} {v.dtype}", v.detail) for v in cells if v.status == "skip" and v.dtype in terms.dtypes]
        lacking = [v for v in cells if v.no_backward and terms.judged]  # another shard may have run it
        if any(v.status != "skip" and not v.no_backward for v in cells):
            lacking = [v for v in lacking if v.dtype in terms.dtypes]
        absent += [(f"{op} {v.dtype}", f"{NO_BACKWARD}: {refusals(v.backward_refused)}") for v in lacking]
    return absent if own else [("anything", "it is not among the cells")]
