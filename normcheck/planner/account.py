"""What a core has covered, and what it has missed or left out, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normcheck.cases.claims import Claims
from normcheck.cases.missed import in_words
from normcheck.cases.sizes import Extent, sizes_of
from normcheck.planner.must import Limits, Must
from normcheck.planner.plain import Plain, left_out
from normcheck.planner.prices import Prices
from normcheck.planner.record import Record
from normcheck.planner.refusals import Refusals
from normcheck.result import Coverage


@dataclass(frozen=True, kw_only=True)
class Account:
    """The account of one core. ``must``: what a pass needs, if building is dear; None if the order is the plain one.

    ``declared``: the claims before anything was refused; ``usual``: the extent before rows or columns were dear;
    ``asked``: layouts that were asked for.
    """

    declared: Claims
    usual: Extent
    seed: int
    asked: tuple[str, ...]
    limits: Limits
    prices: Prices
    record: Record
    refusals: Refusals
    plain: Plain
    must: Must | None

    def coverage(self, cases: int) -> Coverage:
        """What was run of the core, and what was missed; ``cases``: of the whole cell. The core is over."""
        excused = self.refusals.excused
        if self.must is None:
            left = self.plain.goals(self.refusals.claims) - self.record.done - self.plain.elsewhere - excused
            planned = self.record.run + len(self.plain.skipped) + sum(1 for _ in self.plain.rest())
            return self._with(planned, in_words(left))
        must = self.must
        floor = [goal for goal in must.floor if goal not in self.record.reached | excused]
        least, shapes = must.least()
        missed = [*in_words(floor)]
        missed += [f"{cases:,} of {least:,} cases at least"] * (cases < least)
        missed += [f"{len(self.record.shapes)} of {shapes} shapes at least"] * (len(self.record.shapes) < shapes)
        return self._with(self.record.run + len(missed), tuple(missed))

    def _with(self, planned: int, missed: tuple[str, ...]) -> Coverage:
        return replace(self.so_far(), planned=planned, missed=missed, limit=self.limit if missed else "")

    def so_far(self) -> Coverage:
        """What was run of the core until now, and nothing missed: of a failed cell no more is needed."""
        return Coverage(
            planned=self.record.run,
            run=self.record.run,
            left_out=self._left_out(),
            refused=self.refusals.share(sizes_of(self.declared, self.plain.extent, self.seed)),
            building=self.prices.building,
        )

    @property
    def limit(self) -> str:
        """What ends a core that is not finished, as in a ``Coverage``."""
        if self.refusals.excused < self.refusals.given_up:
            return "data"
        few = self.record.run >= self.limits.cases or (self.must is None and not self.plain.skipped)
        return "cases" if few else "time"

    def why_thin(self) -> str:
        """Why the core is not finished, if not for the number of cases: refused data, its time, or the prices of what
        was missed.
        """
        limits, prices = self.limits, self.prices
        if self.limit == "data":
            return "kinds of data were refused"
        if self.must is None:
            needed = self.record.core + sum(prices.own.seconds(one, most=True) for one in self.plain.skipped)
            return f"{limits.core:g} s are allowed, about {needed:.0f} s for all"
        out = [goal for goal in self.must.floor if goal not in self.record.reached | self.refusals.excused]
        return f"{limits.most:.3g} s are allowed, and {prices.told({self.must.priced_by(goal) for goal in out})}"

    def _left_out(self) -> str:
        wanted = self.plain.goals(self.refusals.claims)
        refused = in_words(goal for goal in wanted & self.refusals.excused if len(goal) == 2)
        parts = [f"asked for: only layout {', '.join(self.declared.layouts)}"] * bool(self.asked)
        if self.must is not None:
            out = self.record.reached | self.refusals.given_up
            tail = [goal for goal in self.must.tail if goal not in out]
            facets = [name for axis, name in tail if axis == "facet"]
            blocks = [f"{block // 2 + 1} to {block}" for axis, block in tail if axis == "block"]
            words = [*facets, *in_words(goal for goal in tail if goal[0] not in ("facet", "several", "block"))]
            words += in_words(goal for goal in tail if goal[0] == "several")
            words += [f"no several rows at N of {', '.join(blocks)}"] * bool(blocks)
            parts.append(f"{self._why_priced()}: {self.record.run} cases on {len(self.record.shapes)} shapes")
            parts += [f"left out: {', '.join(words)}"] * bool(words)
        if not self.refusals.claims.shapes:
            parts.append(left_out(self.plain.extent, self.usual, self.prices.own))
        parts += [f"refused with whatever else: {', '.join(refused)}"] * bool(refused)
        return "; ".join(filter(None, parts))

    def _why_priced(self) -> str:
        if self.plain.skipped:
            return f"a core may take {self.limits.core:g} s"
        return self.prices.told()
