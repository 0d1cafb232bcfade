"""The sequence of one cell's core: the plain order, in which nothing depends on time, or the priced one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from normcheck.cases.axes import Pair, Value
from normcheck.cases.case import Case, Parameters, Place, place_of, with_parameters
from normcheck.cases.claims import Claims
from normcheck.cases.core import ALL_OPENED, Design, Planned, drawn, gap_at, goals_of
from normcheck.cases.goals import Extent, Goals, goals, sizes_of
from normcheck.cases.missed import in_words
from normcheck.planner.affordable import affordable, left_out
from normcheck.planner.limits import Limits
from normcheck.planner.priced import Priced
from normcheck.planner.prices import FAST, Prices
from normcheck.planner.record import Record
from normcheck.planner.refusals import Refusals, with_value
from normcheck.result import Coverage

_FEW = 2
"""So many cases tell what building costs; if none of them was fast, the second is repeated."""

_CHEAP_SHARE = 0.25
"""The plain order comes back if what it builds takes no more than this share of the time that is left."""

_PAY_EVERY = 16
"""Of the cases after a core so many are drawn where they were paid for, before one may build something."""

_STALL = 3.0
"""A case that takes so many times what was expected was stalled."""


@dataclass(frozen=True)
class Step:
    """A case to run. ``number``: its place in the sequence of all shards; ``own``: whether this shard counts it;
    ``again``: it repeats the one before, to tell what is built.
    """

    planned: Planned
    number: int
    own: bool
    again: bool = False


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
        self._declared, self._usual, self._extent, self._seed = claims, extent, extent, seed
        self._device, self._limits, self._shard, self._asked = device, limits, shard, layouts
        self._may_build, self._excuses = builds and shard[1] == 1, excuses
        self.prices, self.record = Prices(device), Record()
        self._refusals = Refusals(claims, self._goals)
        self._barred: set[Place] = set()
        self._elsewhere: set[Value | Pair] = set()  # goals that other shards cover
        self._priced: Priced | None = None
        self._number, self._used, self._opened = -1, 0, False
        self._fitted = (math.inf,) * 3
        self._skipped: list[Planned] = []
        self._plan()

    @property
    def claims(self) -> Claims:
        """The implementation's claims, without the values that it refused."""
        return self._refusals.claims

    @property
    def length(self) -> int:
        """How many numbers of the sequence are used."""
        return self._number + 1

    @property
    def is_priced(self) -> bool:
        """Whether building is dear, so that the order is that of prices."""
        return self._priced is not None

    @property
    def shapes(self) -> int:
        """How many shapes have run."""
        return len(self.record.shapes)

    @property
    def repeats(self) -> bool:
        """Whether the next case is the one before it again, with other data: it tells what is built."""
        own = self.prices.own
        return self._may_build and self.record.run == _FEW and not own.repeated and own.call > FAST

    @property
    def upcoming(self) -> Case | None:
        """The case that comes next if the present one changes nothing, None if that is not known."""
        return self._head.case if self._priced is None and self._head is not None else None

    def next(self) -> Step | None:
        """The next case; None if the core is finished, or the rest of it would take too long."""
        question = self._refusals.question
        if question is not None:
            return Step(Planned(question.case, "memory"), self._number, self._opened or self._shard[0] == 1)
        if self._drawn_for != self._refusals.version and self._priced is not None:
            self._price()
        if self.repeats:
            return Step(self._again(), self._number, own=True, again=True)
        if self._priced is None:
            step = self._next_plain()
            if step is not None or not self._skipped or self._shard[1] > 1:
                return step
        priced = self._priced or self._price()  # the time of a core may be over: what a pass needs is left
        if self.record.run >= self._limits.cases:
            return None
        planned = priced.next()
        self._number += planned is not None
        return None if planned is None else Step(planned, self._number, own=True)

    def _next_plain(self) -> Step | None:
        if not self._opened and not (self._head and self._head.opens):
            self._opened = True
            self._fit(drawn_anew=self._drawn_for != self._refusals.version)
        elif self._opened and self._extent != self._usual:
            self._fit()  # a call may have been dear, not rows
        while self._head is not None or self._drawn_again():
            planned = self._pop()
            self._number += 1
            self._used = max(self._used, planned.opens)
            if not self.claims.takes(planned.case):
                continue
            own = self._number % self._shard[1] == self._shard[0] - 1
            if not own and self._opened:
                self._elsewhere |= goals_of(planned)
            elif self.record.core + self.prices.own.seconds(planned, most=True) <= self._limits.core:
                return Step(planned, self._number, own)
            else:
                self._skipped.append(planned)
        return None

    def free(self) -> Step | None:
        """One more case that builds nothing; None if none adds anything, or if the order is the plain one."""
        planned = self._priced.free() if self._priced is not None else None
        self._number += planned is not None
        return None if planned is None else Step(planned, self._number, own=True)

    def saw(self, step: Step, *, refused: bool, seconds: float) -> None:
        """Take what came of a case, which took so many ``seconds``."""
        planned, question = step.planned, self._refusals.asked()
        if refused:
            if place_of(planned.case) not in self.record.places:
                self._barred.add(place_of(planned.case))
            if self._excuses and not step.again:
                self._refusals.refused(planned, question, self.record.done)
            return
        self._count(planned, seconds)
        self.record.ran(planned)
        if self._priced is not None:
            self._design.recorded(planned)
        self._refusals.ran(planned.case)
        if question is not None:
            self._refusals.answered(self.record.done)
        elif self._may_build and self.record.run > 1:
            self._choose(seconds)

    def saw_another(self, case: Case, probe: str, *, refused: bool, seconds: float) -> None:
        """Take what came of a case that is not of the core: its cost, and that it was not refused."""
        if not refused:
            self._refusals.ran(case)
            self._count(Planned(case, probe), seconds)
            self.record.visited(case)

    def _count(self, planned: Planned, seconds: float) -> None:
        prices, record = self.prices, self.record
        sure = prices.building_of(planned, "sure")
        prices.saw(planned, seconds)
        if sure or not prices.is_new:  # what is far beyond a price that is known is nobody's time
            expected = _STALL * (prices.own.seconds(planned) + prices.little + sure)
            record.stalled = min(record.stalled + max(0.0, seconds - expected), self._limits.most)
        record.core += min(seconds, _STALL * prices.own.seconds(planned, most=True))

    def ahead(self) -> Planned | None:
        """The case at a new shape for another process to run first, None if there is none."""
        return None if self._priced is None else self._priced.ahead()

    def compiled(self, planned: Planned, *, well: bool) -> None:
        """Another process has run this case; ``well``: without an error."""
        if self._priced is not None:
            self._priced.compiled(planned, well=well)

    def alone(self) -> None:
        """No other process runs cases first any more."""
        self.prices.forget_warmed()

    # what follows a core

    def is_worth(self, case: Case, seconds: float) -> bool:
        """Whether a case is worth what it builds, for which there are so many ``seconds``."""
        return not self._may_build or self._builds(case, "worst") <= max(seconds, self.prices.little)

    def where_paid(self, case: Case, seconds: float) -> Case:
        """This case if it builds nothing, else one with its data at a place that was paid for.

        Every _PAY_EVERY-th stays as it is, if what it builds takes no more than ``seconds``.
        """
        case = replace(case, gap=gap_at(case.N, case.layout)) if self.is_priced else case
        if not self._may_build or self._builds(case) <= self.prices.little:
            return case
        if case.seed % _PAY_EVERY == 0 and self.is_worth(case, seconds):
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

    def _builds(self, case: Case, trust: Any = "likely") -> float:
        return self.prices.building_of(Planned(case, "memory"), trust)

    @property
    def seconds_left(self) -> float:
        """Seconds that are left of the usual time; negative once it is over."""
        return self._limits.usual - self._limits.used - self.prices.spent + self.record.stalled

    # the order

    def _goals(self, claims: Claims) -> Goals:
        return goals(claims, self._extent, self._seed)

    def _done(self) -> frozenset[Any]:
        return frozenset(self.record.done | self._refusals.given_up)

    def _plan(self) -> None:
        self._drawn_for, self._plain, self._taken = self._refusals.version, self._cases(self._extent), 0
        self._head = next(iter(self._plain), None)

    def _cases(self, extent: Extent) -> Iterable[Planned]:
        """The cases of the plain order, of this extent, for what is not done."""
        used = ALL_OPENED + self._refusals.combinations if self._opened else self._used
        return drawn(self.claims, extent, self._seed, done=self._done(), used=used)

    def _pop(self) -> Planned:
        assert self._head is not None
        taken = self._head
        self._taken += 1
        self._head = next(self._rest(), None)
        return taken

    def _rest(self) -> Iterator[Planned]:
        return islice(iter(self._plain), self._taken, None)

    def _drawn_again(self) -> bool:
        """Draw cases for the goals of refused ones, without the refused values. Returns whether there are any."""
        if self._drawn_for == self._refusals.version or self._shard[1] > 1 or not self._opened:
            return False
        self._plan()
        return self._head is not None

    def _fit(self, *, drawn_anew: bool = False) -> None:
        """Take the extent that is affordable on a CPU. What a row costs can only fall."""
        own = self.prices.own
        costs, extent = (own.call, own.rate("row"), own.rate("column")), self._extent
        if self._device == "cpu" and self._shard[1] == 1 and not self.claims.shapes and costs != self._fitted:
            self._fitted = costs
            extent = affordable(self._usual, own, self._limits.core, self._cases)
        if extent != self._extent or drawn_anew:
            self._extent = extent
            self._plan()

    def _again(self) -> Planned:
        latest = next(reversed(self.record.places.values()))
        return Planned(replace(latest, seed=latest.seed + 1), "memory")

    def _choose(self, seconds: float) -> None:
        """Leave the plain order if what it builds is too dear, and go back to it if that is not so any more."""
        left, half = self.seconds_left, self._limits.usual / 2
        if self._priced is None:
            most = max(left, min(half, left + self._limits.usual), _CHEAP_SHARE * half)
            trust: Any = "sure" if seconds < half else "likely"  # one sample counts only if it is longer than that
            if self.prices.slow and self.prices.ahead(self._rest(), most, trust) > most:
                self._price()
        elif not self.prices.slow and not self._skipped:
            most, design = _CHEAP_SHARE * left, self._design
            rest = (planned for planned in self._rest() if goals_of(planned) & design.left)
            if most > 0 and self.prices.ahead(rest, most, "likely") <= most:
                number = sum(1 for planned in self._rest() if goals_of(planned) & design.left)
                if self.record.run + number <= self._limits.cases:
                    self._priced = None
                    self._plan()

    def _price(self) -> Priced:
        self._drawn_for = self._refusals.version
        number = ALL_OPENED + self._number + 1
        self._design = Design(self.claims, self._extent, self._seed, self._done(), number, steady=True)
        given_up = self._refusals.given_up
        self._priced = Priced(self.claims, self._design, self._limits, self.prices, self.record, given_up, self._barred)
        return self._priced

    # what was asked

    def coverage(self, cases: int) -> Coverage:
        """What was run of the core, and what was missed; ``cases``: of the whole cell. The core is over."""
        excused = self._refusals.excused
        if self._priced is None:
            left = self._goals(self.claims) - self.record.done - self._elsewhere - excused
            planned = self.record.run + len(self._skipped) + sum(1 for _ in self._rest())
            return self._told(planned, in_words(left))
        must = self._priced.must
        floor = [goal for goal in must.floor if goal not in self.record.reached | excused]
        least, shapes = must.least()
        missed = [*in_words(floor)]
        missed += [f"{cases:,} of {least:,} cases at least"] * (cases < least)
        missed += [f"{self.shapes} of {shapes} shapes at least"] * (self.shapes < shapes)
        return self._told(self.record.run + len(missed), tuple(missed))

    def _told(self, planned: int, missed: tuple[str, ...]) -> Coverage:
        return replace(self.so_far(), planned=planned, missed=missed, limit=self.limit if missed else "")

    def so_far(self) -> Coverage:
        """What was run of the core until now, and nothing missed: of a failed cell no more is needed."""
        return Coverage(
            planned=self.record.run,
            run=self.record.run,
            left_out=self._left_out(),
            refused=self._refusals.share(sizes_of(self._declared, self._extent, self._seed)),
            building=self.prices.building,
        )

    @property
    def limit(self) -> str:
        """What ends a core that is not finished, as in a ``Coverage``."""
        if self._refusals.excused < self._refusals.given_up:
            return "data"
        few = self.record.run >= self._limits.cases or (self._priced is None and not self._skipped)
        return "cases" if few else "time"

    def why_thin(self) -> str:
        """Why the core is not finished, if not for the number of cases: refused data, its time, or the prices of what
        was missed.
        """
        limits, prices = self._limits, self.prices
        if self.limit == "data":
            return "kinds of data were refused"
        if self._priced is None:
            needed = self.record.core + sum(prices.own.seconds(one, most=True) for one in self._skipped)
            return f"{limits.core:g} s are allowed, about {needed:.0f} s for all"
        must = self._priced.must
        out = [goal for goal in must.floor if goal not in self.record.reached | self._refusals.excused]
        return f"{limits.most:.3g} s are allowed, and {prices.told({must.priced_by(goal) for goal in out})}"

    def _left_out(self) -> str:
        wanted = self._goals(self.claims)
        refused = in_words(goal for goal in wanted & self._refusals.excused if len(goal) == 2)
        parts = [f"asked for: only layout {', '.join(self._declared.layouts)}"] * bool(self._asked)
        if self._priced is not None:
            out = self.record.reached | self._refusals.given_up
            tail = [goal for goal in self._priced.must.tail if goal not in out]
            facets = [name for axis, name in tail if axis == "facet"]
            blocks = [f"{block // 2 + 1} to {block}" for axis, block in tail if axis == "block"]
            words = [*facets, *in_words(goal for goal in tail if goal[0] not in ("facet", "block"))]
            words += [f"no several rows at N of {', '.join(blocks)}"] * bool(blocks)
            parts.append(f"{self._why_priced()}: {self.record.run} cases on {self.shapes} shapes")
            parts += [f"left out: {', '.join(words)}"] * bool(words)
        if not self.claims.shapes:
            parts.append(left_out(self._extent, self._usual, self.prices.own))
        parts += [f"refused with whatever else: {', '.join(refused)}"] * bool(refused)
        return "; ".join(filter(None, parts))

    def _why_priced(self) -> str:
        if self._skipped:
            return f"a core may take {self._limits.core:g} s"
        return self.prices.told()
