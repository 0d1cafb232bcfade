"""What has run of a cell, as its planner needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.parameters import Place, place_of
from normcheck.cases.planned import Planned, goals_of
from normcheck.planner.limits import Limits
from normcheck.planner.must import reached
from normcheck.planner.prices import SLACK, Prices


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
