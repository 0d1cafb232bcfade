"""A cell -> a verdict: explicit cases first, then what Hypothesis draws, then the large ones; a failure is shrunk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import Phase
from hypothesis import strategies as st

from normcheck.cases.beyond import far_apart, large, model_sizes, telling
from normcheck.cases.case import Case
from normcheck.cases.claims import Claims, claims_of
from normcheck.cases.strategies import cases, choices
from normcheck.checks import sanitizer
from normcheck.checks.attempt import died, run_case, timed_out, why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, context_lost, undeclared_model
from normcheck.checks.finding import finding, place, worst_ratio
from normcheck.checks.probes import Depth, not_as_before
from normcheck.gate.blame import Blame, blamed, run_surely, told
from normcheck.gate.coverage import CoreRun
from normcheck.gate.plan import Plan
from normcheck.gate.remarks import derived, empty_outputs, refusals
from normcheck.gate.shrink import Stop, search, seed_of
from normcheck.gate.tally import Tally
from normcheck.impls import source_location
from normcheck.result import Finding, Uncheckable, Verdict
from normcheck.runner.call import link_of, poisoned_memory

Progress = Callable[[int, float], None]
"""Called after a case with the number of cases so far and the worst ratio."""

_DRAW = (Phase.generate,)
_BATCH = 4  # cases that Hypothesis draws at a time: half of what an example costs it is there once an example
_MEMORY_EVERY = 2
_ROWS_EVERY = 8
_HUGE = 1 << 28
_LOOKING = 10.0  # seconds of that, at most


def run_cell(cell: Cell, plan: Plan, progress: Progress) -> Verdict:
    """The verdict of one cell. Never raises for what an implementation does."""
    reason = why_not(cell, plan.device)
    if reason:
        return _verdict(cell, plan, "skip", detail=reason)
    link = link_of(cell.implementation)
    if link is not None:
        link.ready()
    start = time.perf_counter()
    tally, core = Tally(undeclared_model(cell.implementation, plan.device)), CoreRun(cell, plan)
    with poisoned_memory():
        failed = _search(cell, plan, tally, progress, core)
        final = failed is not None and _context_lost(cell, failed)
        failure = None
        if failed is not None:
            blame = Blame(failed) if final else blamed(cell, plan, failed)
            smallest = blame.result
            for checked in smallest.wrong:
                tally.note(smallest.case, checked)
            failure = finding(cell, smallest, plan.device, advise=not (died(smallest) or final))
            failure = told(cell, plan, blame, failure)
    seconds = time.perf_counter() - start
    if failure is None and not tally.cases:
        skip = _verdict(cell, plan, "skip", detail=refusals(tally.refused) or "no case was drawn", seconds=seconds)
        return replace(skip, skipped=dict(tally.refused))
    return _covered(summed_up(cell, plan, tally, failure, seconds), core)


def _covered(verdict: Verdict, core: CoreRun) -> Verdict:
    """A verdict with how much of its core was run: a pass without all of it is thin."""
    if verdict.status != "pass":  # the search ended with the failure
        return replace(verdict, core=core.so_far())
    coverage = core.coverage()
    verdict = replace(verdict, core=coverage)
    gaps = [f"core not finished, {core.why_thin()}: {', '.join(coverage.missed)}"] * bool(coverage.missed)
    gaps += [f"{name} was never told from zeros" for name in empty_outputs(verdict.vacuity)]
    return verdict if not gaps else replace(verdict, status="thin", detail="; ".join(gaps))


def result_of(cell: Cell, case: Case, plan: Plan) -> Verdict:
    """The verdict of one case alone, as it is."""
    reason = why_not(cell, plan.device)
    if reason:
        return _verdict(cell, plan, "skip", detail=reason)
    start = time.perf_counter()
    tally = Tally(undeclared_model(cell.implementation, plan.device))
    with poisoned_memory():
        result = run_case(cell, case, plan)
        tally.add(result, time.perf_counter() - start)
        failure = finding(cell, result, plan.device) if result.failed else None
    seconds = time.perf_counter() - start
    if result.refused:
        return _verdict(cell, plan, "skip", detail=result.refused, seconds=seconds)
    return summed_up(cell, plan, tally, failure, seconds)


def _search(cell: Cell, plan: Plan, tally: Tally, progress: Progress, core: CoreRun) -> Result | None:
    """The most telling of the failing results, or None where all is right when the budget is used up."""
    found = _first_failing(cell, plan, tally, progress, core) or _first_again(cell, plan, tally)
    if not found and plan.profile.sanitizer and plan.device == "cuda" and plan.shard[0] == 1:
        found = _under_sanitizer(cell, tally)
        if found:
            return found[0]
    return _most_telling(cell, plan, found[0], tally) if found else None


def _first_failing(cell: Cell, plan: Plan, tally: Tally, progress: Progress, core: CoreRun) -> list[Result]:
    """The first failing result, if there is one: the core, then large cases and what Hypothesis draws, until time or
    number ends.

    Every case of the sequence has its number, whether it is run or not, so that shards share one sequence.
    """
    most, (shard, shards) = plan.profile.max_examples, plan.shard
    found: list[Result] = []
    number, end = -1, math.inf

    def run(case: Case, depth: Depth, *, own: bool = True) -> tuple[Result, float]:
        began = time.perf_counter()
        result = run_surely(cell, case, plan, tally.floors, depth)
        seconds = time.perf_counter() - began
        if own or result.failed:
            tally.add(result, seconds)
            progress(tally.cases, max(tally.floors.values(), default=0.0))
        if result.failed:
            found.append(result)
            raise Stop
        return result, seconds

    def fails(case: Case, is_large: bool = False) -> bool:
        nonlocal number
        number += 1
        if number >= most or time.perf_counter() > end:
            raise Stop
        if number % shards == shard - 1 and not (is_large and _too_slow(case, plan, tally, end)):
            run(case, _depth(number, case))
        return False

    try:
        for case in _replayed(cell, plan, tally):
            run(case, Depth.ROWS)
        replayed = tally.cases  # beside the sequence
        while (tally.cases - replayed if shards == 1 else core.length) < most and (step := core.next()) is not None:
            number = step.number
            result, seconds = run(step.planned.case, _DEPTHS[step.planned.probe], own=step.own)
            core.saw(step, result, seconds)
        number = core.length - 1 if shards > 1 else tally.cases - replayed - 1
        end = time.perf_counter() + plan.profile.seconds
        for case, is_large in _explicit(cell, plan, core.claims):
            fails(case, is_large)
        batches = st.tuples(*[cases(choices(core.claims))] * _BATCH)
        search(batches, lambda batch: any(map(fails, batch)), seed=seed_of(cell, plan.seed), tries=most, phases=_DRAW)
    except Stop:
        pass
    tally.failed_at = number
    return found


_DEPTHS = {"reason": Depth.REASON, "memory": Depth.MEMORY, "rows": Depth.ROWS}


def _explicit(cell: Cell, plan: Plan, claims: Claims) -> Iterator[tuple[Case, bool]]:
    """The cases between the core and what is drawn, and of each whether it is large."""
    if plan.device == "cuda":
        for case in far_apart(claims):
            yield case, False
    for case in model_sizes(claims, seed_of(cell, plan.seed)):
        yield case, False
    times = plan.profile.large_times if plan.device == "cuda" else 1
    for case in large(claims, plan.device, times, seed_of(cell, plan.seed)):
        yield case, True


def _replayed(cell: Cell, plan: Plan, tally: Tally) -> tuple[Case, ...]:
    """The cases by which the cell failed in earlier runs."""
    replay = plan.replays.get((cell.op.name, cell.implementation.name, cell.dtype))
    if replay is None or plan.shard[0] != 1:
        return ()
    tally.notes.update(dict.fromkeys(replay.notes))
    return replay.cases


def _depth(number: int, case: Case) -> Depth:
    """What a case's probes are asked: they cost a run and memory, so every second case is asked, and no huge one."""
    if case.M * (case.N + case.gap) > _HUGE:
        return Depth.REASON
    if number % _ROWS_EVERY == 0:
        return Depth.ROWS
    return Depth.REASON if number % _MEMORY_EVERY else Depth.MEMORY


