"""The short core: the cases of a cell in which the first call with anything new is dear, such as one that compiles.

What was paid for is used: many kinds of data, eps and dy run at one place before the next place is paid for. The next
place is the one that covers most for what its first call costs, as far as that was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from normcheck.cases.axes import ORDINARY, PAIRS, Pair, Value
from normcheck.cases.case import PARAMETERS, Parameters, Place, parameters_of, place_of
from normcheck.cases.claims import Claims
from normcheck.cases.core import Design, Planned, Size, goals_of
from normcheck.cases.goals import Goals

ORDER = (
    (300, 768), (65, 1025), (20, 1), (1, 8200), (65537, 3), (65, 64), (5, 24), (33, 1024), (2, 4097), (300, 16),
    (65, 129), (3, 8192), (5, 1536),
)  # fmt: skip
"""M and N of the shapes that tell most, which come first: ragged and round, many rows, one column, one row, past a
block, and past 65536 rows. A short core has others of the same classes if these are not in its cell's core."""

_SIZES = ("M", "N", "m", "n", "width", "fit", "whole", "band", "octave", "several", "shape")
_CLASSES = ("m", "n", "width", "fit")
_DEAR = frozenset((*_SIZES, "layout", *PARAMETERS, "empty"))
"""The axes on which a compilation or a plan may depend."""

_WORTH = dict.fromkeys(("N", *_CLASSES), 100)
_OTHER_WORTH = 8
"""How many pairs a value of an axis is worth: a class of sizes tells more than one more combination of data."""

_TALL_ROWS, _TALL_WORTH = 64, 200
"""A class of so many rows is worth more: what is wrong from some row on shows in none of fewer."""

_EMPTY = ("m", 0)
"""The goal of a case without rows."""

CASES_OF_A_SHAPE = 20
"""At a place before the next one is paid for, as long as shapes are missing."""

_LEAST_WORTH = 1e-9
_LEAST_SECONDS = 1e-3
_KIND = (*PARAMETERS, "layout")
_LAYOUT = ("layout",)
_BROAD = len(ORDINARY)  # from so many rows on one case has all kinds of them
_TRIED = 3  # sizes, one after the other
_RECENT = 2  # sizes of which other layouts, parameters and rows are considered


class Prices(Protocol):
    """What cases cost, in seconds, as measured so far."""

    @property
    def places(self) -> dict[Place, None]:
        """The places where cases have run, in their order."""

    def expected(self, planned: Planned) -> float:
        """What a case takes without its first calls."""

    def first_calls(self, planned: Planned) -> tuple[float, float]:
        """What its first calls are likely to take, and at most; 0 if there are none, or not known."""

    def untried(self, planned: Planned) -> float:
        """What a trial of it is worth, if nothing like it has run; else infinite."""

    def kept(self, owed: Mapping[str, int]) -> float:
        """What to keep for so many cases with a layout that is new ("layout"), and without rows ("empty")."""


def required(goals: Goals, done: Set[Value | Pair], cheap: Set[str] = frozenset()) -> set[Value | Pair]:
    """The ``goals`` that a short core must cover.

    Every value of every axis but sizes, and of the ``cheap`` axes; and each pair with at most one axis on which a
    compilation depends, if the core came to its size.
    """
    return {goal for goal in goals if _is_required(goal, done, cheap)}


def _is_required(goal: Value | Pair, done: Set[Value | Pair], cheap: Set[str]) -> bool:
    if len(goal) == 2:
        return goal == _EMPTY or goal[0] in cheap or goal[0] not in (*_SIZES, "empty")
    number, *values = goal
    axes = PAIRS[number]
    if _DEAR.issuperset(axes) or "probe" in axes:
        return False
    return all((axis, value) in done for axis, value in zip(axes, values, strict=True) if axis in _SIZES)


