"""The core of a cell: the cases that a cell must have run to pass, drawn by a covering design.

Another seed of the run gives other sizes of the same classes, other combinations and other data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count

from normcheck.cases.claims import Claims
from normcheck.cases.design import Design
from normcheck.cases.goals import Goals, goals
from normcheck.cases.opening import BATCHES, LONG_ROWS, opening
from normcheck.cases.planned import Planned
from normcheck.cases.sizes import Extent


def core(claims: Claims, extent: Extent, seed: int, *, done: Goals = frozenset(), used: int = 0) -> tuple[Planned, ...]:
    """The cases that cover every goal but those that are ``done``; the ones that find the most faults come first.

    ``seed``: of the run; ``used``: how many of the cases that open a core to leave out. From ALL_OPENED on it leaves
    out all, and each number gives other cases.
    """
    return tuple(drawn(claims, extent, seed, done=done, used=used))


def drawn(claims: Claims, extent: Extent, seed: int, *, done: Goals = frozenset(), used: int = 0) -> Iterable[Planned]:
    """The cases of ``core``, each made when it is iterated over: a faulty kernel needs the first few only."""
    return _drawn(claims, extent, seed, done, used)


@lru_cache(maxsize=8)  # one that is still being made holds megabytes
def _drawn(claims: Claims, extent: Extent, seed: int, done: Goals, used: int) -> Iterable[Planned]:
    return _Cached(Design(claims, extent, seed, done, used).cases())


def at_most(claims: Claims, extent: Extent, seed: int) -> int:
    """So many cases, none of which need be made, a core has at most: each covers a goal, but for those that open it."""
    return len(goals(claims, extent, seed)) + len(tuple(opening(claims))) + len((LONG_ROWS, *BATCHES))


class _Cached:
    """An iterable of cases that makes each one once and keeps it for the next iteration."""

    def __init__(self, cases: Iterator[Planned]) -> None:
        self._made: list[Planned] = []
        self._rest = cases

    def __iter__(self) -> Iterator[Planned]:
        for number in count():
            if number == len(self._made):
                case = next(self._rest, None)
                if case is None:
                    return
                self._made.append(case)
            yield self._made[number]
