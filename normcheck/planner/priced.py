"""The order of cases if building is dear: what a pass needs first, then whatever covers most for its price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.axes import ORDINARY
from normcheck.cases.case import PARAMETERS, Case, Place, place_of
from normcheck.cases.claims import Claims
from normcheck.cases.design import Design
from normcheck.cases.planned import Planned, Size, goals_of
from normcheck.planner.limits import Limits
from normcheck.planner.must import Must, block_of, facets_of, reached
from normcheck.planner.own import RUNS
from normcheck.planner.prices import AXES, Prices
from normcheck.planner.record import Record

_OTHER_KEYS = 3
"""Without a bias, with fp32 weights, and with both: each is a key beside those of the shapes."""

_ENOUGH_SHARE = 0.6
"""After this share of the usual time nothing is built that a pass does not need."""

_PLACES = 40  # the latest ones, beside which cases are considered
_SIZES = 6  # new sizes that are considered


@dataclass(frozen=True)
class _Offer:
    """A case. ``likely``, ``sure``: seconds that it builds for; ``new``: the goals that it covers, of which ``wanted``
    are of the must-list; ``untried``: whether it changes an axis that no case has changed.
    """

    planned: Planned
    likely: float
    sure: float
    new: Set[Any]
    wanted: Set[Any]
    untried: bool


class Priced:
    """One greedy rule over the prices of a cell.

    Up to ``limits.at_once`` cases that build nothing run at a key that was paid for: a fault there shows early. Then
    the case of the must-list that is worth most for its price; an axis that no case has changed comes last, after the
    least cases, so that an unknown price cannot end a cell with few. ``given_up``: goals that are refused; ``barred``:
    places that are.
    """

    def __init__(
        self,
        claims: Claims,
        design: Design,
        limits: Limits,
        prices: Prices,
        record: Record,
        given_up: Set[Any],
        barred: Set[Place],
    ) -> None:
        self._claims, self._design, self._limits, self._prices = claims, design, limits, prices
        self._record, self._given_up, self._barred = record, given_up, barred
        self.must = Must(design, limits, prices, len(claims.shapes))
        self._worth: dict[Place, int] = {}  # what a case at a place covers at most
        self._since_paid = 0  # cases since the latest key
        self._asked: dict[tuple[int, int], Planned] = {}  # shapes of which another process builds the key
        self._warmed: dict[tuple[int, int], Planned] = {}  # and of which one has

    @property
    def elapsed(self) -> float:
        """Seconds since the cell began, without stalls."""
        return self._limits.used + self._prices.spent - self._record.stalled

    def next(self) -> Planned | None:
        """The next case; None if nothing that is worth its price fits in the time."""
        limits, record = self._limits, self._record
        self._design.number += 1
        cases, shapes = self.must.least()
        free = self.free() if record.core < limits.core else None
        if free is not None and self._since_paid < limits.at_once:
            self._since_paid += 1
            return free
        few = max(0, shapes - len(record.shapes))
        out = record.reached | self._given_up
        floor = {goal for goal in self.must.floor if goal not in out}
        wanted = floor | {goal for goal in self.must.tail if goal not in out}
        offers = [offer for offer in self._offers(wanted) if self._fits(offer, floor, few)]
        needed = [offer for offer in offers if offer.wanted or (few and self._opens(offer.planned.case))]
        best = max(needed, key=lambda offer: (not offer.untried, self._rate(offer, floor, few)), default=None)
        goes_on = self.elapsed + self._prices.dearest <= limits.usual or record.run < cases
        if best is not None and best.untried and record.run < cases and free is not None and goes_on:
            best = None
        elif best is None and self.elapsed <= limits.used + _ENOUGH_SHARE * limits.usual:
            best = max(offers, key=self._rate_of_rest, default=None)
        if best is not None:
            self._since_paid *= best.likely <= self._prices.little
            return best.planned
        free = free or (self._other_data() if record.run < cases else None)
        return free if goes_on else None

    def free(self) -> Planned | None:
        """A case that builds nothing and covers a goal, at the latest such place; None if there is none."""
        latest = list(reversed(self._record.places.items()))
        for place, first in sorted(latest, key=lambda one: one[1].N == 1):  # which shows few faults
            if not first.M or self._worth.get(place, 1) < 1:
                continue
            planned = self._at(first)
            if not goals_of(planned) & self._design.left:
                planned = next((one for one in self._special(first) if goals_of(one) & self._design.left), planned)
            self._worth[place] = len(goals_of(planned) & self._design.left)
            if self._worth[place] and self._prices.building_of(planned) <= self._prices.little:
                return planned
        return None

    def ahead(self) -> Planned | None:
        """The case at a new shape for another process to run first, None if there is none."""
        out = self._record.reached | self._given_up
        new = self._new_sizes({goal for goal in self.must.tail if goal not in out})
        size = next((size for size in new if (size.M, size.N) not in {**self._asked, **self._warmed}), None)
        base = next((case for case in reversed(self._record.places.values()) if case.M), None)
        if size is None or base is None:
            return None
        planned = self._asked[size.M, size.N] = self._at(base, size, **self._plain)
        return planned

    def compiled(self, planned: Planned, *, well: bool) -> None:
        """Another process has run this case; ``well``: without an error."""
        self._asked.pop((planned.case.M, planned.case.N), None)
        self._warmed[planned.case.M, planned.case.N] = planned
        if well:
            self._prices.warm(planned)

    def _other_data(self) -> Planned | None:
        """Other data at a place that was paid for, if no goal is left there and cases are missing."""
        known = [case for case in self._record.places.values() if case.M]
        return self._at(known[self._record.run % len(known)], probe="memory") if known else None

    def _fits(self, offer: _Offer, floor: Set[Any], few: int) -> bool:
        """Whether there is time: the longest for the floor, at sure prices, so that one slow sample cannot keep out
        what a pass needs; the usual one for all else, which may be a whole key, and leaves time for the floor.
        """
        prices, limits, record = self._prices, self._limits, self._record
        end = self.elapsed + prices.own.seconds(offer.planned)
        goes_on = not prices.slow and record.core < limits.core  # one by one, until one turns out to build
        opens = self._opens(offer.planned.case)
        if offer.wanted & floor or (few and opens):
            return end + offer.sure <= limits.most or (offer.sure <= prices.little and goes_on)
        worst = prices.building_of(offer.planned, "worst")
        if worst <= prices.little and goes_on:
            return True
        end += limits.at_once * RUNS["memory"] * prices.own.call  # what follows it at its key
        out = record.reached | self._given_up | offer.wanted
        kept = self.must.kept(out, len(record.shapes) + opens, record.run + 1)
        time = self._time_of_facets if any(goal[0] == "facet" for goal in offer.wanted) else limits.usual
        return end + max(worst, prices.dearest) + kept <= time

    @property
    def _time_of_facets(self) -> float:
        limits, prices = self._limits, self._prices
        keys = self.must.least()[1] + _OTHER_KEYS
        return max(limits.usual, min(limits.used + prices.starting + keys * prices.dearest, limits.most))

    def _opens(self, case: Case) -> bool:
        return case.M > 0 and (case.M, case.N) not in self._record.shapes

    def _rate(self, offer: _Offer, floor: Set[Any], few: int) -> float:
        worth = sum(3 if goal in floor or goal[0] == "facet" else 1 for goal in offer.wanted)
        worth += 3 * (few > 0 and self._opens(offer.planned.case))
        return (worth + len(offer.new) / 100) / self._seconds(offer)

    def _rate_of_rest(self, offer: _Offer) -> float:
        return len(offer.new) / self._seconds(offer)

    def _seconds(self, offer: _Offer) -> float:
        return max(offer.likely + self._prices.own.seconds(offer.planned), 1e-6)

    def _offers(self, wanted: Set[Any]) -> list[_Offer]:
        offers, latest = [], next(reversed(self._record.places.values()), None)
        for planned in self._candidates(wanted):
            case = planned.case
            new, own = goals_of(planned) & self._design.left, reached(planned) & wanted
            possible = self._claims.takes(case) and self._claims.fits(case.layout, case.N)
            if not (new or own) or not possible or place_of(case) in self._barred:
                continue
            likely, sure = self._prices.building_of(planned), self._prices.building_of(planned, "sure")
            untried = latest is not None and any(not self._prices.is_tried(axis) for axis in _changed(latest, case))
            offers.append(_Offer(planned, likely, sure, new, own, untried))
        return offers

    def _candidates(self, wanted: Set[Any]) -> Iterator[Planned]:
        """Cases at new sizes that tell most, and beside the latest places: one thing new."""
        known = [case for case in reversed(self._record.places.values()) if case.M][:_PLACES]
        if not known:
            return
        base, sizes = known[0], {(size.M, size.N): size for size in self._design.candidates}
        for size in self._new_sizes(wanted):
            if (size.M, size.N) not in self._asked:
                yield self._at(base, size, **self._plain)
                yield self._at(base, size, **self._plain, **self._other_parameters())
        yield from (planned for shape, planned in self._warmed.items() if shape not in self._record.shapes)
        yield from self._beside(max(known, key=lambda case: (case.N > 1, min(case.M, 20))), wanted)
        for m, heights in self._design.heights.items():
            shape = heights[0], base.N
            if shape in sizes and (("m", m) in wanted or (m and shape not in self._record.shapes)):
                yield self._at(base, sizes[shape], **self._plain)
        for axis, value in sorted((goal for goal in wanted if goal[0] in _BY_KIND), key=repr):
            fixed = of_special(value) if axis == "special" else {axis: value}
            usual = {"layout": self._plain["layout"]} if "dy" in fixed else {}
            for case in [one for one in known if one.M > 1 or axis != "probe"][:3]:
                yield self._at(case, **{"probe": "memory", **usual, **fixed})

    def _beside(self, case: Case, wanted: Set[Any]) -> Iterator[Planned]:
        """Cases with one other parameter, layout or number."""
        for axis in (*PARAMETERS, "layout", "eps", "clips"):
            for value in self._design.axes.get(axis, ()):
                if (axis, value) in wanted or axis == "bias":
                    yield self._at(case, **{axis: value, "probe": "memory"})

    @property
    def _plain(self) -> dict[str, Any]:
        return {"layout": self._claims.values("layout")[0], "probe": "memory"}

    def _other_parameters(self) -> dict[str, Any]:
        """Parameters one of which no case had, else the simplest."""
        every = [dict(zip(PARAMETERS, own, strict=True)) for own in self._claims.parameters]
        new = (own for own in every if any(goal not in self._record.reached for goal in own.items()))
        return next(new, every[0])

    def _new_sizes(self, wanted: Set[Any]) -> list[Size]:
        """The new sizes that have most of what is wanted, the smaller ones first."""

        def told(size: Size) -> int:
            own = facets_of(size.M, size.N) | {(axis, size.axes[axis]) for axis in ("m", "n")}
            return len((own | {block_of(size.N)} if size.M > 1 < size.N else own) & wanted)

        new = (size for size in self._design.candidates if size.M and (size.M, size.N) not in self._record.shapes)
        return sorted(new, key=lambda size: (-told(size), size.M * size.N))[:_SIZES]

    def _at(self, like: Case, size: Size | None = None, **fixed: Any) -> Planned:
        """A case at the place of another: its parameters, layout and size, if no other is given, and its numbers if
        these may be dear. No row runs alone if that may be dear, unless it is asked for.
        """
        held: dict[str, Any] = {axis: getattr(like, axis) for axis in (*PARAMETERS, "layout")}
        if self._prices.of("numbers") > self._prices.little:
            held |= {"eps": like.eps, "clips": tuple(value for _, value in like.options)}
        size = size or self._design.size(like.M, like.N)
        if len(ORDINARY) < size.M and "rows" not in fixed and "probe" in fixed:
            held["rows"] = "blend"  # what is new meets every kind of rows
        planned = self._design.filled(size, {**held, **fixed})
        dear = "probe" not in fixed and self._prices.building_of(planned) > self._prices.little
        return replace(planned, probe="memory") if dear and planned.probe == "rows" else planned

    def _special(self, first: Case) -> Iterator[Planned]:
        size = self._design.size(first.M, first.N)
        for value in self._design.axes["special"]:
            if self._design.lacks(size, value):
                yield self._at(first, None, **of_special(value), probe="memory")


_BY_KIND = ("rows", "dy", "weights", "special", "probe", "residual", "scale")
"""The axes that a case at any place may cover."""


def of_special(value: str) -> dict[str, str]:
    """The kinds of rows and dy of a case with this value of the axis "special"."""
    if value.startswith("dy "):
        return {"dy": value.removeprefix("dy "), "rows": "shifted"}
    return {"rows": value, "dy": "normal"}


def _changed(one: Case, other: Case) -> Iterable[str]:
    """The axes of a price in which two cases differ, but for the divisibility that follows from N."""
    values = {"numbers": lambda case: (case.eps, case.options)}
    for axis in AXES:
        if axis in ("process", "multiple of 16"):
            continue
        of = values.get(axis, lambda case, axis=axis: getattr(case, axis))
        if of(one) != of(other):
            yield axis