def _first_again(cell: Cell, plan: Plan, tally: Tally) -> list[Result]:
    """The first case once more, after all others: its bits are the same."""
    first = tally.first
    if first is None or first.failed or not cell.implementation.deterministic or tally.cases < _ROWS_EVERY:
        return []
    again = run_case(cell, first.case, plan, tally.floors, Depth.OFF)
    problems = tuple(not_as_before(first.seen, again.seen))
    return [replace(again, problems=(*again.problems, *problems))] if problems or again.failed else []


def _under_sanitizer(cell: Cell, tally: Tally) -> list[Result]:
    """What compute-sanitizer reports; what it did is a note."""
    case, problems, note = sanitizer.examine(cell)
    if note:
        tally.notes[note] = None
    return [Result(case, tally.base, problems=problems)] if case is not None else []


def _most_telling(cell: Cell, plan: Plan, failed: Result, tally: Tally) -> Result:
    """Of the first failure and those of the kinds of data: the earliest on the data's way, then the largest ratio.

    The first that fails may do so by a hair, where another kind of data shows the same fault plainly.
    """
    best, end = failed, time.perf_counter() + min(plan.profile.seconds / 4, _LOOKING)
    if _context_lost(cell, failed) or died(failed):
        return failed
    for case in telling(claims_of(cell.op, cell.implementation, cell.dtype), plan.seed):
        if time.perf_counter() > end or timed_out(best):
            break
        result = run_case(cell, case, plan, tally.floors, Depth.OFF)
        if result.failed and (place(result), -worst_ratio(result)) < (place(best), -worst_ratio(best)):
            best = result
    for checked in best.wrong:
        tally.note(best.case, checked)
    return best


