"""Merge of shards: the reports of all shards of one sweep become one run."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from normcheck.circumstances import InContext
from normcheck.errors import ExitCode, UsageError, one_line
from normcheck.gate.sanity import sensible
from normcheck.gate.tally import derived, refusals
from normcheck.oracle.conventions import disagreeing
from normcheck.result import CellKey, Coverage, Steadiness, SweepResult, Uncheckable, Vacuity, Verdict, Worst

T = TypeVar("T")

SAME_VERSIONS = ("normcheck", "torch", "triton", "cudnn_frontend", "hypothesis", "cuda", "cudnn_backend")
"""These decide which cases are drawn and what computes them. Host, driver and patch of Python may differ."""


def merged(runs: Sequence[tuple[str, SweepResult]]) -> SweepResult:
    """One run of all shards, each given with its file's name; the gate has yet to decide its status.

    Counts are summed. Shapes are not: one may be in several shards, so the largest number of a shard is kept, and there
    are at least so many. Of each output the worst is kept, and of the findings the one whose case comes first in the
    sweep. A verdict that contradicts itself, as after somebody edited a report, becomes an ``error``.
    Raises UsageError for reports of different sweeps, a shard that is missing or one that is there twice.
    """
    ordered = _in_order(runs)
    for file, run in ordered:
        _check_once(file, run)
        _check_alike(ordered[0], (file, run))
    shards = [run for _, run in ordered]
    first = shards[0]
    cells: dict[CellKey, list[Verdict]] = {}
    for run in shards:
        for verdict in run.verdicts:
            cells.setdefault(_key(verdict), []).append(sensible(verdict))
    for key, parts in cells.items():
        _check_parts(key, parts, complete=all(run.complete for run in shards))
    machines = dict.fromkeys(run.environment["device"] for run in shards if "device" in run.environment)
    return replace(
        first,
        seconds=max(run.seconds for run in shards),
        environment={**first.environment, **({"device": ", ".join(machines)} if machines else {})},
        verdicts=tuple(sensible(one_verdict(parts)) for parts in cells.values()),
        status="",
        exit_code=ExitCode.BROKEN,
        messages=(),
        complete=all(run.complete for run in shards),
        shard="",
        required=tuple(dict.fromkeys(name for run in shards for name in run.required)),
        part=any(run.part for run in shards),
    )


def _in_order(runs: Sequence[tuple[str, SweepResult]]) -> list[tuple[str, SweepResult]]:
    """The reports in the order of their shards. Raises UsageError unless each shard is there once."""
    shards: dict[int, tuple[str, SweepResult]] = {}
    count, source = 0, ""
    for file, run in runs:
        match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", run.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            said = one_line(run.shard, 60) or "none"
            raise UsageError(f"{file}: shard={said}: expected a report of normcheck verify --shard K/N")
        number, total = int(match[1]), int(match[2])
        if count and total != count:
            raise UsageError(f"{file}: shard={run.shard}: expected one of {count}, as {source}")
        if number in shards:
            raise UsageError(
                f"{file}: shard={run.shard}: expected each shard once, {shards[number][0]} is this one as well"
            )
        shards[number], count, source = (file, run), total, file
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in shards]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise UsageError(f"shard={', '.join(missing[:8])}{more} is missing: expected a report of each of {count}")
    return [shards[number] for number in sorted(shards)]


def _check_once(file: str, run: SweepResult) -> None:
    for key, times in Counter(_key(v) for v in run.verdicts).items():
        if times > 1:
            raise UsageError(f"{file}: expected each cell once, {one_line(str(key), 120)} is there {times} times")


def _check_alike(one: tuple[str, SweepResult], other: tuple[str, SweepResult]) -> None:
    (file, a), (second, b) = one, other
    facts: list[tuple[str, object, object]] = [("seed", a.seed, b.seed), ("profile", a.profile, b.profile)]
    facts += [(name, a.budget.get(name), b.budget.get(name)) for name in {**a.budget, **b.budget}]
    facts += [(name, a.environment.get(name), b.environment.get(name)) for name in SAME_VERSIONS]
    for name, own, its in facts:
        if own != its:
            said = (one_line(str(value), 80) for value in (its, own))
            raise UsageError("{}: {}={}: expected {}, as in {}".format(second, name, *said, file))
    cells = [[_key(v) for v in run.verdicts] for run in (a, b)]
    if a.complete and b.complete and cells[0] != cells[1]:
        own_only = [key for key in [*cells[0], *cells[1]] if (key in cells[0]) != (key in cells[1])]
        which = one_line(str(own_only[0]), 120) if own_only else "in another order"
        raise UsageError(f"{second}: expected the cells of {file}; {which} is only in one of them")


def _check_parts(key: CellKey, parts: Sequence[Verdict], *, complete: bool) -> None:
    """Raise UsageError if the parts of a cell are of different kernels, or if whole cells went to no shard, or two."""
    name = one_line(str(key), 120)
    ran = [v for v in parts if not v.elsewhere]
    if len(ran) < len(parts) and len(ran) != 1 and (complete or ran):
        raise UsageError(
            f"{name}: {len(ran)} shards judged it: expected one, so the same --timings for each; run them again"
        )
    sources = {v.source: v for v in ran if v.source}
    if len(sources) > 1:
        a, b = list(sources.values())[:2]
        where = [one_line(v.machine.get("host", "another machine"), 60) for v in (a, b)]
        raise UsageError(
            f"{name}: {one_line(a.file, 200) or 'its file'} was another on {where[1]} than on {where[0]} "
            f"(sha256 {b.source[:12]}, {a.source[:12]}): expected one version; run them again"
        )


def _key(verdict: Verdict) -> CellKey:
    return verdict.key.on(verdict.device)


def one_verdict(parts: Sequence[Verdict]) -> Verdict:
    """The verdict of a cell from those of its shards, or of its rounds."""
    first = next((v for v in parts if not v.elsewhere), parts[0])
    failed = min((v for v in parts if v.status == "fail"), key=_when, default=None)
    broken = next((v for v in parts if v.status == "error"), None)
    status = next((s for s in ("fail", "error", "thin", "pass") if any(v.status == s for v in parts)), "skip")
    skipped, refused = Counter[str](), Counter[str]()
    for verdict in parts:
        skipped.update(verdict.skipped)
        refused.update(verdict.backward_refused)
    cases = sum(v.cases for v in parts)
    thin = [v.detail for v in parts if v.status == "thin"]
    detail = {
        "thin": "; ".join(dict.fromkeys(thin)),
        "fail": failed and failed.detail,
        "error": broken and broken.detail,
        "skip": first.detail,
    }.get(status)
    worst = _joined([v.worst for v in parts], _worse)
    uncheckable = _joined([v.uncheckable for v in parts], _both)
    vacuity = _joined([v.vacuity for v in parts], _weighed)
    own = [n for v in parts for n in v.notes if n not in derived(v.uncheckable, v.vacuity, v.backward_refused, v.cases)]
    torn = disagreeing(own) or _torn_by_graph(parts)
    if torn and status in ("pass", "thin"):
        status, detail = "error", f"{_TORN}: in one part it {', in another it '.join(torn)}"
    return replace(
        first,
        status=status,
        detail=(refusals(skipped) if status == "skip" and skipped else detail) or "",
        cases=cases,
        seconds=sum(v.seconds for v in parts),
        worst=worst,
        not_returned=tuple(dict.fromkeys(n for v in parts for n in v.not_returned if n not in worst)),
        failure=failed.failure if failed else None,
        uncheckable=uncheckable,
        skipped=dict(skipped),
        model={key: value for v in parts for key, value in v.model.items()},
        notes=(*dict.fromkeys(own), *derived(uncheckable, vacuity, refused, cases)),
        vacuity=vacuity,
        repeats=_joined([v.repeats for v in parts], _steady),
        invariance=_joined([v.invariance for v in parts], _steady),
        known=failed.known if failed else "",
        failed_at=failed.failed_at if failed else None,
        backward_refused=dict(refused),
        undeclared=_joined([v.undeclared for v in parts], _worse),
        core=_core([v.core for v in parts if v.core is not None]),
        shapes=max((v.shapes for v in parts if v.shapes is not None), default=None),
        spread=_joined([v.spread for v in parts], _at_values),
        machine=_joined([v.machine for v in parts], _listed),
        limits=_joined([v.limits for v in parts], min),
        sizes=_joined([v.sizes for v in parts], operator.add),
        contexts=_joined([v.contexts for v in parts], InContext.joined),
        ran=next((v.ran for v in parts if v.ran), ()),
        configurations=next((v.configurations for v in parts if v.configurations), None),
    )


_TORN = "its parts disagree on what the kernel computes; judge the cell in one run, which shows the case"


def _torn_by_graph(parts: Sequence[Verdict]) -> list[str]:
    """What two parts say if the y of one has a graph and that of the other never has; [] if they agree."""
    bare = any("dx" in v.not_returned and not v.backward_refused for v in parts)
    return ["returns y without a graph", "has gradients"] if bare and any("dx" in v.worst for v in parts) else []


def _listed(a: str, b: str) -> str:
    """The machines of both, each once."""
    return ", ".join(dict.fromkeys([*a.split(", "), *b.split(", ")]))


def _at_values(a: Mapping[str, float], b: Mapping[str, float]) -> Mapping[str, float]:
    """The larger ratio at each value of an axis."""
    return _joined([a, b], max)


def _core(parts: Sequence[Coverage]) -> Coverage | None:
    """The coverage of a cell's core from its shards. Each lists what it missed of its own part of the core."""
    if not parts:
        return None
    return Coverage(
        planned=sum(part.planned for part in parts),
        limit=next((part.limit for part in parts if part.limit), ""),
        run=sum(part.run for part in parts),
        missed=tuple(dict.fromkeys(words for part in parts for words in part.missed)),
        left_out=parts[0].left_out,
        refused=max(part.refused for part in parts),
        building=sum(part.building for part in parts),
    )


def _when(verdict: Verdict) -> float:
    return math.inf if verdict.failed_at is None else verdict.failed_at


def _joined(maps: Iterable[Mapping[str, T]], join: Callable[[T, T], T]) -> dict[str, T]:
    joined: dict[str, T] = {}
    for each in maps:
        for name, value in each.items():
            joined[name] = join(joined[name], value) if name in joined else value
    return joined


def _worse(a: Worst, b: Worst) -> Worst:
    """The worse of two, the first of equals; NaN is worse than any number."""
    return b if (math.isnan(b.ratio) and not math.isnan(a.ratio)) or b.ratio > a.ratio else a


def _both(a: Uncheckable, b: Uncheckable) -> Uncheckable:
    return Uncheckable(count=a.count + b.count, total=a.total + b.total)


def _weighed(a: Vacuity, b: Vacuity) -> Vacuity:
    return Vacuity(
        zeros=a.zeros + b.zeros, total=a.total + b.total, empty=a.empty + b.empty, checks=a.checks + b.checks
    )


def _steady(a: Steadiness, b: Steadiness) -> Steadiness:
    return Steadiness(differ=a.differ + b.differ, cases=a.cases + b.cases)
