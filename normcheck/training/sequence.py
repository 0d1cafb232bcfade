"""The cases of one cell of a trial: its core, as a sweep has it, then others where first calls were paid for.

Which cases a kernel gets that builds nothing follows from the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from normcheck.cases.case import Case
from normcheck.cases.core import drawn
from normcheck.cases.depth import Depth
from normcheck.cases.planned import Planned
from normcheck.cases.strategies import choices, endless
from normcheck.checks.attempt import died
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.shrink import seed_of
from normcheck.planner.must import Limits
from normcheck.planner.plain import Step
from normcheck.planner.planner import Planner

SHAPES, LEAST_SHAPES = 4, 3
"""The shapes that are paid for where first calls are dear, and those without which a cell is thin."""

_TIMES = 3.0  # what building takes beside the cases themselves
_NO_END = 1 << 62
_MUCH_SECONDS = 1.0
_KNOWN = 2  # by its second case, which is repeated if it takes long, it is known what first calls cost


class CellCases:
    """``next`` gives a case, ``saw`` takes its result.

    ``most``: how many cases there are at most; ``planned``: how many there are; ``seconds``: for all of them, of which
    first calls may take ``most_seconds``. ``run``: how many have run; a case that ``repeats`` the one before it does
    not count. ``first``: the first of them.

    Which sizes and eps there are is not for the file to say: it would name the easiest. It cannot leave them out by a
    refusal either.
    """

    def __init__(self, cell: Cell, seed: int, device: str, most: int, seconds: float, most_seconds: float) -> None:
        limits = Limits(
            usual=_TIMES * seconds,
            telling=_TIMES * seconds,
            most=most_seconds,
            core=seconds,
            least=(most, SHAPES),
            cases=_NO_END,
            at_once=max(1, most // SHAPES),
        )
        profile, extent = PROFILES["quick"], PROFILES["quick"].extent.on(device)
        self.cell, self.plan = cell, Plan((cell,), profile, seed, device, most_seconds)
        undeclared = replace(cell, implementation=replace(cell.implementation, shapes=None, epsilons=None))
        builds = cell.implementation.builds
        self._core = Planner(undeclared.claims, extent, seed, device, limits, builds=builds, excuses=False)
        self.planned = len(list(islice(drawn(self._core.claims, extent, seed), most)))
        self.run = 0
        self.first: Case | None = None
        self._cold = 0.0  # seconds of the first case
        self._step: Step | None = None
        self._ended = False  # whether no more first calls are paid for
        self._others: Iterator[Case] | None = None

    @property
    def repeats(self) -> bool:
        """Whether the next case is the one before it again, with other data: it tells what a first call costs."""
        return self._core.repeats and not self._ended

    @property
    def upcoming(self) -> Case | None:
        """The case that comes next if nothing changes that, None if it is not known."""
        return self._core.upcoming if self.run < self.planned else None

    @property
    def building(self) -> float:
        """Seconds of first calls, without the very first one, unless they are dear: any kernel has such a one."""
        return self._core.prices.building - (0.0 if self.dear else self._cold)

    @property
    def dear(self) -> bool:
        """Whether first calls are dear, or took most of the time."""
        prices = self._core.prices
        building, spent = prices.building - self._cold, prices.spent - self._cold
        return self._core.is_priced or building > max(spent / 2, _MUCH_SECONDS)

    @property
    def shapes(self) -> int:
        """The number of shapes that have run."""
        return len(self._core.record.shapes)

    @property
    def narrow(self) -> bool:
        """Whether first calls were dear, and too few shapes were paid for."""
        return self.dear and self.shapes < LEAST_SHAPES

    def next(self, *, over: bool, pays: bool) -> Planned | None:
        """The next case, None if there is none.

        ``over``: whether the time is over that there is for a kernel that builds nothing; ``pays``: whether one whose
        first calls are dear gets any more of them.
        """
        self._step = None
        if self.run == self.planned and not self.repeats:
            return None
        if not (self._ended or self.repeats):
            known = self.run >= _KNOWN or (self.run > 0 and (self._core.prices.own.repeated or not pays))
            self._ended = not pays if self._core.is_priced else over and known
        self._step = None if self._ended else self._core.next()
        self._ended = self._step is None
        self._step = self._step or self._core.free()
        if self._step is not None:
            return self._step.planned
        return Planned(self._where_paid(), Depth.MEMORY) if self.dear and self.shapes else None

    def _where_paid(self) -> Case:
        if self._others is None:
            self._others = endless(choices(self._core.claims), seed_of(self.cell, self.plan.seed))
        return self._core.where_paid(next(self._others), 0.0)

    def saw(self, planned: Planned, result: Result, seconds: float) -> None:
        """Count the ``result`` of a case that took so many ``seconds``. One without an answer tells of no costs."""
        self.run += not self.repeats
        self.first = self.first or planned.case
        first = not self._core.record.places
        refused = bool(result.refused) or died(result)
        if self._step is not None:
            self._core.saw(self._step, refused=refused, seconds=seconds)
        else:
            self._core.saw_another(planned.case, planned.probe, refused=refused, seconds=seconds)
        if first:  # all of which counts as building
            self._cold = self._core.prices.building
