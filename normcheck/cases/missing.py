"""The goals of a core that no case covers yet, with an index by the values that must meet: a design asks a hundred
thousand times how many of them a value would cover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from normcheck.cases.axes import PAIRS

Option = TypeVar("Option")
"""What a design may choose for an axis: a value of it, or a mixture of several."""

_OF_VALUE = 4
"""How many pairs a value is worth that no case has."""

_AS_FIRST: Mapping[str, Sequence[tuple[int, str]]] = {
    axis: [(i, other) for i, (one, other) in enumerate(PAIRS) if one == axis] for pair in PAIRS for axis in pair
}
_AS_SECOND: Mapping[str, Sequence[tuple[int, str]]] = {
    axis: [(i, one) for i, (one, other) in enumerate(PAIRS) if other == axis] for pair in PAIRS for axis in pair
}
"""Axis -> the pairs that have it as first or second axis, by index, and the other axis of each."""


class Missing:
    """The ``goals`` that are left, which only ``covered`` changes."""

    def __init__(self, goals: set[Any]) -> None:
        self.goals = goals
        self._in_order: Sequence[Any] = ()
        self._firsts: dict[tuple[int, Any], set[Any]] = {}  # a pair of axes, a second value -> the first values left
        self._seconds: dict[tuple[int, Any], set[Any]] = {}
        for goal in goals:
            if len(goal) == 3:
                number, one, other = goal
                self._firsts.setdefault((number, other), set()).add(one)
                self._seconds.setdefault((number, one), set()).add(other)

    def covered(self, goals: Set[Any]) -> None:
        """Take these goals, which were left, for covered."""
        self.goals -= goals
        for goal in goals:
            if len(goal) == 3:
                number, one, other = goal
                self._firsts[number, other].discard(one)
                self._seconds[number, one].discard(other)

    def in_order(self) -> Sequence[Any]:
        """The goals, in the order of their text."""
        goals = self.goals
        self._in_order = [goal for goal in self._in_order or sorted(goals, key=repr) if goal in goals]
        return self._in_order

    def best(
        self,
        axis: str,
        options: Sequence[Option],
        chosen: Mapping[str, tuple[Any, ...]],
        values: Callable[[Option], tuple[Any, ...]],
    ) -> Option:
        """The first of these options for an axis that covers most with what is ``chosen`` for others: axis -> values.

        ``values``: the values of the axis that an option covers.
        """
        goals = self.goals
        left = [
            own
            for by_other, pairs in ((self._firsts, _AS_FIRST), (self._seconds, _AS_SECOND))
            for number, other in pairs.get(axis, ())
            if other in chosen
            for value in chosen[other]
            if (own := by_other.get((number, value)))
        ]
        best, most = options[0], -1
        for option in options:
            gain = 0
            for value in values(option):
                if (axis, value) in goals:
                    gain += _OF_VALUE
                for own in left:
                    if value in own:
                        gain += 1
            if gain > most:
                best, most = option, gain
        return best
