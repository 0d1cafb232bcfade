"""The order of cases if building is dear: what a pass needs first, then whatever covers most for its price."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from normcheck.cases.axes import ORDINARY
from normcheck.cases.case import Case
from normcheck.cases.claims import Claims
from normcheck.cases.depth import Depth
from normcheck.cases.design import Design
from normcheck.cases.parameters import PARAMETERS, Place
from normcheck.cases.planned import Planned, Size, goals_of
from normcheck.planner.must import KINDS, Limits, Must, block_of, facets_of, reached, weight
from normcheck.planner.own import RUNS
from normcheck.planner.prices import Prices
from normcheck.planner.record import Record

_SIZES = 6  # new sizes that are considered

_BEYOND = 1.5
"""The longest time may be exceeded so far if all of the floor is done by then: one first trial took a minute, and what
was left of the floor 8 s."""


class Priced:
    """One greedy rule over the prices of a cell.

    Up to ``limits.at_once`` cases that build nothing run at a key that was paid for: a fault there shows early. Then
    the case of the must-list that is worth most for its price; the first other eps comes last, after the least cases,
    so that it cannot end a cell with few. ``given_up``: goals that are refused.
    """

    def __init__(
        self, claims: Claims, design: Design, limits: Limits, prices: Prices, record: Record, given_up: Set[Any]
    ) -> None:
        self._claims, self._design, self._limits, self._prices = claims, design, limits, prices
        self._record, self._given_up = record, given_up
        self.must = Must(design, limits, prices, len(claims.shapes))
        self._worth: dict[Place, int] = {}  # what a case at a place covers at most
        self._since_paid = 0  # cases since the latest key
        self._pays = False  # whether the latest case was expected to build

    @property
    def elapsed(self) -> float:
        """Seconds since the cell began, without stalls."""
        return self._limits.used + self._prices.spent - self._record.stalled

    def next(self) -> Planned | None:
        """The next case; None if nothing that is worth its price fits in the time."""
        limits, record, prices = self._limits, self._record, self._prices
        self._design.number += 1
        free = self.free() if record.core < limits.core else None
        if free is not None and self._since_paid < limits.at_once:
            self._since_paid += 1
            return free
        best, few = self._best(), record.run < self.must.least()[0]
        if best is not None:
            self._pays = prices.building_of(best) > prices.little
            self._since_paid *= not self._pays
            return best
        if few:
            return free or self._other_data()
        return free if self.elapsed + prices.dearest <= limits.usual else None

    def _best(self) -> Planned | None:
        """The case that is worth most for its price, of those that fit and reach something of the must-list, or, until
        half of the time is over, any goal.
        """
        record, prices = self._record, self._prices
        few = len(record.shapes) < self.must.least()[1]
        out = record.reached | self._given_up
        floor = {goal for goal in self.must.floor if goal not in out}
        wanted = floor | {goal for goal in self.must.tail if goal not in out}
        is_early = self.elapsed <= self._limits.used + self._limits.usual / 2 and record.core < self._limits.core
        best, most = None, (0, False, 0.0)
        for planned in self._offers(wanted):
            own, case = reached(planned) & wanted, planned.case
            needs_shape = few and self._opens(case)
            if not (own or needs_shape or is_early) or not self._is_possible(case):
                continue
            worth = sum(3 if goal in floor else weight(goal) for goal in own) + 3 * needs_shape
            worth += len(goals_of(planned) & self._design.left) / 100
            seconds = max(prices.building_of(planned) + prices.own.seconds(planned), 1e-6)
            is_of_floor, tried = needs_shape or not floor.isdisjoint(own), not prices.is_untried(planned)
            rank = bool(own or needs_shape) + (is_of_floor and tried), tried, worth / seconds
            if rank > most and self._fits(planned, own, is_of_floor=is_of_floor):
                best, most = planned, rank
        return best

    def _fits(self, planned: Planned, wanted: Set[Any], *, is_of_floor: bool) -> bool:
        """Whether there is time: the longest for the floor, at sure prices, so that one slow sample cannot keep out
        what a pass needs, and somewhat more if that is all of it; that of its goals for all else, which may be a whole
        key, and leaves time for the floor.
        """
        prices, limits, record = self._prices, self._limits, self._record
        end = self.elapsed + prices.own.seconds(planned)
        price = prices.building_of(planned, "sure" if is_of_floor else "likely")
        goes_on = self._pays or not prices.slow  # one by one, until one turns out to build
        if price <= prices.little and goes_on and record.core < limits.core:
            return True
        out = record.reached | self._given_up
        if is_of_floor:
            left = self.must.kept(out, len(record.shapes), record.run)
            return end + price <= limits.most or self.elapsed + left <= _BEYOND * limits.most
        out |= wanted
        kept = self.must.kept(out, len(record.shapes) + self._opens(planned.case), record.run + 1)
        following = limits.at_once * RUNS[Depth.MEMORY] * prices.own.call  # at its key
        time = max((self._time_for(axis) for axis, _ in wanted), default=limits.usual)
        return end + max(price, prices.dearest) + following + kept <= time

    def _time_for(self, axis: str) -> float:
        limits = self._limits
        return {"facet": limits.most, "several": limits.telling}.get(axis, limits.usual)

    def _is_possible(self, case: Case) -> bool:
        return self._claims.takes(case) and self._claims.fits(case.layout, case.N)

    def _opens(self, case: Case) -> bool:
        return case.M > 0 and (case.M, case.N) not in self._record.shapes

    def free(self) -> Planned | None:
        """A case that builds nothing and covers a goal, at the latest such place; None if there is none."""
        for place, first in reversed(self._record.places.items()):
            if not first.M or self._worth.get(place, 1) < 1:
                continue
            planned = self._at(first)
            self._worth[place] = len(goals_of(planned) & self._design.left)
            if self._worth[place] and self._prices.building_of(planned) <= self._prices.little:
                return planned
        return None

    def _other_data(self) -> Planned | None:
        """Other data at a place that was paid for, if no goal is left there and cases are missing."""
        known = [case for case in self._record.places.values() if case.M]
        return self._at(known[self._record.run % len(known)], probe=Depth.MEMORY) if known else None

    def _offers(self, wanted: Set[Any]) -> Iterator[Planned]:
        """Cases at new sizes that tell most, and beside the latest places: one thing new."""
        known = [case for case in reversed(self._record.places.values()) if case.M]
        if not known:
            return
        base, sizes = known[0], {(size.M, size.N): size for size in self._design.candidates}
        plain: dict[str, Any] = {"layout": self._claims.values("layout")[0], "probe": Depth.MEMORY}
        for size in self._new_sizes(wanted):
            yield self._at(base, size, **plain)
            yield self._at(base, size, **plain, **self._other_parameters())
        for m, heights in self._design.sizes.heights.items():
            shape = heights[0], base.N
            if shape in sizes and ("m", m) in wanted:
                yield self._at(base, sizes[shape], **plain)
        like = max(known, key=lambda case: (case.N > 1, min(case.M, 20)))
        for axis in (*PARAMETERS, "layout", "eps", "clips"):
            for value in self._design.axes.get(axis, ()):
                if (axis, value) in wanted or axis == "bias":
                    yield self._at(like, None, **{axis: value, "probe": Depth.MEMORY})
        for axis, value in sorted((goal for goal in wanted if goal[0] in (*KINDS, "probe")), key=repr):
            fixed = _of_special(value) if axis == "special" else {axis: value}
            for case in [one for one in known if one.M > 1 or axis != "probe"][:3]:
                yield self._at(case, None, **{"probe": Depth.MEMORY, **fixed})

    def _other_parameters(self) -> dict[str, Any]:
        """Parameters one of which no case had, else the simplest."""
        every = [dict(zip(PARAMETERS, own, strict=True)) for own in self._claims.parameters]
        new = (own for own in every if any(goal not in self._record.reached for goal in own.items()))
        return next(new, every[0])

    def _new_sizes(self, wanted: Set[Any]) -> list[Size]:
        """The new sizes that have most of what is wanted, the smaller ones first."""

        def told(size: Size) -> float:
            own = facets_of(size.M, size.N) | {(axis, size.axes[axis]) for axis in ("m", "n", "several")}
            return sum(map(weight, (own | {block_of(size.N)} if size.M > 1 < size.N else own) & wanted))

        new = (size for size in self._design.candidates if size.M and (size.M, size.N) not in self._record.shapes)
        return sorted(new, key=lambda size: (-told(size), size.M * size.N))[:_SIZES]

    def _at(self, like: Case, size: Size | None = None, **fixed: Any) -> Planned:
        """A case at the place of another: its parameters, layout and size, if no other is given, and its numbers if
        these may be dear. No row runs alone if that may be dear, unless it is asked for.
        """
        held: dict[str, Any] = {axis: getattr(like, axis) for axis in (*PARAMETERS, "layout")}
        if self._prices.of("numbers") > self._prices.little:
            held |= {"eps": like.eps, "clips": tuple(value for _, value in like.options)}
        size = size or self._design.sizes.size(like.M, like.N)
        if len(ORDINARY) < size.M and "rows" not in fixed and "probe" in fixed:
            held["rows"] = "blend"  # what is new meets every kind of rows
        planned = self._design.filled(size, {**held, **fixed})
        dear = "probe" not in fixed and self._prices.building_of(planned) > self._prices.little
        return replace(planned, probe=Depth.MEMORY) if dear and planned.probe == Depth.ROWS else planned


def _of_special(value: str) -> dict[str, str]:
    """The kinds of rows and dy of a case with this value of the axis "special"."""
    if value.startswith("dy "):
        return {"dy": value.removeprefix("dy "), "rows": "shifted"}
    return {"rows": value, "dy": "normal"}