def _context_lost(cell: Cell, failed: Result) -> bool:
    """Whether nothing runs any more on this process's GPU; a worker's context is lost with the worker."""
    return link_of(cell.implementation) is None and any(map(context_lost, failed.problems))


def _too_slow(case: Case, plan: Plan, tally: Tally, end: float) -> bool:
    """Whether a large case is not expected to fit into the time that is left; it is then named in a note."""
    unknown = plan.shard[1] > 1 and tally.per_row == float("inf")  # so few cases that none of them told
    expected = 0.0 if unknown else tally.per_row * case.M
    expected += case.M * case.N * _JUDGING[plan.device]
    slow = expected > plan.profile.large_share * (end - time.perf_counter())
    if slow:
        tally.too_slow[f"{case.M}x{case.N}"] = None
    return slow


_JUDGING = {"cpu": 2.5e-7, "cuda": 2e-9}
"""Seconds that judging an element takes at most, forward and backward: measured, for planning only."""


def _verdict(cell: Cell, plan: Plan, status: str, *, detail: str = "", seconds: float = 0.0) -> Verdict:
    where = source_location.of(cell.implementation)
    return Verdict(
        op=cell.op.name,
        implementation=cell.implementation.name,
        dtype=cell.dtype,
        device=plan.device,
        status=status,
        detail=detail,
        seconds=seconds,
        file=source_location.relative(where.file),
        line=where.line,
    )


def summed_up(cell: Cell, plan: Plan, tally: Tally, failure: Finding | None, seconds: float) -> Verdict:
    """The verdict of a cell that ran: what its cases add up to, and the finding, if there is one."""
    uncheckable = {name: Uncheckable(count=count, total=total) for name, (count, total) in tally.uncheckable.items()}
    notes = list(tally.notes)
    if tally.too_slow:
        notes.append(f"not run, too slow for this profile: {', '.join(tally.too_slow)}")
    notes += derived(uncheckable, tally.vacuity, tally.backward_refused, tally.cases)
    absent = [name for name in (*cell.op.outputs, "dx", "dw", "db") if name in tally.missing - tally.returned]
    return replace(
        _verdict(cell, plan, "pass" if failure is None else "fail", seconds=seconds),
        detail="" if failure is None else failure.message,
        cases=tally.cases,
        worst=dict(tally.worst),
        not_returned=tuple(absent),
        failure=failure,
        uncheckable=uncheckable,
        skipped=dict(tally.refused),
        model=dict(tally.declared),
        notes=tuple(notes),
        vacuity=dict(tally.vacuity),
        repeats=dict(tally.repeats),
        invariance=dict(tally.invariance),
        failed_at=None if failure is None else tally.failed_at,
        backward_refused=dict(tally.backward_refused),
        undeclared=dict(tally.undeclared),
    )
