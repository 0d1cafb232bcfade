"""Where a case that follows the core may run: what was built for the core is paid for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.parameters import Parameters, place_of, with_parameters
from normcheck.cases.planned import Planned, gap_at
from normcheck.planner.prices import Prices
from normcheck.planner.record import Record
from normcheck.planner.refusals import with_value

_PAY_EVERY = 16
"""Of the cases after a core so many are drawn where they were paid for, before one may build something."""


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
