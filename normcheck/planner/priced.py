"""The order of cases if building is dear: what a pass needs first, then whatever covers most for its price."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.claims import Claims
from normcheck.cases.depth import Depth
from normcheck.cases.design import Design
from normcheck.cases.parameters import Place, place_of
from normcheck.cases.planned import Planned, goals_of
from normcheck.planner.candidates import Candidates
from normcheck.planner.limits import Limits
from normcheck.planner.must import Must, reached, weight
from normcheck.planner.own import RUNS
from normcheck.planner.prices import AXES, Prices
from normcheck.planner.record import Record


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
        self.candidates = Candidates(claims, design, prices, record)
        self.must = Must(design, limits, prices, len(claims.shapes))
        self._worth: dict[Place, int] = {}  # what a case at a place covers at most
        self._since_paid = 0  # cases since the latest key

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
        elif best is None and self.elapsed <= limits.used + limits.usual / 2:
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
            planned = self.candidates.at(first)
            left = self._design.left
            if left.isdisjoint(goals_of(planned)):
                special = self.candidates.special(first)
                planned = next((one for one in special if not left.isdisjoint(goals_of(one))), planned)
            self._worth[place] = len(goals_of(planned) & left)
            if self._worth[place] and self._prices.building_of(planned) <= self._prices.little:
                return planned
        return None

    def _other_data(self) -> Planned | None:
        """Other data at a place that was paid for, if no goal is left there and cases are missing."""
        known = [case for case in self._record.places.values() if case.M]
        return self.candidates.at(known[self._record.run % len(known)], probe=Depth.MEMORY) if known else None

    def _fits(self, offer: _Offer, floor: Set[Any], few: int) -> bool:
        """Whether there is time: the longest for the floor, at sure prices, so that one slow sample cannot keep out
        what a pass needs; that of its goals for all else, which may be a whole key, and leaves time for the floor.
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
        end += limits.at_once * RUNS[Depth.MEMORY] * prices.own.call  # what follows it at its key
        out = record.reached | self._given_up | offer.wanted
        kept = self.must.kept(out, len(record.shapes) + opens, record.run + 1)
        time = max(self._time_for(axis) for axis in ("", *(goal[0] for goal in offer.wanted)))
        return end + max(worst, prices.dearest) + kept <= time

    def _time_for(self, axis: str) -> float:
        limits = self._limits
        return {"facet": limits.most, "several": limits.telling}.get(axis, limits.usual)

    def _opens(self, case: Case) -> bool:
        return case.M > 0 and (case.M, case.N) not in self._record.shapes

    def _rate(self, offer: _Offer, floor: Set[Any], few: int) -> float:
        worth = sum(3 if goal in floor else weight(goal) for goal in offer.wanted)
        worth += 3 * (few > 0 and self._opens(offer.planned.case))
        return (worth + len(offer.new) / 100) / self._seconds(offer)

    def _rate_of_rest(self, offer: _Offer) -> float:
        return len(offer.new) / self._seconds(offer)

    def _seconds(self, offer: _Offer) -> float:
        return max(offer.likely + self._prices.own.seconds(offer.planned), 1e-6)

    def _offers(self, wanted: Set[Any]) -> list[_Offer]:
        offers, latest = [], next(reversed(self._record.places.values()), None)
        for planned in self.candidates.of(wanted):
            case = planned.case
            new, own = goals_of(planned) & self._design.left, reached(planned) & wanted
            possible = self._claims.takes(case) and self._claims.fits(case.layout, case.N)
            if not (new or own) or not possible or place_of(case) in self._barred:
                continue
            likely, sure = self._prices.building_of(planned), self._prices.building_of(planned, "sure")
            untried = latest is not None and any(not self._prices.is_tried(axis) for axis in _changed(latest, case))
            offers.append(_Offer(planned, likely, sure, new, own, untried))
        return offers


def _changed(one: Case, other: Case) -> Iterable[str]:
    """The axes of a price in which two cases differ, but for the divisibility that follows from N."""
    values = {"numbers": lambda case: (case.eps, case.options)}
    for axis in AXES:
        if axis == "multiple of 16":
            continue
        of = values.get(axis, lambda case, axis=axis: getattr(case, axis))
        if of(one) != of(other):
            yield axis
