"""Shrinking: the simplest case that fails in the same output as a failing one, found by Hypothesis; then a larger one.

Hypothesis shrinks only cases that it drew itself, and an explicit case was not drawn. So the search starts again for
every failure, with strategies that draw nothing less simple than the failing case.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis.errors import Flaky, NoSuchExample
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.strategies import SearchStrategy

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import HEADS
from normcheck.cases.strategies import Choices, cases, choices, own_of, within
from normcheck.checks.ask import UNPROBED, Ask
from normcheck.checks.attempt import died, run_alone, run_case, timed_out
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.finding import signature, worst_ratio
from normcheck.gate.plan import Plan

T = TypeVar("T")

_TRIES = 400
_RESTARTS, _TIMEOUTS = 40, 3  # how often a search may restart a dead process; the latter if the failure is a timeout
_WIDENED_ELEMENTS = 1 << 18  # at most, in a case that is only drawn
_EDGE_SECONDS = 5.0  # at most, and half as long as the search for a simpler case: for the sizes at which it begins
_CLEARER_SECONDS, _CLEARER_SIZES = 5.0, (2, 3, 5, 8)
_PLAIN_RATIO = 10.0  # a simpler case must fail by this ratio, or by half the ratio of the case that it comes from


class Stop(BaseException):
    """Ends a search of Hypothesis from inside, since its time or number of cases is used up.

    Not an Exception: Hypothesis would take one for a failure.
    """


def search(
    strategy: SearchStrategy[T], fails: Callable[[T], bool], *, seed: int, tries: int, phases: tuple[Phase, ...]
) -> T | None:
    """Hypothesis' find(), without its database, deadlines and health checks; None if nothing fails."""
    quiet = settings(
        max_examples=tries,
        database=None,
        deadline=None,
        phases=phases,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    try:
        with _of_the_seed_alone():
            return find(strategy, fails, settings=quiet, random=random.Random(seed))
    except (NoSuchExample, Flaky):
        return None


@contextmanager
def _of_the_seed_alone() -> Iterator[None]:
    """Keep Hypothesis from mixing the numbers of all source files into what it draws: it reads each first, keeps
    them in a folder of the working directory, and finds another smallest case after an edit. No setting forbids it.
    """
    numbers = "_get_local_constants"
    usual = getattr(providers, numbers, None)
    if usual is not None:
        setattr(providers, numbers, Constants)
    try:
        yield
    finally:
        if usual is not None:  # a test of the user's may be at work
            setattr(providers, numbers, usual)


def seed_of(cell: Cell, seed: int) -> int:
    """The seed of a cell: different for each cell, the same in every run with the same ``--seed``."""
    return zlib.crc32(
        f"{seed} {cell.op.name} {cell.implementation.name} {cell.dtype}".encode("utf-8", "backslashreplace")
    )


def _size(case: Case, every: Choices) -> tuple[int, ...]:
    """How simple a case is: fewer elements first, then simpler kinds."""
    kinds = [_rank(values, own_of(case, values)) for values in every.kinds]
    return (case.M * case.N, sum(kinds), *kinds, case.seed)


def _rank(values: Sequence[object], own: object) -> int:
    return values.index(own) if own in values else len(values)


def shrunk(cell: Cell, plan: Plan, failed: Result, *, alone: bool = False) -> Result:
    """The simplest case found within the plan's budget that fails in the same output; at worst the given one.

    ``alone``: a failure counts only if it happens in a new process as well, since a case that was tried before may have
    damaged the process.
    """
    every = choices(cell.claims)
    seconds = min(plan.profile.seconds, plan.profile.shrink_seconds)
    wanted, end = signature(failed), time.perf_counter() + seconds
    depth = Depth.OFF if wanted[0] == "mismatch" else Depth.ROWS
    best = failed
    restarts = 0
    seen: dict[Case, bool] = {}

    def fails(case: Case) -> bool:
        nonlocal best, restarts
        if time.perf_counter() > end or restarts >= (_TIMEOUTS if timed_out(failed) else _RESTARTS):
            raise Stop
        if case not in seen:
            result = run_case(cell, case, plan, Ask(depth))
            restarts += died(result)
            if alone and result.failed and result.after:
                result = run_alone(cell, case, plan, Ask(depth))
                restarts += 1 + died(result)
            plain = worst_ratio(result) >= min(_PLAIN_RATIO, worst_ratio(failed) / 2)
            seen[case] = result.failed and signature(result) == wanted and plain
            if seen[case] and _size(case, every) < _size(best.case, every):
                best = result
        return seen[case]

    try:
        for _ in range(3):  # each round searches within the result of the last one
            before = best.case
            near = cases(within(every, before))
            search(near, fails, seed=seed_of(cell, plan.seed), tries=_TRIES, phases=(Phase.generate, Phase.shrink))
            if best.case == before:
                break
    except Stop:
        pass
    end = time.perf_counter() + min(_EDGE_SECONDS, seconds / 2)
    with suppress(Stop):
        for axis, sizes in (("N", every.n), ("M", every.m)):
            if every.shapes or best.case.layout == HEADS or not seconds:
                break
            if axis == "N" and cell.claims.columns > 1:  # those between its multiples are no cases
                continue
            _to_edge(best.case, axis, sizes, fails)
    if depth == Depth.OFF and best is not failed:
        probed = run_case(cell, best.case, plan)  # with the probes, which may show the reason
        return probed if probed.failed and signature(probed)[1] == wanted[1] else best
    return best


def _to_edge(case: Case, axis: str, sizes: Sequence[int], fails: Callable[[Case], bool]) -> None:
    """Bisect M or N between the smallest size that fails and the largest of ``sizes`` below it, if that passes.

    The search for a simpler case takes sizes from a list, which has gaps. ``fails`` keeps the best.
    """
    high = getattr(case, axis)
    below = max((size for size in sizes if size < high), default=high)
    low = below
    while low < high and fails(_of_size(case, axis, low)):  # which the search has missed
        high, low = low, max((size for size in sizes if size < low), default=low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(_of_size(case, axis, middle)) else (middle, high)


def _of_size(case: Case, axis: str, size: int) -> Case:
    return replace(case, M=size) if axis == "M" else replace(case, N=size)


def clearer(cell: Cell, plan: Plan, smallest: Result, tells: Callable[[Result], bool]) -> Result:
    """The smallest of a few larger cases that fails in the same output and ``tells`` what is wrong, or ``smallest``.

    One row, or one column, may hide it: a dx is 0 there if the row is centred, dw is db times a number.
    """
    case, end = smallest.case, time.perf_counter() + min(_CLEARER_SECONDS, plan.profile.shrink_seconds)
    if min(case.M, case.N) != 1 or case.layout == HEADS or choices(cell.claims).shapes or tells(smallest):
        return smallest
    rows, columns = ([own, *(size for size in _CLEARER_SIZES if size > own)] for own in (case.M, case.N))
    sizes = sorted(product(rows, columns), key=lambda size: (size[0] * size[1], size))
    for m, n in sizes[1:]:
        if time.perf_counter() > end:
            break
        result = run_alone(cell, cell.claims.nearest(replace(case, M=m, N=n)), plan, UNPROBED)
        if result.failed and signature(result) == signature(smallest) and tells(result):
            return result
    return smallest


def widened(cell: Cell, plan: Plan, smallest: Result, failed: Result) -> Result:
    """The case ``smallest`` in a size that has room for a pattern: that of ``failed``, and twice its own at least.

    It is ``failed`` itself if that size is too large, if it does not fail in the same output, or without shrinking.
    """
    small, old = smallest.case, failed.case
    case = replace(small, M=max(2 * small.M, old.M), N=max(2 * small.N, old.N))
    if case.M * case.N > _WIDENED_ELEMENTS or not plan.profile.shrink_seconds:
        return failed
    result = run_case(cell, case, plan, UNPROBED)
    return result if result.failed and signature(result) == signature(smallest) else failed
