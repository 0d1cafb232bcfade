"""The short core: the cases of a cell in which the first call with anything new is dear, such as one that compiles.

What was paid for is used: many kinds of data, eps and dy run at one place before the next place is paid for. The next
place is the one that covers most for what its first call costs, as far as that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from normcheck.cases.axes import PAIRS, Pair, Value
from normcheck.cases.case import Place, place_of
from normcheck.cases.claims import Claims
from normcheck.cases.core import Design, Planned, Size, goals_of
from normcheck.cases.goals import Extent, Goals

ORDER = (
    (65, 129), (3, 1025), (300, 64), (1, 8200), (20, 1), (5, 24), (65537, 3), (33, 1024), (2, 4097), (300, 16),
    (2, 768), (3, 8192), (5, 1536),
)  # fmt: skip
"""M and N of the shapes that tell most, which come first: ragged and round, one row, one column, past a block, and past
65536 rows. A short core has others of the same classes if these are not in its cell's core."""

_SIZES = ("M", "N", "m", "n", "width", "fit", "shape")
_DEAR = frozenset((*_SIZES, "layout", "bias", "weight_dtype", "empty"))
"""The axes on which a compilation or a plan may depend."""

_WORTH = 8  # pairs that one value is worth
_LEAST_SECONDS = 1e-3
_RECENT = 2  # sizes of which other layouts, parameters and rows are considered


class Prices(Protocol):
    """What cases cost, in seconds, as measured so far."""

    @property
    def places(self) -> dict[Place, None]:
        """The places where cases have run, in their order."""

    def expected(self, planned: Planned) -> float:
        """What a case takes without its first calls."""

    def first_calls(self, planned: Planned) -> float:
        """What its first calls take; 0 if there are none, or not known."""


def required(goals: Goals, done: Set[Value | Pair]) -> set[Value | Pair]:
    """The ``goals`` that a short core must cover.

    Every value of every axis but sizes; and each pair with at most one axis on which a compilation depends, if the core
    came to its size.
    """
    return {goal for goal in goals if _is_required(goal, done)}


def _is_required(goal: Value | Pair, done: Set[Value | Pair]) -> bool:
    if len(goal) == 2:
        return goal == ("m", 0) or goal[0] not in (*_SIZES, "empty")
    number, *values = goal
    axes = PAIRS[number]
    if _DEAR.issuperset(axes) or "probe" in axes:
        return False
    return all((axis, value) in done for axis, value in zip(axes, values, strict=True) if axis in _SIZES)


