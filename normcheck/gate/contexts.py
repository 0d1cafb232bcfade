"""The contexts of a cell, tried after its core on two or three shapes that have run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from normcheck.cases.case import Case
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.probes import Depth
from normcheck.gate.plan import Plan
from normcheck.result import HELD, NOT_TRIED, TOLD, WRONG, InContext
from normcheck.runner.session import session_of

_SHARE, _LEAST_SECONDS = 0.1, 0.3
"""Of the seconds that a cell has taken so far contexts may take this share, or so many seconds if that is more."""

_SMALL, _FILLING = (60, 20_000), {"cpu": (1 << 16, 1 << 18), "cuda": (1 << 20, 1 << 22)}
"""Elements of a small case, at least and at most, and of one that has work for several threads, or for all of a GPU."""


def failing_in_context(
    cell: Cell, plan: Plan, ran: Iterable[Case], used: float
) -> tuple[list[Result], dict[str, InContext]]:
    """The first case that is wrong in a context, in a list, or none; and how the cell did in each of the contexts.

    ``ran``: cases that are right in eager mode, one of a shape; ``used``: the seconds that the cell has taken so far.
    """
    end = time.perf_counter() + max(_LEAST_SECONDS, _SHARE * used)
    found: dict[str, InContext] = {}
    for case in chosen(ran, plan.device):
        for name in plan.contexts:
            if time.perf_counter() > end and not plan.asked:
                late = InContext(status=NOT_TRIED, why="there was no time left for it; --context tries it all the same")
                found.setdefault(name, late)
                continue
            result = run_case(cell, case, replace(plan, within=(name,)), depth=Depth.OFF)
            if result.failed:
                found.update(result.contexts)
                return [result], found
            for how in result.contexts.values():
                found[name] = _joined(found.get(name), how)
            if name == "graph" and found[name].why:  # what a capture that failed leaves behind ends with the process
                session_of(cell.implementation).restart()
    return [], found


def _joined(old: InContext | None, new: InContext) -> InContext:
    """How a cell did in a context, with one more case."""
    if old is None or _ORDER.index(new.status) > _ORDER.index(old.status):
        old, new = new, old or InContext(status=NOT_TRIED)
    return replace(old, cases=old.cases + new.cases)


_ORDER = (NOT_TRIED, HELD, TOLD, WRONG)


def chosen(ran: Iterable[Case], device: str) -> tuple[Case, ...]:
    """Of cases that have run a small ragged one, a small round one, and one that fills the device, with plain data.

    If there is none of a kind, the next best stands for it.
    """
    cases = sorted((case for case in ran if case.M and case.N), key=lambda case: (case.M * case.N, case.N))
    small, filling = _SMALL, _FILLING[device]
    kinds = (
        lambda case: (_outside(case, small), case.M < 2, case.N % 2 == 0, not case.bias),
        lambda case: (_outside(case, small), case.M < 2, case.N % 64 != 0, not case.bias),
        lambda case: (_outside(case, filling), not case.bias),
    )
    best = [min(cases, key=kind) for kind in kinds] if cases else []
    return tuple(dict.fromkeys(replace(case, rows="normal", dy="normal") for case in best))


def _outside(case: Case, elements: tuple[int, int]) -> float:
    """How far a case is from having so many elements, at least and at most: 0 if it has, else a factor."""
    least, most = elements
    return max(least / (case.M * case.N), case.M * case.N / most, 1.0) - 1.0