class ShortCore:
    """The cases of a short core, one at a time, at what they cost by then.

    ``design``: a steady one, with the goals that are left; ``barred``: places that were refused; ``at_a_shape``: how
    many cases run at a place before the next one is paid for, as long as shapes are missing.
    """

    def __init__(
        self, claims: Claims, design: Design, prices: Prices, barred: Set[Place], at_a_shape: int = CASES_OF_A_SHAPE
    ) -> None:
        self._at_a_shape = at_a_shape
        self._claims, self._design, self._prices, self._barred = claims, design, prices, barred
        self._sizes = {(size.M, size.N): size for size in self._ordered()}
        self._heights: dict[int, int] = {}  # class of M -> the M of it that is run beside others
        for size in self._sizes.values():
            self._heights.setdefault(size.axes["m"], size.M)
        self._most: dict[Place, float] = {}  # what a case at a place is worth at most
        self._taken: dict[tuple[int, int], Planned] = {}  # shapes that another process compiles
        self._compiled: dict[tuple[int, int], Planned] = {}  # and those that it has compiled
        self._hopeless: set[Value | Pair] = set()  # owed pairs that no case covered
        self._since_paid = 0  # cases since the latest one at a new place
        self._asked = math.inf  # what the latest case at a new place was worth

    def _ordered(self) -> Iterator[Size]:
        if self._claims.shapes:
            yield from _spread(self._design.candidates)
        else:
            allowed = {(size.M, size.N): size for size in self._design.candidates}
            for m, n in ORDER:
                size = self._design.like(m, n)
                if size is not None:  # of a class of N that is too long for its M, one with fewer rows
                    alike = (s for s in allowed.values() if s.axes["n"] == size.axes["n"] and s.M > 1)
                    yield from [size] if (size.M, size.N) in allowed else islice(alike, 1)
        yield from sorted(self._design.candidates, key=lambda size: size.M == 1)  # which may be a path of its own

    def next(self, seconds: float, shapes: float, cases: float) -> Planned | None:
        """The next case; None if nothing is left that covers a goal within ``seconds``.

        ``shapes``, ``cases``: how many of them the shapes and the cases take that have to come yet.
        """
        self._design.number += 1
        self._since_paid += 1
        few = not shapes or self._since_paid <= self._at_a_shape
        offer = self._free(self._asked) if few else None
        if offer is None:
            paid = self._paid(seconds - cases, shapes)
            self._asked = paid.worth if paid is not None else 0.0
            offer = (self._free(self._asked) if few or paid is None else None) or paid
            self._since_paid *= offer is not paid
        return self._design.recorded(offer.planned) if offer is not None and offer.price <= seconds else None

    def more(self, seconds: float) -> Planned | None:
        """One more case at a place where a case has run; None if none that covers a goal takes so few ``seconds``."""
        self._design.number += 1
        offer = self._free(0.0)
        return self._design.recorded(offer.planned) if offer is not None and offer.price <= seconds else None

    def kept(self, owed: Set[Value | Pair]) -> float:
        """Seconds to keep for layouts and a case without rows, if they are ``owed``: others do not tell their price."""
        number = Counter("empty" if goal == _EMPTY else goal[0] for goal in owed)
        return self._prices.kept({news: number[news] for news in ("layout", "empty") if number[news]})

    def last(self, seconds: float, owed: Set[Value | Pair]) -> Planned | None:
        """The next case for what is ``owed``, some of the goals ``required``; None if none within ``seconds`` is."""
        self._design.number += 1
        beside: list[_Offer] | None = None
        for goal in sorted(owed - self._hopeless, key=_values_first):
            if len(goal) == 3 or goal[0] not in _DEAR:
                offers = self._offers(self._covering(goal))
            else:
                if beside is None:
                    beside = self._offers(planned for size in self._known() for planned in self._beside(size))
                sizes = (size for size in self._sizes.values() if size.axes.get(goal[0]) == goal[1])
                opening = (planned for size in islice(sizes, _TRIED) for planned in self._opening(size))
                offers = beside + self._offers(opening)
            offers = [offer for offer in offers if goal in offer.new]
            within = [offer for offer in offers if offer.price <= seconds]
            within = within or [offer for offer in offers if self._prices.untried(offer.planned) <= seconds]
            if within:
                return self._design.recorded(max(within, key=lambda offer: offer.worth).planned)
            if len(goal) == 3:
                self._hopeless.add(goal)
        return None

    def _covering(self, goal: Value | Pair) -> Iterator[Planned]:
        """Cases at known places that may cover a goal of their kinds of data."""
        wanted = dict([goal] if len(goal) == 2 else zip(PAIRS[goal[0]], goal[1:], strict=True))
        for place in reversed(self._prices.places):
            m, n, *kind = place
            if not m or (m, n) not in self._sizes:
                continue
            size, fixed = self._sizes[m, n], dict(zip(_KIND, kind, strict=True))
            special = wanted.get("special")
            values = _special(special) if special else {}
            if all({**size.axes, **fixed}.get(axis, value) == value for axis, value in wanted.items()):
                chosen = {axis: value for axis, value in wanted.items() if axis not in (*size.axes, "special")}
                yield self._cheaply(self._design.filled(size, {**fixed, **chosen, **values}))

    def ahead(self) -> Planned | None:
        """The case at a new shape for another process to run first; this core puts it off until it is ``compiled``."""
        known = {(size.M, size.N) for size in self._known()} | self._taken.keys() | self._compiled.keys()
        size = next((size for shape, size in self._sizes.items() if size.M and shape not in known), None)
        if size is None:
            return None
        planned = self._at_new(size, {})
        self._taken[size.M, size.N] = planned
        return planned

    def compiled(self, planned: Planned, *, well: bool) -> None:
        """Another process has run this case; ``well``: without an error."""
        shape = planned.case.M, planned.case.N
        if self._taken.pop(shape, None) is not None and well:
            self._compiled[shape] = planned

    def alone(self) -> None:
        """No other process runs cases first any more."""
        self._taken.clear()
        self._compiled.clear()

    def count(self, owed: Set[Value | Pair]) -> int:
        """How many more cases cover what is ``owed``, however long they take. The core is over."""
        number = 0
        while owed and (planned := self.last(math.inf, owed)) is not None:
            number += 1
            owed = owed - goals_of(planned)
        return number

    def _free(self, least: float) -> _Offer | None:
        """A case at a place where a case has run, the latest place first, that is worth at least so much."""
        for place in reversed(self._prices.places):
            m, n, *kind = place
            if not m or (m, n) not in self._sizes or self._most.get(place, math.inf) < max(least, _LEAST_WORTH):
                continue
            best = max(self._offers(self._at(self._sizes[m, n], kind)), key=lambda o: o.worth, default=None)
            self._most[place] = best.worth if best is not None else 0.0
            if best is not None and best.worth >= least:
                return best
        return None

    def _at(self, size: Size, kind: Sequence[Any]) -> Iterator[Planned]:
        """Cases of this size and kind: one of ordinary values, then one for each special value that is left."""
        fixed = dict(zip(_KIND, kind, strict=True))
        yield self._cheaply(self._design.filled(size, fixed))
        for special in self._design.axes["special"]:
            if not self._design.lacks(size, special):
                continue
            yield replace(self._design.filled(size, {**fixed, **_special(special)}), probe="memory")

    def _cheaply(self, planned: Planned) -> Planned:
        """The case without a probe that calls the kernel with one row, if that may be a dear first call."""
        if planned.probe != "rows" or ("probe", "rows") in self._design.left:
            return planned
        dear = self._prices.first_calls(planned)[1] > self._prices.expected(planned)
        return replace(planned, probe="memory") if dear else planned

    def _paid(self, seconds: float, missing: float) -> _Offer | None:
        """The case at a new place that covers most for its price: a new shape, or beside the latest ones, else any."""
        known = self._known()
        shapes = {(size.M, size.N) for size in known}
        new = [size for shape, size in self._sizes.items() if size.M and shape not in shapes]
        free = [size for size in new if (size.M, size.N) not in self._taken] or new
        openings = map(self._opened, free[:_TRIED])
        opening = next((o for o in openings if min(map(self._needed, o), default=math.inf) <= seconds), [])
        opening += self._offers(self._as_compiled(size) for size in new if (size.M, size.N) in self._compiled)
        spare, most_spare = None, 0.0
        for near in (known[:_RECENT], known[_RECENT:]):
            beside = self._offers(planned for size in near for planned in self._beside(size))
            best, most = None, 0.0
            for offer in (*opening, *beside):
                case = offer.planned.case
                opens = case.M > 0 and (case.M, case.N) not in shapes
                if not missing:
                    kept = self._owed(beside, offer, _KIND)
                elif opens:  # parameters cost as much as a shape does: while shapes are missing, these come first
                    kept = min(self._owed(beside, offer, _LAYOUT), offer.price)
                else:
                    kept = missing
                needed = self._needed(offer) if opens else offer.price
                if needed + kept <= seconds and offer.worth > most:
                    best, most = offer, offer.worth
                owed = opens if missing else any(goal[0] in _KIND for goal in offer.new if len(goal) == 2)
                if owed and needed <= seconds and offer.worth > most_spare:
                    spare, most_spare = offer, offer.worth
            if best is not None:
                return best
        return spare

    def _opened(self, size: Size) -> list[_Offer]:
        return self._offers(self._opening(size))

    def _needed(self, offer: _Offer) -> float:
        """Seconds for a case that opens a shape, and for those that follow it there."""
        return offer.price + self._at_a_shape * self._prices.expected(offer.planned)

    def _known(self) -> list[Size]:
        """The sizes of the cases that have run, the latest ones first."""
        shapes = dict.fromkeys((m, n) for m, n, *_ in reversed(self._prices.places) if m)
        return [self._sizes[shape] for shape in shapes if shape in self._sizes]

    def _opening(self, size: Size) -> Iterator[Planned]:
        """Cases of a new size: with whatever parameters cover most, and with those of the latest case."""
        yield self._at_new(size, {})
        _, _, *parameters, _ = next(reversed(self._prices.places))
        yield self._at_new(size, dict(zip(PARAMETERS, parameters, strict=True)))

    def _offers(self, cases: Iterable[Planned]) -> list[_Offer]:
        """The cases that cover a goal and were not refused, with what they cover and their prices."""
        offers = []
        for planned in cases:
            new = goals_of(planned) & self._design.left
            if new and place_of(planned.case) not in self._barred and self._claims.takes(planned.case):
                likely, most = self._prices.first_calls(planned)
                expected = self._prices.expected(planned)
                worth = sum(map(_worth, new))
                offers.append(_Offer(planned, most + expected, worth / max(likely + expected, _LEAST_SECONDS), new))
        return offers

    def _owed(self, offers: Sequence[_Offer], chosen: _Offer, axes: Sequence[str]) -> float:
        """Seconds for the values of these axes, and for the case without rows, that are left after ``chosen``."""
        left = self._design.left - chosen.new
        kinds = [goal for goal in left if len(goal) == 2 and (goal[0] in axes or goal == _EMPTY)]
        return sum(min((o.price for o in offers if kind in o.new), default=0.0) for kind in kinds)

    def _beside(self, size: Size) -> Iterator[Planned]:
        """Cases that have one thing new beside a case of this size: layout, parameters, M, or no rows."""
        shapes = {(m, n) for m, n, *_ in self._prices.places}
        own = [place[2:] for place in self._prices.places if place[:2] == (size.M, size.N)]
        parameters: list[Parameters] = list(dict.fromkeys(Parameters(*kind[:-1]) for kind in own))
        fixed = dict(zip(PARAMETERS, parameters[0], strict=True))
        broad = max((m for m, *_ in self._prices.places if m <= _BROAD), default=0)
        for layout in self._claims.values("layout") if broad <= size.M else ():
            if (*parameters[0], layout) not in own and self._claims.fits(layout, size.N):
                yield self._cheaply(self._design.filled(size, {**fixed, "layout": layout}))
        for another in self._claims.parameters:
            if another not in parameters:
                yield self._at_new(size, dict(zip(PARAMETERS, another, strict=True)))
        for (m, n), other in self._sizes.items():
            if m and n == size.N and (m, n) not in shapes and other.axes["M"] == self._heights[other.axes["m"]]:
                yield self._at_new(other, fixed)
        if (0, size.N) in self._sizes:
            yield self._design.filled(self._sizes[0, size.N], fixed)

    def _as_compiled(self, size: Size) -> Planned:
        """A case of this size with the parameters of the one that another process has run."""
        parameters = parameters_of(self._compiled[size.M, size.N].case)
        return self._at_new(size, dict(zip(PARAMETERS, parameters, strict=True)))

    def _at_new(self, size: Size, fixed: Mapping[str, Any]) -> Planned:
        """A case of this size, packed, and no row alone: so its time tells what a new size or new parameters cost."""
        return self._design.filled(size, {**fixed, "layout": self._claims.values("layout")[0], "probe": "memory"})