class ShortCore:
    """The cases of a short core, one at a time, at what they cost by then.

    ``done``: goals that are covered, or given up; ``number``: of cases before; ``barred``: places that were refused.
    """

    def __init__(
        self,
        claims: Claims,
        extent: Extent,
        seed: int,
        *,
        model_size: int,
        done: Goals,
        number: int,
        prices: Prices,
        barred: Set[Place],
    ) -> None:
        self._claims, self._prices, self._barred = claims, prices, barred
        self._design = Design(claims, extent, seed, model_size, done, number)
        self._sizes = {(size.M, size.N): size for size in self._ordered()}
        self._heights: dict[int, int] = {}  # class of M -> the M of it that is run beside others
        for size in self._sizes.values():
            self._heights.setdefault(size.axes["m"], size.M)
        self._finished: set[Place] = set()

    def _ordered(self) -> Iterator[Size]:
        if not self._claims.shapes:
            allowed = {(size.M, size.N) for size in self._design.candidates}
            first = filter(None, (self._design.like(m, n) for m, n in ORDER))
            yield from (size for size in first if (size.M, size.N) in allowed)
        yield from self._design.candidates

    def next(self, seconds: float, reserved: float) -> Planned | None:
        """The next case; None if nothing is left that covers a goal within ``seconds``.

        ``reserved``: how many of them are for shapes that have to come yet.
        """
        self._design.number += 1
        planned = self._free() or self._paid(seconds, reserved)
        return planned and self._design.recorded(planned)

    def count(self, left: Set[Value | Pair]) -> int:
        """How many cases cover the goals that are ``left``, at least, however long they take. The core is over."""
        number = 0
        while left and (planned := self.next(math.inf, 0.0)) is not None:
            number += 1
            left = left - goals_of(planned)
        return number

    def _free(self) -> Planned | None:
        """A case at a place where a case has run, the latest place first."""
        for place in reversed(self._prices.places):
            m, n, *kind = place
            if not m or place in self._finished or (m, n) not in self._sizes:
                continue
            for planned in self._at(self._sizes[m, n], kind):
                if goals_of(planned) & self._design.left and self._claims.takes(planned.case):
                    return planned
            self._finished.add(place)
        return None

    def _at(self, size: Size, kind: Sequence[Any]) -> Iterator[Planned]:
        """Cases of this size and kind: one of ordinary values, then one for each special value that is left."""
        fixed = dict(zip(("bias", "weight_dtype", "layout"), kind, strict=True))
        yield self._cheaply(self._design.filled(size, fixed))
        for special in self._design.axes["special"]:
            of_dy = special.startswith("dy ")
            values = {"dy": special[3:], "rows": "shifted"} if of_dy else {"rows": special, "dy": "normal"}
            yield replace(self._design.filled(size, {**fixed, **values}), probe="memory")

    def _cheaply(self, planned: Planned) -> Planned:
        """The case without a probe that calls the kernel with one row, if that is a dear first call."""
        if planned.probe != "rows" or ("probe", "rows") in self._design.left:
            return planned
        dear = self._prices.first_calls(planned) > self._prices.expected(planned)
        return replace(planned, probe="memory") if dear else planned

    def _paid(self, seconds: float, reserved: float) -> Planned | None:
        """The case at a new place that covers most for its price: a new shape, or beside the latest ones, else any."""
        shapes = list(dict.fromkeys((m, n) for m, n, *_ in reversed(self._prices.places) if m))
        known = [shape for shape in shapes if shape in self._sizes]
        following = next((size for shape, size in self._sizes.items() if size.M and shape not in shapes), None)
        opening = [] if following is None else self._offers([self._at_new(following, {})])
        for near in (known[:_RECENT], known[_RECENT:]):
            beside = self._offers(planned for shape in near for planned in self._beside(self._sizes[shape], shapes))
            owed = self._owed(beside)
            best, most = None, 0.0
            for offer in (*opening, *beside):
                case = offer.planned.case
                opens = case.M > 0 and (case.M, case.N) not in shapes
                limit = seconds - (0.0 if opens and reserved else owed if opens else reserved)
                if offer.price <= limit and offer.worth > most:
                    best, most = offer.planned, offer.worth
            if best is not None:
                return best
        return None

    def _offers(self, cases: Iterable[Planned]) -> list[_Offer]:
        """The cases that cover a goal and were not refused, with what they cover and their prices."""
        offers = []
        for planned in cases:
            new = goals_of(planned) & self._design.left
            if new and place_of(planned.case) not in self._barred and self._claims.takes(planned.case):
                price = self._prices.first_calls(planned) + self._prices.expected(planned)
                worth = sum(_WORTH if len(goal) == 2 else 1 for goal in new) / max(price, _LEAST_SECONDS)
                offers.append(_Offer(planned, price, worth, new))
        return offers

    def _owed(self, offers: Sequence[_Offer]) -> float:
        """Seconds for the layouts, biases and dtypes of the weights that are left."""
        kinds = [goal for goal in self._design.left if len(goal) == 2 and goal[0] in ("layout", "bias", "weight_dtype")]
        return sum(min((o.price for o in offers if kind in o.new), default=0.0) for kind in kinds)

    def _beside(self, size: Size, shapes: Sequence[tuple[int, int]]) -> Iterator[Planned]:
        """Cases that have one thing new beside a case of this size: layout, parameters, M, or no rows."""
        own = [kind for m, n, *kind in self._prices.places if (m, n) == (size.M, size.N)]
        parameters = list(dict.fromkeys((bias, weight_dtype) for bias, weight_dtype, _ in own))
        bias, weight_dtype = parameters[0]
        fixed = {"bias": bias, "weight_dtype": weight_dtype}
        for layout in self._claims.values("layout"):
            if [bias, weight_dtype, layout] not in own:
                yield self._cheaply(self._design.filled(size, {**fixed, "layout": layout}))
        for pair in product(self._claims.values("bias"), self._claims.values("weight_dtype")):
            if pair not in parameters:
                yield self._at_new(size, dict(zip(fixed, pair, strict=True)))
        for (m, n), other in self._sizes.items():
            if m and n == size.N and (m, n) not in shapes and other.axes["M"] == self._heights[other.axes["m"]]:
                yield self._at_new(other, fixed)
        if (0, size.N) in self._sizes:
            yield self._design.filled(self._sizes[0, size.N], {})

    def _at_new(self, size: Size, fixed: Mapping[str, Any]) -> Planned:
        """A case of this size, packed: so a first call tells what a new size or new parameters cost."""
        layout = self._claims.values("layout")[0]
        return self._cheaply(self._design.filled(size, {**fixed, "layout": layout}))


@dataclass(frozen=True)
class _Offer:
    """A case at a new place, its price in seconds, and what it is worth a second; ``new``: the goals that it covers."""

    planned: Planned
    price: float
    worth: float
    new: Set[Value | Pair]
