"""A cell -> a verdict: explicit cases first, then what Hypothesis draws, then the large ones; a failure is shrunk.

Hypothesis is used through ``find()``: it draws cases, dedupes them and shrinks. It cannot shrink what it did not draw,
so a failing explicit case is searched again among its own simplifications.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample
from hypothesis.strategies import SearchStrategy

from normcheck import call, tolerance
from normcheck.alarm import TimeIsUp, alarm
from normcheck.battery import battery, large
from normcheck.call import Broken, poisoned_memory
from normcheck.case import Case
from normcheck.check import Result, check, undeclared_model
from normcheck.choices import Choices, cases, choices, within
from normcheck.environment import memory
from normcheck.explain import finding, place, signature, worst_ratio
from normcheck.judge import Checked
from normcheck.outputs import Problem
from normcheck.plan import Cell, Plan
from normcheck.result import Finding, Uncheckable, Verdict, Worst
from normcheck.tolerance import Model

T = TypeVar("T")

Progress = Callable[[int, float], None]
"""Called after a case with the number of cases so far and the worst ratio."""

_DRAW = (Phase.generate,)
_BATCH = 4  # cases that Hypothesis draws at a time: half of what an example costs it is there once an example
_SHRINK_TRIES = 400
_TELLING = 30  # cases of the battery that are looked at again after a failure: every kind of rows once
_PLAIN = 10.0  # a smaller case must fail by this factor or half of what the one it comes from does


class _Stop(BaseException):
    """Leaves Hypothesis from inside: a time or a number of cases is used up. Not an Exception, so that it gets out."""


@dataclass
class _Tally:
    """What has been seen of a cell so far."""

    base: Model
    cases: int = 0
    worst: dict[str, Worst] = field(default_factory=dict)
    uncheckable: dict[str, tuple[int, int]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    returned: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    per_row: float = float("inf")

    @property
    def floors(self) -> Mapping[str, float]:
        return {name: worst.ratio for name, worst in self.worst.items()}

    def add(self, result: Result, seconds: float) -> None:
        if result.refused:
            self.refused[result.refused] += 1
            return
        self.cases += 1
        self.missing.update(result.not_returned)
        self.notes.update(dict.fromkeys(result.notes))
        if result.case.M >= 8:
            self.per_row = min(self.per_row, seconds / result.case.M)
        for checked in result.checked:
            name, c = checked.output, checked.comparison
            self.returned.add(name)
            count, total = self.uncheckable.get(name, (0, 0))
            self.uncheckable[name] = (count + c.uncheckable, total + c.numel)
            self.note(result.case, checked)
        if result.model != self.base:
            for key, value in vars(result.model).items():
                if value != getattr(self.base, key):
                    self.declared[key] = str(value)

    def note(self, case: Case, checked: Checked) -> None:
        """Keep the worst of each output."""
        c = checked.comparison
        if checked.output not in self.worst or c.ratio > self.worst[checked.output].ratio:
            self.worst[checked.output] = Worst(ratio=c.ratio, max_abs=c.max_abs, max_ulp=c.max_ulp, case=str(case))


def run_cell(cell: Cell, plan: Plan, progress: Progress) -> Verdict:
    """The verdict of one cell. Never raises for what an implementation does."""
    reason = why_not(cell, plan.device)
    if reason:
        return _verdict(cell, plan, "skip", detail=reason)
    start = time.perf_counter()
    tally = _Tally(undeclared_model(cell.implementation, plan.device))
    with poisoned_memory():
        failed = _search(cell, plan, tally, progress, start)
        shrunk = _shrunk(cell, plan, failed) if failed is not None else None
        failure = None
        if shrunk is not None:
            for checked in shrunk.wrong:
                tally.note(shrunk.case, checked)
            failure = finding(cell, shrunk, plan.device, advise=not _timed_out(shrunk))
    seconds = time.perf_counter() - start
    if failure is None and not tally.cases:
        detail = "; ".join(f"{reason} ({count} cases)" for reason, count in tally.refused.items())
        return _verdict(cell, plan, "skip", detail=detail or "no case was drawn", seconds=seconds)
    return _summed_up(cell, plan, tally, failure, seconds)


def why_not(cell: Cell, device: str) -> str:
    """Why nothing of this cell can run on ``device``, or an empty string."""
    implementation = cell.implementation
    if cell.dtype not in implementation.dtypes:
        return f"declares only {', '.join(implementation.dtypes)}"
    return (implementation.unavailable(device) or "") if implementation.unavailable else ""


def run_case(cell: Cell, case: Case, plan: Plan, floors: Mapping[str, float] | None = None) -> Result:
    """One case, under the plan's timeout; what supports() says first."""
    unclaimed = _unclaimed(cell, case) or _too_large(case, plan.device)
    if unclaimed:
        return Result(case, tolerance.table().model, refused=unclaimed)
    try:
        with alarm(plan.timeout):
            reason = call.supports(cell.implementation, case)
            if reason is not None:
                return Result(case, tolerance.table().model, refused=reason or "supports(case) gave no reason")
            return check(cell.implementation, cell.op, case, plan.device, floors=floors)
    except TimeIsUp:
        message = f"no result after timeout={plan.timeout:g} s"
        return Result(case, tolerance.table().model, problems=(Problem("timeout", "", message),))
    except Broken as broken:
        problem = Problem(broken.kind, broken.output, broken.message, broken.frames)
        return Result(case, tolerance.table().model, problems=(problem,))


