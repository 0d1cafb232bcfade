"""The time of one cell's core: what there is, what is left, and what a pass takes where first calls are dear."""

from __future__ import annotations

from collections.abc import Iterator

from normcheck.cases.core import Planned
from normcheck.gate.costs import Costs
from normcheck.gate.plan import DEAR_SECONDS, Plan

MOST_BUILDING = 2.0
"""Compiling and the like may take so many times the seconds of the core, beside them."""

_OTHER_FIRST_CALLS = 3
"""Without a bias, with fp32 weights, and with both: each is a first call beside those of the shapes."""

_GRACE_SHARE, _LATE_SHARE = 0.25, 0.125  # of its usual time


class Budget:
    """The seconds of a cell, of which ``used`` were spent before its core, at what ``costs`` has measured.

    A core has ``core_seconds``. A short one has a limit of wall time, ``wall``, see ``plan.ShortLimits``: it is
    ``usual_wall``, or longer where first calls are dearer.
    """

    def __init__(self, plan: Plan, costs: Costs, used: float) -> None:
        self._costs, self._on_gpu, self._used = costs, plan.device != "cpu", used
        self._short, self._after = plan.profile.short, plan.profile.seconds
        self.core_seconds = plan.profile.core_seconds

    @property
    def builds_too_much(self) -> bool:
        """Whether a core that is not short has spent too much on compiling and the like."""
        return self._costs.building > MOST_BUILDING * self.core_seconds

    def affords(self, planned: Planned) -> bool:
        """Whether a core that is not short has time for this case."""
        if self.builds_too_much:
            return False
        return self._costs.spent + self._costs.expected(planned) <= self.core_seconds

    def least(self, declared: int) -> tuple[int, int]:
        """The cases, and the shapes among them, that a cell with a short core must have judged.

        ``declared``: how many shapes its implementation has, 0 if any.
        """
        cases, shapes = self._usual_least
        if 3 * self._costs.dearest > self._short.gpu_seconds:
            shapes = min(shapes, 3)
        return cases, min(shapes, declared or shapes)

    @property
    def _usual_least(self) -> tuple[int, int]:
        return self._short.few if self._costs.dearest >= DEAR_SECONDS else (self._short.cases, self._short.shapes)

    def too_few(self, cases: int, declared: int) -> Iterator[str]:
        """What of that is missing, in words."""
        least, shapes = self.least(declared)
        if cases < least:
            yield f"{cases:,} of {least:,} cases at least"
        if len(self._costs.shapes) < shapes:
            yield f"{len(self._costs.shapes)} of {shapes} shapes at least"

    @property
    def usual_wall(self) -> float:
        """Seconds that a short core may take, with compiling and the like, if they suffice."""
        return self._alone * (self._short.share if self._on_gpu else 1.0)

    @property
    def _alone(self) -> float:
        """The same of a cell that no others follow."""
        return self._short.gpu_seconds if self._on_gpu else (1 + MOST_BUILDING) * self.core_seconds

    @property
    def wall(self) -> float:
        """Seconds that a short core may take, with compiling and the like: enough for the first calls of a pass."""
        most = self._short.most_gpu_seconds if self._on_gpu else self._short.most_cpu_seconds
        shapes = self._usual_least[1] + _OTHER_FIRST_CALLS
        needed = self._used + self._costs.starting + shapes * self._costs.dearest
        return max(self.usual_wall, min(needed, most))

    @property
    def grace(self) -> float:
        """Seconds that a cell with too few cases may take longer, for cases that compile nothing."""
        return _GRACE_SHARE * self._alone

    @property
    def late(self) -> float:
        """Seconds that a short core may take longer for what it must cover yet, if it has not the longer limit."""
        return _LATE_SHARE * self._alone if self.wall == self.usual_wall else 0.0

    @property
    def left(self) -> float:
        """Seconds that are left of ``wall``; negative once it is over."""
        return self.wall - self._used - self._costs.spent - self._costs.building

    def after(self, *, short: bool) -> float:
        """Seconds for the cases after the core, half as many in a run of many cells; fewer after a short one that took
        all of its time, or longer.
        """
        most = self._after if self._short.share == 1.0 else self._after / 2
        return min(most, max(self._after / 4, self._after / 2 + self.left)) if short else most
