"""What has run of a cell, as its planner needs it, and where a case that follows the core builds nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.parameters import Parameters, Place, place_of, with_parameters
from normcheck.cases.planned import Planned, gap_at, goals_of
from normcheck.planner.must import Limits, reached
from normcheck.planner.prices import SLACK, Prices
from normcheck.planner.refusals import with_value

_PAY_EVERY = 16
"""Of the cases after a core so many are drawn where they were paid for, before one may build something."""


@dataclass
class Record:
    """``done``: the goals that cases have covered; ``reached``: those of a must-list; ``places``: where cases have run,
    in their order, with the first case of each; ``shapes``: their (M, N), without cases of no rows; ``run``: how many
    cases; ``core``: seconds of their own runs; ``stalled``: seconds of stalls, which are nobody's time.
    """

    done: set[Any] = field(default_factory=set)
    reached: set[Any] = field(default_factory=set)
    places: dict[Place, Case] = field(default_factory=dict)
    shapes: dict[tuple[int, int], None] = field(default_factory=dict)
    run: int = 0
    core: float = 0.0
    stalled: float = 0.0

    def counted(self, planned: Planned, seconds: float, prices: Prices, limits: Limits) -> None:
        """Note what a case took, of which ``prices`` learn: what is far beyond a price that is known is a stall."""
        sure = prices.building_of(planned, "sure")
        prices.saw(planned, seconds)
        if sure or not prices.is_new:
            expected = SLACK * (prices.own.seconds(planned) + prices.little + sure)
            self.stalled = min(self.stalled + max(0.0, seconds - expected), limits.most)
        self.core += min(seconds, SLACK * prices.own.seconds(planned, most=True))

    def ran(self, planned: Planned) -> None:
        """Note a case that has run."""
        self.run += 1
        self.done |= goals_of(planned)
        self.reached |= reached(planned)
        self.visited(planned.case)

    def visited(self, case: Case) -> None:
        """Note where a case has run that is not of the core."""
        self.places.setdefault(place_of(case), case)
        if case.M:
            self.shapes[case.M, case.N] = None


@dataclass(frozen=True)
class Paid:
    """Tells what a case would build, and where it builds nothing."""

    prices: Prices
    record: Record

    def is_worth(self, case: Case, seconds: float) -> bool:
        """Whether a case is worth what it builds, for which there are so many ``seconds``."""
        return self._builds(case) <= max(seconds, self.prices.little)

    def where(self, case: Case, seconds: float) -> Case:
        """This case if it builds nothing, else one with its data at a place that was paid for.

        Every _PAY_EVERY-th stays as it is, if what it builds takes no more than ``seconds``.
        """
        if self._builds(case) <= self.prices.little or (case.seed % _PAY_EVERY == 0 and self.is_worth(case, seconds)):
            return case
        places = [place for place in self.record.places if place[:2] == (case.M, case.N)]
        places = places or [place for place in self.record.places if place[0]]
        if not places:
            return case
        m, n, weight, bias, weight_dtype, residual_dtype, layout = places[case.seed % len(places)]
        there = replace(with_value(replace(case, M=m, N=n), "layout", layout), gap=gap_at(n, layout))
        there = with_parameters(there, Parameters(weight, bias, weight_dtype, residual_dtype))
        like = self.record.places.get(place_of(there), there)
        dear = self.prices.of("numbers") > self.prices.little
        return replace(there, eps=like.eps, options=like.options) if dear else there

    def _builds(self, case: Case) -> float:
        return self.prices.building_of(Planned(case, Depth.MEMORY))
