"""Decision of the gate: the status and exit code of a run, from its verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from normcheck.errors import ExitCode, UsageError
from normcheck.gate import baseline, known_failures
from normcheck.gate.baseline import Baseline, drifted, remarks
from normcheck.gate.known_failures import Known
from normcheck.gate.options import VerifyOptions
from normcheck.gate.requirements import EVERY_CELL, Requirement, requirement
from normcheck.gate.tally import NO_BACKWARD, refusals
from normcheck.reports._remedies import of_thin
from normcheck.result import MOST_REFUSED, SweepResult, Verdict

_STATUS = {ExitCode.FOUND: "fail", ExitCode.BROKEN: "error", ExitCode.NOTHING: "nothing", ExitCode.PASS: "pass"}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a run is held against, beside the bounds.

    ``required``: implementations that must have run. ``least``: name of an implementation, or EVERY_CELL -> the cases
    that each cell of it must have judged if it ran. ``sizes``: the same, with the M or N that it must have judged, and
    everything up to which its kernel must take. ``known``: cells that are known to fail. ``baseline``: the stored
    ratios from which none may have drifted. ``part``: the run has only some of the cells that these three are about.
    ``shard``: the run has only some of each cell's cases; what is stale or has drifted is for ``normcheck merge`` to
    find. ``dtypes``: those that were asked for by name; a required implementation must have run in each of them.
    ``allow_thin``: a cell whose core was not finished does not fail the run.
    """

    required: tuple[str, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[Requirement, ...] = ()
    known: tuple[Known, ...] = ()
    baseline: Baseline | None = None
    part: bool = False
    shard: bool = False
    dtypes: tuple[str, ...] = ()
    allow_thin: bool = False


def terms_of(options: VerifyOptions, required: Sequence[str]) -> Terms:
    """The terms of a run with ``options``, read from the files that they name. Raises UsageError.

    ``required``: texts as of ``--require``, see ``requirement``.
    """
    try:
        wanted = [requirement(text) for text in required]
    except ValueError as error:  # of a report to merge; options are checked already
        raise UsageError(f"require={error}") from None
    entries = known_failures.read(options.known_failures) if options.known_failures else ()
    stored = None
    if options.baseline:
        stored = baseline.read(options.baseline, ratio=options.drift_ratio, ulp=options.drift_ulp)
    return Terms(
        required=tuple(dict.fromkeys(each.name for each in wanted if each.name != EVERY_CELL)),
        least={each.name: each.least for each in sorted(wanted) if each.axis == "cases"},
        sizes=tuple(dict.fromkeys(each for each in wanted if each.axis in ("M", "N"))),
        known=entries,
        baseline=stored,
        part=options.part,
        shard=bool(options.shard),
        dtypes=options.dtype,
        allow_thin=options.allow_thin,
    )


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
    verdicts: Sequence[Verdict],
    terms: Terms,
    *,
    complete: bool = True,
    profile: str = "quick",
    most: float = math.inf,
    in_python: bool = False,
) -> tuple[str, ExitCode, tuple[str, ...]]:
    """(status, exit code, messages) of a run.

    First come findings that are not known, known failures that pass by now, and drift; then faults of normcheck
    itself. Then every required implementation must have run, for each op that was asked of it, no cell may be thin, and
    none may have fewer cases, or lack a size, that are required of it. A run that checked nothing never passes.
    ``complete``: False for an interrupted run. ``most``: cases that a cell was allowed. ``in_python``: whether messages
    name arguments of a call, and no options.
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
    if not terms.allow_thin:
        step = partial(of_thin, profile=profile, most=most, in_python=in_python)
        excuse = "allow_thin=True" if in_python else "--allow-thin"
        absent += (*_thin(verdicts, lambda v: f"{step(v)}, or let it pass by {excuse}"), *_refusing(verdicts, terms))
    absent += tuple(_too_few(v, wanted, most) for v in verdicts if (wanted := _lacking(v, terms)))
    absent += tuple(f"{v.implementation} {v.op} {v.dtype}: {words}" for v in verdicts for words in _sizes(v, terms))
    code = exit_code(
        found=bool(faults) or any(v.status == "fail" and not v.known for v in verdicts),
        broken=any(v.status == "error" for v in verdicts),
        enough=not absent and any(v.status != "skip" or (terms.shard and v.elsewhere) for v in verdicts),
    )
    return _STATUS[code], code if complete else ExitCode.INTERRUPTED, (*faults, *absent)


def concluded(run: SweepResult, terms: Terms) -> SweepResult:
    """``run`` with the status, exit code and messages that ``terms`` give it, and with its verdicts ``thinned``.

    Each verdict is marked already, if its failure is known.
    """
    status, code, messages = decide(
        run.verdicts,
        terms,
        complete=run.complete,
        profile=run.profile,
        most=run.budget.get("max_examples", math.inf),
        in_python=not run.argv,
    )
    run = replace(run, verdicts=tuple(thinned(verdict, terms) for verdict in run.verdicts))
    if terms.baseline and not terms.shard:
        messages += remarks(terms.baseline, run, part=terms.part or not run.complete)
    if terms.shard and (terms.known or terms.baseline):
        messages += ("a shard: stale known failures and drift are found by normcheck merge",)
    if terms.shard and (terms.least or terms.sizes):
        messages += ("a shard: whether the required cases were judged is found by normcheck merge",)
    if status == "pass" and not any(v.status in ("pass", "thin") for v in run.verdicts):
        messages += ("nothing passed: each cell that ran is a known failure",)
    return replace(run, status=status, exit_code=code, messages=messages)


def thinned(verdict: Verdict, terms: Terms) -> Verdict:
    """``verdict`` as reports show it: as thin if it lacks cases or a size required."""
    wanted = _lacking(verdict, terms)
    few = [f"{verdict.cases:,} of {wanted:,} required cases were judged"] * bool(wanted) + _sizes(verdict, terms)
    if not few:
        return verdict
    return replace(verdict, status="thin", detail="; ".join(filter(None, [verdict.detail, *few])))


def _lacking(v: Verdict, terms: Terms) -> int:
    """The cases that are required of a cell that ran and has fewer, else 0. A shard has only some of its cases."""
    if terms.shard or v.status not in ("pass", "thin"):
        return 0
    wanted = max(terms.least.get(name, 0) for name in (v.implementation, EVERY_CELL))
    return wanted if v.cases < wanted else 0


def _sizes(v: Verdict, terms: Terms) -> list[str]:
    """What a cell that ran has not of the sizes that are required of it, in words."""
    if terms.shard or v.status not in ("pass", "thin"):
        return []
    lacking = []
    for name, axis, size in terms.sizes:
        if name not in (v.implementation, EVERY_CELL):
            continue
        asked, least = f"{axis}={size}", v.limits.get(axis, size + 1)
        if least <= size:
            lacking.append(f"{asked} is required, and its kernel refuses {axis} of {least}: take it, or require less")
        elif not v.sizes.get(asked):
            more = "give it more time (--time-budget), choose a larger --profile, or look with -v for what it refuses"
            lacking.append(f"{asked} is required, and no case of that size was judged: {more}")
    return lacking


def _too_few(v: Verdict, wanted: int, most: float) -> str:
    """The message on a cell with too few cases, and what gives it more; ``most`` were allowed."""
    on = "" if v.shapes is None else f" on {v.shapes:,} {'shape' if v.shapes == 1 else 'shapes'}"
    few = f"{v.implementation} {v.op} {v.dtype} judged {v.cases:,}{on}, {wanted:,} are required"
    if wanted > most:
        return f"too few cases: {few}; {most:,.0f} were allowed: raise --max-examples, or choose a larger --profile"
    return f"too few cases: {few}; give it more time (--time-budget), or choose a larger --profile"


def _thin(verdicts: Sequence[Verdict], step: Callable[[Verdict], str]) -> Iterator[str]:
    """A message for thin cells that differ only in their dtype, with what to do next, which is a ``step``."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for v in verdicts:
        if v.status == "thin":
            alike.setdefault((f"{v.implementation} {v.op}", v.detail, step(v)), []).append(v.dtype)
    for (cell, detail, next_step), dtypes in alike.items():
        yield f"{cell} {', '.join(dtypes)} {'is' if len(dtypes) == 1 else 'are'} thin: {detail}; {next_step}"


