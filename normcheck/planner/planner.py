"""The sequence of one cell's core: the plain order, in which nothing depends on time, or the priced one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from normcheck.cases.case import Case, with_other_values
from normcheck.cases.claims import Claims
from normcheck.cases.depth import Depth
from normcheck.cases.design import ALL_OPENED, Design
from normcheck.cases.planned import Planned, gap_at, goals_of
from normcheck.cases.sizes import Extent
from normcheck.planner.account import Account
from normcheck.planner.must import Limits
from normcheck.planner.own import FAST
from normcheck.planner.plain import Plain, Step
from normcheck.planner.priced import Priced
from normcheck.planner.prices import Prices
from normcheck.planner.record import Paid, Record
from normcheck.planner.refusals import Refusals

_FEW = 2
"""So many cases tell what building costs; if none of them was fast, the second is repeated."""

_CHEAP_SHARE = 0.25
"""The plain order comes back if what it builds takes no more than this share of the time that is left."""


class Planner:
    """``next`` gives a case of the core, ``saw`` takes what came of it.

    A refusal costs few cases: the refused value is found by asking for it alone, and the rest is drawn again without
    it. Shards share one sequence: all of them run its opening, which shows what is refused, and then each runs its own
    part of the rest, in the plain order, which is not drawn again. What ``builds`` nothing has no other order either.
    ``layouts``: those that were asked for; ``excuses``: whether the rest goes on without what is refused.
    """

    def __init__(
        self,
        claims: Claims,
        extent: Extent,
        seed: int,
        device: str,
        limits: Limits,
        *,
        shard: tuple[int, int] = (1, 1),
        builds: bool = True,
        excuses: bool = True,
        layouts: tuple[str, ...] = (),
    ) -> None:
        self._declared, self._usual, self._seed = claims, extent, seed
        self._limits, self._shard, self._asked, self._excuses = limits, shard, layouts, excuses
        self.prices, self.record = Prices(device), Record()
        self.prices.own.repeated = not builds  # then any case tells what a call takes
        self._paid, self._may_build = Paid(self.prices, self.record), builds and shard[1] == 1
        self._refusals = Refusals(claims, lambda claims: self._plain.goals(claims))
        fits, own = device == "cpu" and not claims.shapes, self.prices.own
        self._plain = Plain(self._refusals, extent, seed, limits, own, self.record, shard=shard, fits=fits)
        self._priced: Priced | None = None

    @property
    def claims(self) -> Claims:
        """The implementation's claims, without the values that it refused."""
        return self._refusals.claims

    @property
    def length(self) -> int:
        """How many numbers of the sequence are used."""
        return self._plain.number + 1

    @property
    def is_priced(self) -> bool:
        """Whether building is dear, so that the order is that of prices."""
        return self._priced is not None

    @property
    def repeats(self) -> bool:
        """Whether the next case is the one before it again, with other data: it tells what is built."""
        own = self.prices.own
        return self._may_build and self.record.run == _FEW and not own.repeated and own.call > FAST

    @property
    def upcoming(self) -> Case | None:
        """The case that comes next if the present one changes nothing, None if that is not known."""
        coming = self._plain.upcoming
        return coming.case if self._priced is None and coming is not None else None

    def coming(self, most: int) -> list[Planned]:
        """So many of the cases that come next if the present one changes nothing; [] if that is not known."""
        if self._priced is not None or self._refusals.question is not None or self.repeats:
            return []
        return self._plain.coming(most)

    def next(self) -> Step | None:
        """The next case; None if the core is finished, or the rest of it would take too long."""
        question, plain = self._refusals.question, self._plain
        if question is not None:
            return Step(Planned(question.case, Depth.MEMORY), plain.number, plain.opened or self._shard[0] == 1)
        if self._priced is not None and plain.drawn_for != self._refusals.version:
            self._price()
        if self.repeats:
            return Step(self._again(), plain.number, own=True, again=True)
        if self._priced is None:
            step = plain.next()
            if step is not None or not plain.skipped or self._shard[1] > 1:
                return step
        priced = self._priced or self._price()  # the time of a core may be over: what a pass needs is left
        if self.record.run >= self._limits.cases:
            return None
        return self._numbered(priced.next() or self._rest_that_builds_nothing())

    def _numbered(self, planned: Planned | None) -> Step | None:
        if planned is None:
            return None
        self._plain.number += 1
        return Step(planned, self._plain.number, own=True)

    def _rest_that_builds_nothing(self) -> Planned | None:
        """What the plain order still has and costs nothing but its own run, if there is time for it."""
        prices, left = self.prices, self._design.left
        for planned in self._plain.let_go():
            if prices.building_of(planned) <= prices.little and not left.isdisjoint(goals_of(planned)):
                time = min(self.seconds_left, self._limits.core - self.record.core)
                return planned if prices.own.seconds(planned) <= time else None
        return None

    def free(self) -> Step | None:
        """One more case that builds nothing; None if none adds anything, or if the order is the plain one."""
        return self._numbered(self._priced.free()) if self._priced is not None else None

    def saw(self, step: Step, *, refused: bool, seconds: float) -> None:
        """Take what came of a case, which took so many ``seconds``."""
        planned, question = step.planned, self._refusals.asked()
        if refused:
            if self._excuses and not step.again:
                self._refusals.refused(planned, question, self.record.done)
            return
        self.record.counted(planned, seconds, self.prices, self._limits)
        self.record.ran(planned)
        if self._priced is not None:
            self._design.recorded(planned)
        self._refusals.ran(planned.case)
        if question is not None:
            self._refusals.answered(self.record.done)
        elif self._may_build and self.record.run > 1:
            self._choose(seconds)

    def saw_another(self, case: Case, probe: Depth, *, refused: bool, seconds: float) -> None:
        """Take what came of a case that is not of the core: its cost, and that it was not refused."""
        if not refused:
            self._refusals.ran(case)
            self.record.counted(Planned(case, probe), seconds, self.prices, self._limits)
            self.record.visited(case)

    def where_paid(self, case: Case, seconds: float) -> Case:
        """This case if it builds nothing, or is one of the few that may, for ``seconds``; else its data elsewhere.

        In the plain order what is built is no matter, and no stall may move a case.
        """
        steady = replace(case, gap=gap_at(case.N, case.layout)) if self.is_priced else case
        return self._paid.where(steady, seconds) if self.is_priced and self._may_build else steady

    def is_worth(self, case: Case, seconds: float) -> bool:
        """Whether a case that is not of the core is worth what it builds, for which there are so many ``seconds``."""
        return not (self.is_priced and self._may_build) or self._paid.is_worth(case, seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds that are left of the usual time; negative once it is over."""
        return self._limits.usual - self._limits.used - self.prices.spent + self.record.stalled

    @property
    def account(self) -> Account:
        """What the core has covered until now."""
        return Account(
            declared=self._declared,
            usual=self._usual,
            seed=self._seed,
            asked=self._asked,
            limits=self._limits,
            prices=self.prices,
            record=self.record,
            refusals=self._refusals,
            plain=self._plain,
            must=self._priced.must if self._priced is not None else None,
        )

    def _again(self) -> Planned:
        latest = next(reversed(self.record.places.values()))
        return Planned(with_other_values(latest), Depth.MEMORY)

    def _choose(self, seconds: float) -> None:
        """Leave the plain order if what it builds is too dear, and go back to it if that is not so any more."""
        left, half = self.seconds_left, self._limits.usual / 2
        if self._priced is None:
            most = max(left, min(half, left + self._limits.usual), _CHEAP_SHARE * half)
            trust: Any = "sure" if seconds < half else "likely"  # one sample counts only if it is longer than that
            slow = self.prices.slow and self._plain.at_most * self.prices.dearest_case > most  # else none need be made
            if slow and self.prices.ahead(self._plain.rest(), most, trust) > most:
                self._price()
        elif self.prices.is_new and not self.prices.slow and not self._plain.skipped:  # else no price fell
            most, design = _CHEAP_SHARE * left, self._design
            rest = [planned for planned in self._plain.rest() if not design.left.isdisjoint(goals_of(planned))]
            if most > 0 and self._are_few(rest) and self.prices.ahead(rest, most, "likely") <= most:
                self._plain.draw()  # of those that were drawn before, many were let go
                self._priced = None if self._are_few(self._plain.rest()) else self._priced

    def _are_few(self, rest: Iterable[Planned]) -> bool:
        """Whether all of them may run."""
        return self.record.run + sum(1 for _ in rest) <= self._limits.cases

    def _price(self) -> Priced:
        plain, given_up = self._plain, self._refusals.given_up
        plain.drawn_for = self._refusals.version
        number = ALL_OPENED + plain.number + 1
        self._design = Design(self.claims, plain.extent, self._seed, plain.done, number, steady=True)
        self._priced = Priced(self.claims, self._design, self._limits, self.prices, self.record, given_up)
        return self._priced
