"""A case of a core with the depth of its probes, what it covers, and its sizes and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from normcheck.cases.axes import Pair, Value, covered, pairs_of, parts_of, values_of
from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import HEADS, LAYOUTS, ROWS_APART, STRIDED

GAPS = (3, 8, 1, 64)
"""The gaps of a core's strided tensors, in elements; 8 keeps rows of 16-bit elements aligned to 16 bytes, and 64 stands
for 2 N if that is more, as of a chunk of a projection to three.
"""

HEAD_GAPS = (0, 0, 8, 0, 0, 64)
"""The gaps behind heads. Elsewhere heads lie side by side, or so that each begins at an aligned address."""


@dataclass(frozen=True)
class Planned:
    """A case of a core; ``probe``: how far it is probed.

    ``opens``: the number of the case among those that open a core, from 1; 0 for a case that comes after them.
    """

    case: Case
    probe: Depth
    opens: int = 0


def goals_of(planned: Planned) -> Set[Value | Pair]:
    """The values and pairs that a planned case covers."""
    return _goals_of(planned.case, planned.probe)


def covers(planned: Planned, goal: Value | Pair) -> bool:
    """Whether ``goal`` is one of ``goals_of(planned)``, which are not made for this one."""
    axes = covered(planned.case, planned.probe)
    return all(value in axes.get(axis, ()) for axis, value in parts_of(goal))


@lru_cache(maxsize=512)  # a whole core, as a planner asks again and again what the rest of it covers
def _goals_of(case: Case, probe: Depth) -> Set[Value | Pair]:
    axes = covered(case, probe)
    return frozenset([*values_of(axes), *pairs_of(axes)])


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that a core may have. ``axes``: axis -> the value that this size has of it. ``cost``: in rows.

    ``together``: the goals that its M and its N cover together.
    """

    M: int
    N: int
    axes: Mapping[str, Any]
    cost: float
    together: tuple[Any, ...]


def gap_of(n: int, layout: str, number: int) -> int:
    """The gap of this ``number`` among those of cases of an N and a layout."""
    if layout == HEADS:
        return HEAD_GAPS[number % len(HEAD_GAPS)]
    gap = GAPS[number % len(GAPS)] if layout in STRIDED else 0
    return max(gap, 2 * n) if gap == GAPS[-1] and layout in ROWS_APART else gap


def gap_at(n: int, layout: str) -> int:
    """The gap where a kernel may be compiled for its divisibility: the same in all cases of this N and layout."""
    return gap_of(n, layout, n // 8 if layout == HEADS else n + LAYOUTS.index(layout))
