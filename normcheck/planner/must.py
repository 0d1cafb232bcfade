"""What a pass needs if building is dear: a floor, which is never cut, and a tail, which is cut from its end; and what
time and cases there are for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from normcheck.cases.axes import MODEL_POWERS, SPECIAL, Value, octave_of
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.depth import Depth
from normcheck.cases.design import Design
from normcheck.cases.parameters import PARAMETERS
from normcheck.cases.planned import Planned, goals_of
from normcheck.planner.own import RUNS
from normcheck.planner.prices import Prices


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``core``: seconds for the runs of a core, without what they build.

    If building is dear, a cell has ``usual`` seconds of wall time, of which ``used`` were over before it began,
    ``telling`` for sizes that tell most, and up to ``most`` for what a pass needs: so many cases on so many shapes,
    ``least``. ``cases``: how many there are at most. ``at_once``: how many run at a key that was paid for before the
    next is.
    """

    usual: float
    telling: float
    most: float
    core: float
    least: tuple[int, int]
    cases: int
    at_once: int = 20
    used: float = 0.0


FACETS: Mapping[str, Callable[[int, int], bool]] = {
    "M above 64": lambda m, n: m > 64,
    "one row": lambda m, n: m == 1,
    "one column": lambda m, n: n == 1,
    "N of 1025 to 4096": lambda m, n: 1024 < n <= 4096,
    "N above 4096": lambda m, n: n > 4096,
    "N above 4096 and no multiple of 16": lambda m, n: n > 4096 and n % 16 > 0,
    "N a multiple of 16": lambda m, n: n % 16 == 0,
    "N no multiple of 16": lambda m, n: n % 16 > 0 and n > 1,
    "M a multiple of 128": lambda m, n: m > 0 and m % 128 == 0,
    "M above 65535": lambda m, n: m > 65535,
}
"""The sizes that tell most, by the branches that kernels have; a value of the axis "facet"."""

EMPTY: Value = ("m", 0)
"""The goal of a case without rows."""

KINDS = ("rows", "dy", "weights", "special", "clips", "residual", "scale", "gate", "angles")
"""The axes of data, which a case at any place may cover."""

_KEYS = (*PARAMETERS, "layout")
_FEW_EPS, _FEW_SHAPES = 2, 3


def weight(goal: Value) -> float:
    """How much a goal of the tail tells, beside others."""
    return {"facet": 3.0, "several": 3.0, "block": 0.1}.get(goal[0], 1.0)


def reached(planned: Planned) -> set[Any]:
    """What of a must-list a case reaches: facets if its values are judged."""
    case, goals = planned.case, set(goals_of(planned))
    if case.M > 1:
        goals.add(block_of(case.N))
    is_ordinary = case.M > 0 and case.rows not in SPECIAL and case.dy not in NOT_FINITE
    return goals | (facets_of(case.M, case.N) if is_ordinary else set())


@lru_cache(maxsize=4096)  # every size of a core, for each case that is planned
def facets_of(m: int, n: int) -> Set[Value]:
    """The facets of a size."""
    return frozenset(("facet", name) for name, has in FACETS.items() if has(m, n))


def block_of(columns: int) -> Value:
    """The block of a power of two that holds a row, as a goal: several rows of it meet a path of their own."""
    return ("block", octave_of(columns)[0])


class Must:
    """The must-list of one kernel, in the order in which it is cut from its end.

    ``floor``: every parameter, layout and kind of data, no rows, a probe of rows and two eps; what of it is not reached
    is missed, and the cell is thin. ``tail``: facets, several rows at each of MODEL_POWERS, the other eps, the
    classes of M and of N, several rows of every other block.
    """

    def __init__(self, design: Design, limits: Limits, prices: Prices, shapes: int) -> None:
        self._limits, self._prices, self._declared = limits, prices, shapes
        axes, sizes = design.axes, [size for size in design.candidates if size.M]
        keys = [(axis, value) for axis in _KEYS for value in axes.get(axis, ())]
        kinds = [(axis, value) for axis in KINDS for value in axes.get(axis, ())]
        eps = [("eps", value) for value in axes["eps"]]
        empty = [EMPTY] * (0 in axes["m"])
        rows = [("probe", Depth.ROWS)] * any(size.M > 1 for size in sizes)
        self.floor: tuple[Value, ...] = (*keys, *empty, *rows, *kinds, *eps[:_FEW_EPS])
        possible = set[Value]().union(*(facets_of(size.M, size.N) for size in sizes))
        facets = [facet for facet in (("facet", name) for name in FACETS) if facet in possible]
        classes = [("m", m) for m in axes["m"] if m] + [("n", key) for key in axes["n"]]
        blocks = sorted({block_of(size.N) for size in sizes if size.M > 1 < size.N} - set(map(block_of, MODEL_POWERS)))
        several = [("several", n) for n in MODEL_POWERS if n in axes["several"]]
        self.tail: tuple[Value, ...] = (*facets, *several, *eps[_FEW_EPS:], *classes, *blocks)

    def least(self) -> tuple[int, int]:
        """Cases and shapes that a pass needs: fewer if a key takes long, and no more than are declared."""
        cases, shapes = self._limits.least
        if _FEW_SHAPES * self._prices.dearest > self._limits.usual:
            shapes = _FEW_SHAPES
        return cases, min(shapes, self._declared or shapes)

    def price(self, goal: Value) -> float:
        """Seconds of what a goal builds, if all else of its case was built."""
        axis = self.priced_by(goal)
        value = {EMPTY: 0, ("probe", Depth.ROWS): 1}.get(goal, None if axis == "numbers" else goal[1])
        return self._prices.of(axis, value) if axis else 0.0

    def priced_by(self, goal: Value) -> str:
        """The axis whose price a goal has; "" if it builds nothing."""
        axis = goal[0]
        if axis in ("eps", "clips"):
            return "numbers"
        return axis if axis in _KEYS else "M" * (goal in (EMPTY, ("probe", Depth.ROWS)))

    def kept(self, out: Set[Any], shapes: int, cases: int) -> float:
        """Seconds to keep for what of the floor is not ``out``, and for the least shapes and cases."""
        least_cases, least_shapes = self.least()
        shape = min(self._prices.of("M"), self._prices.of("N"))
        keys = sum(self.price(goal) for goal in self.floor if goal not in out) + max(0, least_shapes - shapes) * shape
        return keys + max(0, least_cases - cases) * RUNS[Depth.MEMORY] * self._prices.own.call
