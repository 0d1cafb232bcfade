"""Run of one cell's core: choose the next case, find the value that is refused, mind the time, report the coverage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from normcheck.cases.axes import Pair, Value
from normcheck.cases.case import Case, Parameters, Place, place_of, with_parameters
from normcheck.cases.claims import Claims
from normcheck.cases.core import ALL_OPENED, Design, Planned, drawn, gap_at, goals_of
from normcheck.cases.goals import Extent, Goals, Sizes, goals, sizes_of
from normcheck.cases.missed import in_words
from normcheck.cases.short_core import ShortCore
from normcheck.cases.strategies import ELEMENTS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.affordable import affordable, left_out
from normcheck.gate.budget import Budget
from normcheck.gate.costs import Costs
from normcheck.gate.owed import Owed
from normcheck.gate.plan import ENOUGH_SHARE, Plan
from normcheck.gate.refusals import Refusals, with_value
from normcheck.result import Coverage

_FIRST_CALLS = {
    "parameters": 3,
    "both": 14,
    "rows": 70,
    "layout": 90,
    "empty": 9,
}  # of such a core, beside one for each N
_RUNS_OF_A_CASE, _PAIRS_OF_A_CASE = 3.0, 2.0  # on average, and at the end
_COLD_DIVISOR = 6  # the very first case is repeated if six like it would take all the time
_TIMES_AGAIN = 2  # the first case may be repeated
_PAY_EVERY = 16  # of the cases after a short core
_SEVERAL_WIDTHS = 4  # a core with fewer N uses all of its time
_CHEAP_SHARE = 0.25  # first calls that take no more of the seconds that are left are not dear any more


@dataclass(frozen=True)
class Step:
    """A case to run. ``number``: its place in the sequence of all shards; ``own``: whether this shard counts it."""

    planned: Planned
    number: int
    own: bool


class _Queue:
    """Cases to run, each made at its turn. ``head``: the next one, None at the end."""

    def __init__(self, cases: Iterable[Planned]) -> None:
        self._cases = iter(cases)
        self.head = next(self._cases, None)

    def pop(self) -> Planned:
        """Remove and return the next one."""
        assert self.head is not None
        taken, self.head = self.head, next(self._cases, None)
        return taken

    def count(self) -> int:
        """Empty the queue; returns how many were left."""
        left = (self.head is not None) + sum(1 for _ in self._cases)
        self.head = None
        return left


class CoreRun:
    """The core of one cell: ``next`` gives a case, ``saw`` takes its result.

    A refusal costs few cases: the refused value is found by asking for it alone, and the rest of the core is drawn
    again without it. Shards share one sequence: all of them run its opening, which shows what is refused, and then each
    runs its own part of the rest, which is not drawn again.

    If first calls are dear, so that the core would not end in time, the rest of it is a short core. Shards have none:
    what each measured would give each another sequence. Nor has an implementation that builds nothing.
    ``used``: seconds of the cell before its core. ``excuses``: whether the rest goes on without what is refused.
    """

    def __init__(self, cell: Cell, plan: Plan, used: float = 0.0, *, excuses: bool = True) -> None:
        self._excuses, short = excuses, plan.profile.short
        self._at_a_shape, self._usual_cases = short.at_a_shape, short.usual_cases
        self._device, self._shard = plan.device, plan.shard
        self.costs = Costs(plan.device)
        self._budget = Budget(plan, self.costs, used)
        self._short: ShortCore | None = None
        self._again: Planned | None = None  # a case at the place of the one before, to tell what a first call costs
        self._before_again, self._again_number = 0.0, 0  # seconds of the case before that one, and which time it is
        self._barred: set[Place] = set()
        self._demands = Owed(self.costs)
        self._declared, self._asked, self._builds = cell.claims, cell.layouts, cell.implementation.builds
        self._refusals = Refusals(self._declared, self._goals)
        self._seed, self._extent = plan.seed, plan.profile.extent.on(plan.device)
        self._done: set[Value | Pair] = set()
        self._elsewhere: set[Value | Pair] = set()  # goals that other shards cover
        self._number, self._run = -1, 0
        self._opened, self._used = False, 0
        self._usual, self._fitted = self._extent, (math.inf,) * 3
        self._queue = self._planned()
        self._skipped: list[Planned] = []

    @property
    def claims(self) -> Claims:
        """The implementation's claims, without the values that it refused."""
        return self._refusals.claims

    @property
    def length(self) -> int:
        """How many numbers of the sequence are used."""
        return self._number + 1

    def next(self) -> Step | None:
        """The next case; None if the core is finished, or the rest of it would take too long."""
        question = self._refusals.question
        if question is not None:
            return Step(Planned(question.case, "memory"), self._number, self._opened or self._shard[0] == 1)
        if self._again is not None:
            return Step(self._again, self._number, own=True)
        if self._short is not None:
            return self._next_of_short(self._short)
        if not self._opened and not (self._queue.head and self._queue.head.opens):
            self._end_opening()
        if self._opened and self._extent != self._usual:  # a call may have been dear, not rows
            self._fit()
        while self._queue.head or self._drawn_again():
            planned = self._queue.pop()
            self._number += 1
            self._used = max(self._used, planned.opens)
            if not self.claims.takes(planned.case):
                continue
            own = self._number % self._shard[1] == self._shard[0] - 1
            if not own and self._opened:
                self._elsewhere |= goals_of(planned)
            elif self._budget.affords(planned):
                return Step(planned, self._number, own)
            else:
                self._skipped.append(planned)
        return None

    @property
    def repeats(self) -> bool:
        """Whether the next case is the one before it again, with other data: it tells what a first call costs."""
        return self._again is not None

    def free(self) -> Step | None:
        """One more case where first calls were paid for; None if no case there adds to what a short core covers."""
        planned = self._short.more(math.inf) if self._short is not None else None
        self._number += planned is not None
        return None if planned is None else Step(planned, self._number, own=True)

    @property
    def upcoming(self) -> Case | None:
        """The case that comes next if the present one changes nothing, None if that is not known."""
        return self._queue.head.case if self._short is None and self._queue.head is not None else None

    def saw(self, step: Step, result: Result, seconds: float) -> None:
        """Count the ``result`` of a case that took so many ``seconds``."""
        planned = step.planned
        question = self._refusals.asked()
        again, self._again = self._again, None if question is None else self._again
        if result.refused:
            if place_of(planned.case) not in self.costs.places:
                self._barred.add(place_of(planned.case))
            if self._excuses and (question is not None or again is None):
                self._refusals.refused(planned, question, self._done)
            return
        first = not self.costs.places
        self.costs.count(planned, seconds)
        self._run += 1
        self._done |= goals_of(planned)
        self._refusals.ran(planned.case)
        if question is not None:
            self._refusals.answered(self._done)
        if question is None and self._shard[1] == 1 and self._builds:
            self._choose_core(planned, seconds, first=first, again=again is not None)

    def ahead(self) -> Planned | None:
        """The case at a new shape for another process to run first, None if there is none."""
        return None if self._short is None else self._short.ahead()

    def compiled(self, planned: Planned, *, well: bool) -> None:
        """Another process has run this case; ``well``: without an error."""
        if self._short is not None:
            self._short.compiled(planned, well=well)
            if well:
                self.costs.warm(planned.case)

    def alone(self) -> None:
        """No other process runs cases first any more."""
        self.costs.forget_warmed()
        if self._short is not None:
            self._short.alone()

    def saw_another(self, case: Case, probe: str, result: Result, seconds: float) -> None:
        """Count a case that is not of the core: its cost, and that it was not refused."""
        if not result.refused:
            self._refusals.ran(case)
            self.costs.count(Planned(case, probe), seconds)

    def is_worth(self, case: Case, seconds: float) -> bool:
        """Whether a case at a shape of its own is worth its first call, for which there are so many ``seconds``."""
        return not self.draws_where_paid or self.costs.first_calls(Planned(case, "memory"))[1] <= seconds

    @property
    def draws_where_paid(self) -> bool:
        """Whether first calls took most of the time, so that cases are drawn where these were paid for.

        Shards draw from one sequence, which what one of them measures must not change.
        """
        return self._shard[1] == 1 and (self._short is not None or self.costs.mostly_first_calls)

    @property
    def claims_to_draw(self) -> Claims:
        """The claims to draw cases from after the core: only of shapes that were paid for, if first calls are dear."""
        shapes = tuple(sorted(shape for shape in self.costs.shapes if math.prod(shape) <= max(ELEMENTS)))
        return replace(self.claims, shapes=shapes) if self.draws_where_paid and shapes else self.claims

    def where_paid(self, case: Case, seconds: float) -> Case:
        """This case with bias, dtypes, layout and gap that ran at its shape, if first calls are dear.

        Every _PAY_EVERY-th new one stays as it is, if its first call takes no more than ``seconds``.
        """
        if not self.draws_where_paid:
            return case
        if not self.costs.news(case):
            return replace(case, gap=gap_at(case.N, case.layout))
        if case.seed % _PAY_EVERY == 0 and self.is_worth(case, seconds):
            return case
        places = [place for place in self.costs.places if place[:2] == (case.M, case.N)]
        if not places:
            return case
        _, _, weight, bias, weight_dtype, residual_dtype, layout = places[case.seed % len(places)]
        there = replace(with_value(case, "layout", layout), gap=gap_at(case.N, layout))
        return with_parameters(there, Parameters(weight, bias, weight_dtype, residual_dtype))

    @property
    def seconds_after(self) -> float:
        """Seconds for the cases after the core."""
        return self._budget.after(short=self.is_short)

    def needs_more(self, cases: int) -> bool:
        """Whether a cell with a short core has judged too few cases, and has time for more."""
        return self.is_short and cases < self._least[0] and self._budget.left > -self._budget.grace

    @property
    def _least(self) -> tuple[int, int]:
        return self._budget.least(len(self.claims.shapes))

    def coverage(self, cases: int) -> Coverage:
        """What was run of the core, and what was missed; ``cases``: of the whole cell. The core is over."""
        if self._short is not None:
            owed = self._owed() | (self._demands.so_far - self._done - self._refusals.excused)
            apart = [goal for goal in owed if len(goal) == 3]
            missed = (*in_words(owed.difference(apart)), *self._budget.too_few(cases, len(self.claims.shapes)))
            left_out = [self._left_out(), *(f"not met: {words}" for words in in_words(apart))]
            planned = self._run + self._short.count(owed)
            return replace(self.so_far(), planned=planned, missed=missed, left_out="; ".join(filter(None, left_out)))
        wanted = self._goals(self.claims)
        left = wanted - self._done - self._elsewhere - self._refusals.excused
        planned = self._run + len(self._skipped) + self._queue.count()
        return replace(self.so_far(), planned=planned, missed=in_words(left))

    def so_far(self) -> Coverage:
        """What was run of the core until now, and nothing missed: of a failed cell no more is needed."""
        return Coverage(
            planned=self._run,
            run=self._run,
            left_out=self._left_out(),
            refused=self._refusals.share(sizes_of(self._declared, self._extent, self._seed)),
            building=self.costs.building,
        )

    def why_thin(self) -> str:
        """Why the core is not finished: refused data, its time limit with the time for all, or the number of cases."""
        budget = self._budget
        if self._refusals.excused < self._refusals.given_up:
            return "kinds of data were refused"
        if self.is_short and budget.left < max(self.costs.dearest, budget.wall / 10):
            return (
                f"{budget.wall:.3g} s are allowed with compiling and the like, which took {self.costs.building:.1f} s"
            )
        if budget.builds_too_much:
            return f"compiling and the like took {self.costs.building:.0f} s"
        if not self._skipped:
            return f"{self._run:,} cases are allowed"
        needed = self.costs.spent + sum(map(self.costs.expected, self._skipped))
        about = f", about {needed:.0f} s for all" if needed > budget.core_seconds else ""
        return f"{budget.core_seconds:g} s are allowed{about}"

    def _goals(self, claims: Claims) -> Goals:
        return goals(claims, self._extent, self._seed)

    def _planned(self) -> _Queue:
        self._planned_for = self._refusals.version
        return _Queue(self._cases(self._extent))

    def _cases(self, extent: Extent) -> Iterable[Planned]:
        """The cases of a core of this extent for what is not done."""
        done = frozenset(self._done | self._refusals.given_up)
        used = ALL_OPENED + self._refusals.combinations if self._opened else self._used
        return drawn(self.claims, extent, self._seed, done=done, used=used)

    def _drawn_again(self) -> bool:
        """Draw cases for the goals of refused ones, without the refused values. Returns whether there are any."""
        if self._planned_for == self._refusals.version or self._shard[1] > 1 or not self._opened:
            return False
        self._queue = self._planned()
        return self._queue.head is not None

    def _end_opening(self) -> None:
        """End the opening of the core: the cost of a row is known by now, and so the extent that is affordable."""
        self._opened = True
        self._fit(planned=self._planned_for == self._refusals.version)

    def _fit(self, *, planned: bool = True) -> None:
        """Take the extent that is affordable. On a GPU first calls cost time, and rows do not.

        ``planned``: whether the present queue is of use. What a row costs can only fall.
        """
        prices = self.costs.call, self.costs.row, self.costs.column
        extent = self._extent
        if self._device == "cpu" and self._shard[1] == 1 and not self.claims.shapes and prices != self._fitted:
            self._fitted = prices
            extent = affordable(self._usual, self.costs, self._budget.core_seconds, self._cases)
        if extent != self._extent or not planned:
            self._extent = extent
            self._queue = self._planned()

    @property
    def is_short(self) -> bool:
        """Whether the core is a short one, because first calls are dear."""
        return self._short is not None

    def _choose_core(self, planned: Planned, seconds: float, *, first: bool, again: bool) -> None:
        """Go over to a short core if the first calls that are left take too long, and back if they do not any more.

        A case that takes long is repeated at once: only that tells its first call from slow rows or a slow machine.
        ``first``: it was the first of the cell; ``again``: it was such a repetition.
        """
        left, wall = self._budget.left, self._budget.wall
        if self._short is not None:
            if self.costs.knows_sizes and self._ahead() < _CHEAP_SHARE * left:
                self._short, self.costs.dear = None, False
                self._queue = self._planned()
            return
        dear = self._ahead() > max(left, wall / 2)
        if again:
            if seconds > self._before_again / 2 and self._again_number < _TIMES_AGAIN:
                self._repeat(planned)  # the machine may have been busy
            elif dear and seconds < self._before_again / 2:
                self._short, self.costs.dear = self._new_short(), True
            return
        long = seconds > (wall / _COLD_DIVISOR if first else max(left, 0.0) / self._usual_cases)
        if planned.case.M and (long if first or not self.costs.repeated else dear and long):
            self._before_again, self._again_number = seconds, 0
            self._repeat(planned)

    def _repeat(self, planned: Planned) -> None:
        self._again_number += 1
        self._again = replace(planned, case=replace(planned.case, seed=planned.case.seed + 1), probe="memory")

    def _ahead(self) -> float:
        """Seconds of the first calls that are left of a core that is not short."""
        return self.costs.ahead({"N": sum(map(len, self._sizes().widths.values())), **_FIRST_CALLS})

    def _new_short(self) -> ShortCore:
        self._planned_for = self._refusals.version
        done, number = frozenset(self._done | self._refusals.given_up), ALL_OPENED + self._number + 1
        design = Design(self.claims, self._extent, self._seed, done, number, steady=True)
        return ShortCore(self.claims, design, self.costs, self._barred, self._at_a_shape)

    def _next_of_short(self, short: ShortCore) -> Step | None:
        if self._planned_for != self._refusals.version:
            self._short = short = self._new_short()
        budget, seconds, (cases, shapes) = self._budget, self._budget.left, self._least
        widths = len(self.costs.widths)
        missing = max(0, shapes - len(self.costs.shapes), min(shapes, _SEVERAL_WIDTHS) - widths)
        owed = self._owed()
        data = max(len(owed) / _PAIRS_OF_A_CASE, cases - self._run) * _RUNS_OF_A_CASE * self.costs.call
        data = min(data, seconds / 3) if missing else data
        enough = not missing and widths >= _SEVERAL_WIDTHS and budget.wall - seconds > ENOUGH_SHARE * budget.usual_wall
        shapes_take = missing * self.costs.first_call("N")
        planned = None if enough else short.next(seconds - short.kept(owed), shapes_take, data)
        planned = planned or short.last(seconds, owed)
        if planned is None and not enough:
            planned = short.next(seconds, 0.0, 0.0)
        late = seconds + budget.late
        if planned is None and owed:
            planned = short.last(late, owed)
        if planned is None and missing:
            planned = short.next(late, shapes_take, 0.0)
        if planned is None and self._run < cases:
            planned = short.more(seconds + budget.grace)
        if planned is None:
            return None
        self._number += 1
        return Step(planned, self._number, own=True)

    def _owed(self) -> set[Value | Pair]:
        """What a short core must cover yet."""
        wanted, sizes = self._goals(self.claims), self._sizes()
        needed = self._demands.of(wanted, sizes, self._extent.elements, self._budget.usual_wall, self._done)
        return needed - self._done - self._refusals.given_up

    def _sizes(self) -> Sizes:
        return sizes_of(self.claims, self._extent, self._seed)

    def _left_out(self) -> str:
        wanted = self._goals(self.claims)
        refused = in_words(goal for goal in wanted & self._refusals.excused if len(goal) == 2)
        dear = "" if self.claims.shapes else left_out(self._extent, self._usual, self.costs)
        if self._short is not None:
            first = f"a first call takes {self.costs.first_call('N'):.2g} s here"
            dear = f"{first}: a short core of {len(self.costs.shapes)} shapes"
        if self._asked:
            dear = "; ".join(filter(None, [f"asked for: only layout {', '.join(self._declared.layouts)}", dear]))
        return "; ".join([dear] * bool(dear) + [f"refused with whatever else: {', '.join(refused)}"] * bool(refused))