def _unclaimed(cell: Cell, case: Case) -> str:
    """What a case asks for that the implementation does not claim: a case line may ask for anything."""
    if "strided" in case.layout and not cell.implementation.strided:
        return f"layout={case.layout}: strided=False is declared"
    if case.rank not in cell.implementation.ranks:
        return f"layout={case.layout}: ranks={cell.implementation.ranks} is declared"
    return ""


def _too_large(case: Case, device: str) -> str:
    """Why the tensors of a case would not fit: a case line may ask for anything."""
    needed = (
        12 * case.M * (case.N + case.gap) * (4 if case.dtype == "fp32" else 2)
    )  # inputs, copies, outputs, gradients
    there = memory(device)
    return f"needs about {needed / 2**30:.1f} GiB of {there / 2**30:.1f} GiB" if needed > there else ""


def _timed_out(result: Result) -> bool:
    return any(p.kind == "timeout" for p in result.problems)


def _search(cell: Cell, plan: Plan, tally: _Tally, progress: Progress, start: float) -> Result | None:
    """The first failing result, or None when the budget is used up."""
    most, end = plan.profile.max_examples, start + plan.profile.seconds
    found: list[Result] = []

    def fails(case: Case) -> bool:
        if tally.cases + tally.refused.total() >= most or time.perf_counter() > end:
            raise _Stop
        began = time.perf_counter()
        result = run_case(cell, case, plan, tally.floors)
        tally.add(result, time.perf_counter() - began)
        progress(tally.cases, max(tally.floors.values(), default=0.0))
        if result.failed:
            found.append(result)
            raise _Stop
        return False

    try:
        for case in battery(cell.op, cell.implementation, cell.dtype):
            fails(case)
        for case in _affordable(cell, plan, tally, end):
            fails(case)
        batches = st.tuples(*[cases(choices(cell.op, cell.implementation, cell.dtype))] * _BATCH)
        _find(batches, lambda batch: any(map(fails, batch)), seed=_seed(cell, plan), tries=most, phases=_DRAW)
    except _Stop:
        pass
    return _most_telling(cell, plan, found[0], tally) if found else None


def _most_telling(cell: Cell, plan: Plan, failed: Result, tally: _Tally) -> Result:
    """Of the first failure and those of the kinds of data: the earliest on the data's way, then the largest ratio.

    The first that fails may do so by a hair, where another kind of data shows the same fault plainly.
    """
    best, end = failed, time.perf_counter() + plan.profile.seconds / 4
    for case in islice(battery(cell.op, cell.implementation, cell.dtype), _TELLING):
        if time.perf_counter() > end or any(p.kind == "timeout" for p in best.problems):
            break
        result = run_case(cell, case, plan, tally.floors)
        if result.failed and (place(result), -worst_ratio(result)) < (place(best), -worst_ratio(best)):
            best = result
    for checked in best.wrong:
        tally.note(best.case, checked)
    return best


