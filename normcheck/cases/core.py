"""The core of a cell: the cases that a cell must have run to pass, drawn by a covering design.

Another seed of the run gives other sizes of the same classes, other combinations and other data.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import lru_cache
from itertools import tee

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


def drawn(claims: Claims, extent: Extent, seed: int, *, done: Goals = frozenset(), used: int = 0) -> Iterator[Planned]:
    """The cases of ``core``, each made when it is first asked for: a faulty kernel needs the first few only.

    A copy of it (``copy.copy``) goes on from the same case, and none is made twice.
    """
    return copy(_drawn(claims, extent, seed, done, used))


@lru_cache(maxsize=8)  # one that is still being made holds megabytes
def _drawn(claims: Claims, extent: Extent, seed: int, done: Goals, used: int) -> Iterator[Planned]:
    (cases,) = tee(Design(claims, extent, seed, done, used).cases(), 1)  # its copies share what was made
    return cases


def at_most(claims: Claims, extent: Extent, seed: int) -> int:
    """So many cases, none of which need be made, a core has at most: each covers a goal, but for those that open it."""
    return len(goals(claims, extent, seed)) + len(tuple(opening(claims))) + len((LONG_ROWS, *BATCHES))
