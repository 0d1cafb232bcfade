"""The goals of a core that no case covers yet, and what a value or a size would cover of them. A design asks it a
hundred thousand times: there is an index by the values that must meet, and arrays of what each size is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from normcheck.cases.axes import PAIRS, Value
from normcheck.cases.planned import Size

Option = TypeVar("Option")
"""What a design may choose for an axis: a value of it, or a mixture of several."""

_OF_VALUE, _OF_VALUE_OF_SIZE, _OF_SIZE, _MOST = 4, 8, 16, 10
"""How many pairs a value is worth that no case has: of what is chosen at a size, and of a size. A new size: what is
wrong for one class of sizes shows in no other. What is left of one value counts up to the last."""

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


_OF_ROWS, _OF_COLUMNS = ("M", "m", "band"), ("N", "n", "width", "fit", "whole", "octave")
"""The axes that M decides, and those that N decides."""


class Worth:
    """What the goals that are ``left`` make each of these ``sizes``, of one row or more, worth."""

    def __init__(self, sizes: Sequence[Size], left: Set[Any]) -> None:
        self._sizes = sizes
        self._costs, self._rows = np.array([s.cost for s in sizes]), np.array([s.M for s in sizes])
        self._numbers: dict[Value, int] = {}  # of each value of these sizes
        self._of_m = _Alike(sizes, "M", _OF_ROWS, self._numbers)
        self._of_n = _Alike(sizes, "N", _OF_COLUMNS, self._numbers)
        self._left, self._kinds = np.zeros(len(self._numbers), np.int64), Counter[Any]()  # kinds of rows for a value
        self._weigh(left, 1)
        self._at: dict[Any, list[int]] = {}  # goal -> which of these sizes cover it, whatever else a case has
        for index, size in enumerate(sizes):
            for goal in left & set(size.together):
                self._at.setdefault(goal, []).append(index)
        self._together = np.zeros(len(sizes))  # what a size is worth for these goals
        for indices in self._at.values():
            self._together[indices] += _OF_SIZE

    def covered(self, goals: Set[Any]) -> None:
        """Take these goals, which were left, for covered."""
        self._weigh(goals, -1)
        for goal in goals & self._at.keys():
            self._together[self._at[goal]] -= _OF_SIZE

    def _weigh(self, goals: Iterable[Any], sign: int) -> None:
        """Count what these goals add to what is left of each value: a pair counts 1 for each of its two."""
        added = Counter[Any]()
        for goal in goals:
            if len(goal) == 2:
                added[goal] += _OF_VALUE_OF_SIZE
                continue
            one, other = PAIRS[goal[0]]
            if other == "rows":
                self._kinds[one, goal[1]] += sign
            else:
                added[one, goal[1]] += 1
                added[other, goal[2]] += 1
        for value in added.keys() & self._numbers.keys():
            self._left[self._numbers[value]] += added[value] * sign

    def best(self) -> Size | None:
        """The size at which a case covers most for its cost; None if there is no size."""
        if not self._sizes:
            return None
        fewest: Counter[str] = Counter()  # axis -> how many kinds of rows its least finished value lacks
        for (axis, _), number in self._kinds.items():
            fewest[axis] = max(fewest[axis], number)
        lacks = [number for axis, number in fewest.items() if axis != "n"]
        rows = self._of_m.left(self._left) + np.minimum.outer(self._of_m.sizes, lacks).sum(axis=1)
        columns = self._of_n.left(self._left)
        kinds = np.array([self._kinds[key] for key in self._of_n.keys["n"]])
        gains = self._together + np.minimum(self._rows, kinds[self._of_n.number_of])
        gains += rows[self._of_m.number_of] + columns[self._of_n.number_of]
        return self._sizes[int(np.argmax(gains / self._costs))]


class _Alike:
    """Sizes that have one M, or one N, taken together. ``sizes``: these M or N; ``number_of``: the one of each size;
    ``keys``: each axis with the values that they have of it.
    """

    def __init__(self, sizes: Sequence[Size], axis: str, axes: Sequence[str], places: dict[Value, int]) -> None:
        last = {size.axes[axis]: size for size in sizes}
        numbers = {value: number for number, value in enumerate(last)}
        self.sizes = np.array(list(last))
        self.number_of = np.array([numbers[size.axes[axis]] for size in sizes], np.intp)
        self.keys = {of: [(of, size.axes[of]) for size in last.values()] for of in axes}
        numbered = [[places.setdefault(key, len(places)) for key in self.keys[of]] for of in axes]
        self._places = np.array(numbered, np.intp).reshape(len(axes), -1)

    def left(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """What is left of the values of each, of what is left of every value."""
        total: NDArray[np.int64] = np.minimum(left[self._places], _MOST).sum(axis=0)
        return total