@dataclass(frozen=True)
class _Offer:
    """A case, its price in seconds at most, and what it is worth a second; ``new``: the goals that it covers."""

    planned: Planned
    price: float
    worth: float
    new: Set[Value | Pair]


def _spread(sizes: Iterable[Size]) -> Iterator[Size]:
    """Sizes each of which adds most classes to those before it, until there are no more."""
    left, seen = list(sizes), set[Value]()

    def added(size: Size) -> list[Value]:
        return [(axis, size.axes[axis]) for axis in _CLASSES if (axis, size.axes[axis]) not in seen]

    while best := max(left, key=lambda size: sum(map(_worth, added(size))), default=None):
        if not added(best):
            return
        seen.update(added(best))
        left.remove(best)
        yield best


def _values_first(goal: Value | Pair) -> tuple[int, str]:
    """The order in which goals are owed: a cell is thin without a value, and not without a pair."""
    return len(goal), repr(goal)


def _worth(goal: Value | Pair) -> int:
    if len(goal) == 3:
        return 1
    axis, value = goal
    return _TALL_WORTH if axis == "m" and value >= _TALL_ROWS else _WORTH.get(axis, _OTHER_WORTH)


def _special(value: str) -> dict[str, str]:
    """The kinds of rows and dy of a case with this value of the axis "special"."""
    if value.startswith("dy "):
        return {"dy": value.removeprefix("dy "), "rows": "shifted"}
    return {"rows": value, "dy": "normal"}
