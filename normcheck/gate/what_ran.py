"""What ran: the kernels that a cell launches on a GPU, on a case of each class of its sizes, after its contexts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.contexts import is_not_run
from normcheck.circumstances import HELD, InContext, Ran
from normcheck.contexts.catalogue import PROFILER
from normcheck.gate.contexts import held_to
from normcheck.gate.plan import Plan
from normcheck.impls import discovery
from normcheck.runner.session import session_of

_MOST = (1.0, 0.02)
"""Seconds, and the share of those that a cell has taken so far, of which the larger holds. The first case does not
count: with it the profiler starts."""

_COLUMNS, _ROWS = (1024, 8192), 32
"""Where a class of N ends, and one of M: six classes."""

_NEW_SIZES = 3


@dataclass(frozen=True, slots=True)
class Looked:
    """What the profiler showed. ``failed``: a result that is wrong, None if none is; ``how``: as of a context, None if
    nobody looked.
    """

    failed: Result | None
    how: InContext | None
    ran: list[Ran]


def what_ran(cell: Cell, plan: Plan, ran: Sequence[Case], used: float) -> Looked:
    """See ``Looked``, of a case of each class; ``ran``: cases that are right; ``used``: seconds of the cell so far.

    A kernel that the implementation declares must run in one of them. To start the profiler takes a second or two in
    each process: in quick that is for a user's own kernel, unless somebody asks.
    """
    is_owed = PROFILER in held_to(cell, plan)
    is_known = plan.profile.name == "quick" and cell.spec in discovery.implementations()
    if not is_owed and (PROFILER not in plan.contexts or (is_known and not plan.asked)):
        return Looked(None, None, [])
    most = None if plan.asked or is_owed else max(_MOST[0], _MOST[1] * used)
    return looked(cell, plan, ran, most)


def looked(cell: Cell, plan: Plan, ran: Sequence[Case], most: float | None = None) -> Looked:
    """See ``Looked``; ``most``: seconds after which no further case is tried, None for as long as it takes."""
    plan, began, before = replace(plan, within=(PROFILER,)), 0.0, 0
    launched: list[Ran] = []
    how: InContext | None = None
    without: Result | None = None  # what is declared, as long as no case runs it
    for case, is_new in _cases(cell, ran):
        if began and most is not None and time.perf_counter() - began > most:
            break
        result = run_case(cell, case, plan, UNPROBED)
        began = began or time.perf_counter()
        lacks = any(map(is_not_run, result.problems))
        if result.failed and not lacks:
            return Looked(result, result.contexts.get(PROFILER), launched)
        own = result.launched
        if own is None:
            how = how or result.contexts.get(PROFILER)
            continue
        without = result if lacks and (without is not None or not launched) else None
        built = max(0, own.built - before) if is_new else None
        launched.append(Ran(M=case.M, N=case.N, forward=own.forward, backward=own.backward, built=built))
        before = own.built
    if launched:
        how = InContext(status=HELD, cases=len(launched)) if without is None else without.contexts[PROFILER]
    return Looked(without, how, launched)


def _cases(cell: Cell, ran: Sequence[Case]) -> Iterator[tuple[Case, bool]]:
    """A case of each class, the smallest; then cases that differ from one of them in an M that no call had before.

    None is a multiple of 16: Triton compiles those anew. Only a kernel in a process of its own can
    be seen to compile: in this one others do too.
    """
    classes: dict[tuple[int, bool], Case] = {}
    for case in sorted((case for case in ran if not case.huge), key=_badness):
        classes.setdefault((sum(end < case.N for end in _COLUMNS), case.M > _ROWS), case)
    yield from ((case, False) for case in classes.values())
    rows = {case.M for case in ran}
    if not (classes and session_of(cell.implementation).isolated) or cell.claims.shapes:
        return
    base = next((case for (_, many), case in classes.items() if many), next(iter(classes.values())))
    new = (m for m in range(base.M + 1, base.M + 100) if m % 16 and m not in rows)
    yield from ((replace(base, M=m), True) for m, _ in zip(new, range(_NEW_SIZES), strict=False))


def _badness(case: Case) -> tuple[bool, bool, int, str]:
    return case.weights == NO_WEIGHT, case.N % 64 != 0, case.M * case.N, str(case)
