"""Decision of the gate: the status and exit code of a run, from its verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from normcheck.errors import ExitCode
from normcheck.gate import baseline, known_failures
from normcheck.gate.baseline import Baseline, drifted, remarks
from normcheck.gate.known_failures import Known
from normcheck.gate.options import VerifyOptions
from normcheck.gate.tally import NO_BACKWARD, refusals
from normcheck.result import MOST_REFUSED, SweepResult, Verdict

_STATUS = {ExitCode.FOUND: "fail", ExitCode.BROKEN: "error", ExitCode.NOTHING: "nothing", ExitCode.PASS: "pass"}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a run is held against, beside the bounds.

    ``required``: implementations that must have run. ``known``: cells that are known to fail. ``baseline``: the stored
    ratios from which none may have drifted. ``part``: the run has only some of the cells that these three are about.
    ``shard``: the run has only some of each cell's cases; what is stale or has drifted is for ``normcheck merge`` to
    find. ``dtypes``: those that were asked for by name; a required implementation must have run in each of them.
    ``allow_thin``: a cell whose core was not finished does not fail the run.
    """

    required: tuple[str, ...] = ()
    known: tuple[Known, ...] = ()
    baseline: Baseline | None = None
    part: bool = False
    shard: bool = False
    dtypes: tuple[str, ...] = ()
    allow_thin: bool = False


def terms_of(options: VerifyOptions, required: Sequence[str]) -> Terms:
    """The terms of a run with ``options``, read from the files that they name. Raises UsageError.

    ``required``: see ``Terms``.
    """
    entries = known_failures.read(options.known_failures) if options.known_failures else ()
    stored = None
    if options.baseline:
        stored = baseline.read(options.baseline, ratio=options.drift_ratio, ulp=options.drift_ulp)
    return Terms(
        required=tuple(dict.fromkeys(required)),
        known=entries,
        baseline=stored,
        part=options.part,
        shard=bool(options.shard),
        dtypes=options.dtype,
        allow_thin=options.allow_thin,
    )


STRICT = ("ci", "deep")
"""Profiles in which no cell may be thin; in other profiles only the cells of required implementations may not."""


def exit_code(*, found: bool, broken: bool, enough: bool, complete: bool = True) -> ExitCode:
    """The exit code of any command: a finding decides first, then a fault of normcheck, then too few checks.

    ``complete``: False for an interrupted command, which has an exit code of its own.
    """
    if not complete:
        return ExitCode.INTERRUPTED
    if found:
        return ExitCode.FOUND
    if broken:
        return ExitCode.BROKEN
    return ExitCode.PASS if enough else ExitCode.NOTHING


def decide(
    verdicts: Sequence[Verdict], terms: Terms, *, complete: bool = True, profile: str = "quick"
) -> tuple[str, ExitCode, tuple[str, ...]]:
    """(status, exit code, messages) of a run.

    First come findings that are not known, known failures that pass by now, and drift; then faults of normcheck
    itself. Then every required implementation must have run, for each op that was asked of it, and no cell that must
    not be thin may be. A run that checked nothing never passes. ``complete``: False for an interrupted run.
    """
    faults: tuple[str, ...] = ()
    if not terms.shard:
        faults = known_failures.stale(terms.known, verdicts, part=terms.part or not complete)
        faults += drifted(terms.baseline, verdicts) if terms.baseline else ()
    absent = tuple(
        f"required {name} did not run {op}: {detail}"
        for name in terms.required
        for op, detail in _absent(verdicts, name, terms)
    )
    absent += () if terms.allow_thin else _thin(verdicts, terms, profile)
    code = exit_code(
        found=bool(faults) or any(v.status == "fail" and not v.known for v in verdicts),
        broken=any(v.status == "error" for v in verdicts),
        enough=not absent and any(v.status != "skip" for v in verdicts),
    )
    return _STATUS[code], code if complete else ExitCode.INTERRUPTED, (*faults, *absent)


def concluded(run: SweepResult, terms: Terms) -> SweepResult:
    """``run`` with the status, exit code and messages that ``terms`` give it, and with its known failures marked."""
    run = replace(run, verdicts=tuple(known_failures.marked(verdict, terms.known) for verdict in run.verdicts))
    status, code, messages = decide(run.verdicts, terms, complete=run.complete, profile=run.profile)
    if terms.baseline and not terms.shard:
        messages += remarks(terms.baseline, run, part=terms.part or not run.complete)
    if terms.shard and (terms.known or terms.baseline):
        messages += ("a shard: stale known failures and drift are found by normcheck merge",)
    if status == "pass" and not any(v.status in ("pass", "thin") for v in run.verdicts):
        messages += ("nothing passed: each cell that ran is a known failure",)
    return replace(run, status=status, exit_code=code, messages=messages)


def _thin(verdicts: Sequence[Verdict], terms: Terms, profile: str) -> tuple[str, ...]:
    """A message for each cell that must not be thin and is, and for each that is required and refuses too much."""
    messages = []
    for v in verdicts:
        cell = f"{v.implementation} {v.op} {v.dtype}"
        if v.status == "thin" and (profile in STRICT or v.implementation in terms.required):
            messages.append(f"{cell} is thin: {v.detail}; more time or --allow-thin lets it pass")
        refused = v.core.refused if v.core is not None and v.status in ("pass", "thin") else 0.0
        if refused > MOST_REFUSED and v.implementation in terms.required:
            messages.append(f"required {cell} refuses {refused:.0%} of what it declares: declare less, or take more")
    return tuple(messages)


def _absent(verdicts: Sequence[Verdict], name: str, terms: Terms) -> list[tuple[str, str]]:
    """(what, why) for each part of implementation ``name`` that did not run.

    A part is an op, an op in a dtype that was asked for by name, or a backward.
    """
    own = [v for v in verdicts if v.implementation == name]
    absent = []
    for op in dict.fromkeys(v.op for v in own):
        cells = [v for v in own if v.op == op]
        if all(v.status == "skip" for v in cells):
            absent.append((op, cells[0].detail))
        else:
            absent += [(f"{op} {v.dtype}", v.detail) for v in cells if v.status == "skip" and v.dtype in terms.dtypes]
        lacking = [v for v in cells if v.no_backward and not terms.shard]  # another shard may have run it
        if any(v.status != "skip" and not v.no_backward for v in cells):
            lacking = [v for v in lacking if v.dtype in terms.dtypes]
        absent += [(f"{op} {v.dtype}", f"{NO_BACKWARD}: {refusals(v.backward_refused)}") for v in lacking]
    return absent if own else [("anything", "it is not among the cells")]