def _refusing(verdicts: Sequence[Verdict], terms: Terms) -> Iterator[str]:
    """A message for each required cell that refuses too much."""
    for v in verdicts:
        refused = v.core.refused if v.core is not None and v.status in ("pass", "thin") else 0.0
        if refused > MOST_REFUSED and v.implementation in terms.required:
            cell = f"{v.implementation} {v.op} {v.dtype}"
            yield f"required {cell} refuses {refused:.0%} of what it declares: declare less, or take more"


def _absent(verdicts: Sequence[Verdict], name: str, terms: Terms) -> list[tuple[str, str]]:
    """(what, why) for each part of implementation ``name`` that did not run.

    A part is an op, an op in a dtype that was asked for by name, or a backward.
    """
    own = [v for v in verdicts if v.implementation == name]
    absent = []
    for op in dict.fromkeys(v.op for v in own):
        cells = [v for v in own if v.op == op and not (terms.shard and v.elsewhere)]
        if not cells:
            continue
        if all(v.status == "skip" for v in cells):
            absent.append((op, cells[0].detail))
        else:
            absent += [(f"{op} {v.dtype}", v.detail) for v in cells if v.status == "skip" and v.dtype in terms.dtypes]
        lacking = [v for v in cells if v.no_backward and not terms.shard]  # another shard may have run it
        if any(v.status != "skip" and not v.no_backward for v in cells):
            lacking = [v for v in lacking if v.dtype in terms.dtypes]
        absent += [(f"{op} {v.dtype}", f"{NO_BACKWARD}: {refusals(v.backward_refused)}") for v in lacking]
    return absent if own else [("anything", "it is not among the cells")]