def _affordable(cell: Cell, plan: Plan, tally: _Tally, end: float) -> Iterator[Case]:
    """The large cases that are expected to fit; the others are named in a note."""
    left_out = []
    for case in large(cell.op, cell.implementation, cell.dtype, plan.device):
        expected = tally.per_row * case.M + case.M * case.N * _JUDGING[plan.device]
        if expected > plan.profile.large_share * (end - time.perf_counter()):
            left_out.append(f"{case.M}x{case.N}")
            continue
        yield case
    if left_out:
        tally.notes[f"not run, too slow for this profile: {', '.join(left_out)}"] = None


_JUDGING = {"cpu": 2.5e-7, "cuda": 2e-9}
"""Seconds that judging an element takes at most, forward and backward: measured, for planning only."""


def _find(
    strategy: SearchStrategy[T], fails: Callable[[T], bool], *, seed: int, tries: int, phases: tuple[Phase, ...]
) -> T | None:
    quiet = settings(
        max_examples=tries,
        database=None,
        deadline=None,
        phases=phases,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(strategy, fails, settings=quiet, random=random.Random(seed))
    except (NoSuchExample, Flaky):
        return None


def _seed(cell: Cell, plan: Plan) -> int:
    """A seed of its own for each cell, the same in every run with the same ``--seed``."""
    return zlib.crc32(f"{plan.seed} {cell.op.name} {cell.implementation.name} {cell.dtype}".encode())


def _size(case: Case, every: Choices) -> tuple[int, ...]:
    """How simple a case is: fewer elements first, then simpler kinds."""
    kinds = (
        _rank(every.rows, case.rows),
        _rank(every.dy, case.dy),
        _rank(every.parameters, (case.weights, case.weight_dtype, case.bias)),
        _rank(every.layout, (case.layout, case.gap)),
        _rank(every.eps, case.eps),
    )
    return (case.M * case.N, sum(kinds), *kinds, case.seed)


def _rank(values: Sequence[object], own: object) -> int:
    return values.index(own) if own in values else len(values)


def _shrunk(cell: Cell, plan: Plan, failed: Result) -> Result:
    """The simplest failing case found within a budget, failing in the same output; at worst the one given."""
    every = choices(cell.op, cell.implementation, cell.dtype)
    wanted, end = signature(failed), time.perf_counter() + plan.profile.seconds
    best = failed
    seen: dict[Case, bool] = {}

    def fails(case: Case) -> bool:
        nonlocal best
        if time.perf_counter() > end:
            raise _Stop
        if case not in seen:
            result = run_case(cell, case, plan)
            plain = worst_ratio(result) >= min(_PLAIN, worst_ratio(failed) / 2)
            seen[case] = result.failed and signature(result) == wanted and plain
            if seen[case] and _size(case, every) < _size(best.case, every):
                best = result
        return seen[case]

    try:
        for _ in range(3):  # each round searches within the last one's result, until it stays
            before = best.case
            near = cases(within(every, before))
            _find(near, fails, seed=_seed(cell, plan), tries=_SHRINK_TRIES, phases=(Phase.generate, Phase.shrink))
            if best.case == before:
                break
    except _Stop:
        pass
    return best


def _verdict(cell: Cell, plan: Plan, status: str, *, detail: str = "", seconds: float = 0.0) -> Verdict:
    return Verdict(
        op=cell.op.name,
        implementation=cell.implementation.name,
        dtype=cell.dtype,
        device=plan.device,
        status=status,
        detail=detail,
        seconds=seconds,
    )


def _summed_up(cell: Cell, plan: Plan, tally: _Tally, failure: Finding | None, seconds: float) -> Verdict:
    limit = tolerance.table().max_uncheckable
    uncheckable = {
        name: Uncheckable(count=count, total=total) for name, (count, total) in tally.uncheckable.items() if count
    }
    notes = list(tally.notes)
    for name, u in uncheckable.items():
        if u.share > limit and name != "bitmask":  # a bit in doubt is what the definition of the op leaves open
            notes.append(f"{u.share:.1%} of {name} could not be checked: its bound is not finite there")
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
    )
