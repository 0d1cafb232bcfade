"""What a short core must cover: every kind of data, and those sizes that it can have at what they cost here."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from normcheck.cases.axes import Pair, Value, row_class
from normcheck.cases.goals import Goals, Sizes
from normcheck.cases.short_core import required
from normcheck.gate.costs import Costs

_CHEAP_CALLS = 10  # a first call with other rows that takes no more calls is cheap: all classes of M are asked for
_SIZE_SHARE = 0.1  # of the time of the core: a size for the sake of its class may take so much
_PAST_A_GRID = frozenset({("m", row_class(65536))})


class Owed:
    """The goals that a short core must cover, at what ``costs`` has measured; found anew when that has changed."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: tuple[Any, set[Value | Pair]] = (None, set())

    @property
    def so_far(self) -> set[Value | Pair]:
        """What ``of`` has found last."""
        return self._known[1]

    def of(self, wanted: Goals, sizes: Sizes, elements: int, wall: float, done: Set[Value | Pair]) -> set[Value | Pair]:
        """Those of the goals ``wanted`` that it must cover, ``done`` or not, if it may take ``wall`` seconds.

        Classes of M and of N as well, if they cost little more than a repeated call, and more rows than a side of a
        grid has programs; an M only at an N that has run, if a new N is very dear. ``sizes``, ``elements``: of the
        core, which has no more of them in a case.
        """
        cheap = {axis for axis, news in (("m", "rows"), ("n", "N")) if self._is_cheap(news)}
        affordable = {news for news in ("rows", "N") if self._costs.first_call(news) <= _SIZE_SHARE * wall}
        key = wanted, len(self._costs.shapes), *sorted(cheap), *sorted(affordable)
        if self._known[0] != key:
            needed = required(wanted, done, cheap) | (wanted & _PAST_A_GRID if len(affordable) > 1 else set())
            widths = {n for own in sizes.widths.values() for n in own} if "N" in affordable else self._costs.widths
            self._known = key, {goal for goal in needed if _is_reached(goal, sizes, elements, widths)}
        return self._known[1]

    def _is_cheap(self, news: str) -> bool:
        return self._costs.first_call(news) <= _CHEAP_CALLS * self._costs.call


def _is_reached(goal: Value | Pair, sizes: Sizes, elements: int, widths: Set[int]) -> bool:
    """Whether a goal is no class of M, or one that the core has at one of these N."""
    if len(goal) == 3 or goal[0] != "m" or not goal[1]:
        return True
    if sizes.shapes:
        return any(row_class(m) == goal[1] and n in widths for m, n in sizes.shapes)
    return any(min(sizes.heights[goal[1]]) * n <= elements for n in widths)
