"""Run of one cell's core: choose the next case, find the value that is refused, mind the time, report the coverage."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.axes import MODEL_SIZES, Pair, Value, covered, pairs_of, parts_of
from normcheck.cases.case import EXPANDED, STRIDED, Case, Place, place_of
from normcheck.cases.claims import REFUSABLE, Claims, claims_of
from normcheck.cases.core import ALL_OPENED, GAPS, Planned, drawn, goals_of
from normcheck.cases.goals import Extent, goals, key_of, low_of, sizes_of
from normcheck.cases.missed import in_words
from normcheck.cases.short_core import ShortCore, required
from normcheck.cases.strategies import ELEMENTS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.costs import Costs
from normcheck.gate.plan import DEAR_SECONDS, ENOUGH_SHARE, Plan
from normcheck.gate.shrink import seed_of
from normcheck.result import Coverage

COSTLY_ROW_SECONDS, DEAR_ROW_SECONDS = 1e-4, 6e-4
"""A row that takes longer is costly, or dear. Torch takes some 2e-6, our tiled kernels under the interpreter 2e-4, a
kernel with a program for each row 2e-3 and more."""

COSTLY_COLUMN_SECONDS = 1e-5
"""A column of the widest rows that takes longer is costly: an interpreted kernel that takes a row in small blocks needs
1e-4, one with a whole row in a block less than 2e-6."""

_MOST_BUILDING = 2.0  # compiling and the like may take so many times the seconds of the core, beside them
_USUAL_CASES = 250  # of a core that is not short
_FIRST_CALLS = {
    "parameters": 3,
    "both": 14,
    "rows": 70,
    "layout": 90,
    "empty": 9,
}  # of such a core, beside one for each N
_CHEAP_CALLS = 10  # a first call with other rows that takes no more calls is cheap: all classes of M are asked for
_RUNS_OF_A_CASE, _PAIRS_OF_A_CASE = 3.0, 2.0  # on average, and at the end
_COLD_DIVISOR = 6  # the very first case is repeated if six like it would take all the time
_PAY_EVERY = 16  # of the cases after a short core
_GRACE_SHARE = 0.25  # of its time that a short core may take longer, for cases that compile nothing, if it has too few
_SEVERAL_WIDTHS = 4  # a core with fewer N uses all of its time
_CHEAP_SHARE = 0.25  # first calls that take no more of the seconds that are left are not dear any more


def model_size_of(cell: Cell, seed: int) -> int:
    """The hidden size of a well-known model that is in the core of this cell; cells differ in it."""
    return MODEL_SIZES[seed_of(cell, seed) % len(MODEL_SIZES)]


@dataclass(frozen=True)
class Step:
    """A case to run. ``number``: its place in the sequence of all shards; ``own``: whether this shard counts it."""

    planned: Planned
    number: int
    own: bool


@dataclass(frozen=True)
class _Question:
    """A value that may be why a case was refused. ``case`` asks for it alone: a case that ran, but with this value."""

    axis: str
    value: Any
    case: Case


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
    what each measured would give each another sequence. ``used``: seconds of the cell before its core.
    """

    def __init__(self, cell: Cell, plan: Plan, used: float = 0.0) -> None:
        self._device, self._limit, self._shard = plan.device, plan.profile.core_seconds, plan.shard
        self._limits, self._before = plan.profile.short, used
        self._seconds_after = plan.profile.seconds
        self.costs = Costs(plan.device)
        self._short: ShortCore | None = None
        self._again: Planned | None = None  # a case at the place of the one before, to tell what a first call costs
        self._before_again = 0.0  # seconds of the case before that one
        self._barred: set[Place] = set()
        self._required: tuple[Any, set[Value | Pair]] = (None, set())
        self._declared = self._claims = claims_of(cell.op, cell.implementation, cell.dtype)
        self._seed, self._extent = plan.seed, plan.profile.extent.on(plan.device)
        self._model_size = model_size_of(cell, plan.seed)
        self._done: set[Value | Pair] = set()
        self._elsewhere: set[Value | Pair] = set()  # goals that other shards cover
        self._given_up: set[Value | Pair] = set()  # goals that are refused for a combination of values
        self._only_refused: Counter[Value | Pair] = Counter()  # values that no case had but so many refused ones
        self._number, self._run, self._combinations, self._fruitless = -1, 0, 0, 0
        self._admitted: set[tuple[str, Any]] = set()
        self._base: Case | None = None
        self._questions: deque[_Question] = deque()
        self._suspect: Planned | None = None
        self._opened, self._used = False, 0
        self._usual = self._extent
        self._queue = self._planned()
        self._skipped: list[Planned] = []

    @property
    def claims(self) -> Claims:
        """The implementation's claims, without the values that it refused."""
        return self._claims

    @property
    def length(self) -> int:
        """How many numbers of the sequence are used."""
        return self._number + 1

    def next(self) -> Step | None:
        """The next case; None if the core is finished, or the rest of it would take too long."""
        if self._questions:
            return Step(Planned(self._questions[0].case, "memory"), self._number, self._opened or self._shard[0] == 1)
        if self._again is not None:
            return Step(self._again, self._number, own=True)
        if self._short is not None:
            return self._next_of_short(self._short)
        if not self._opened and not (self._queue.head and self._queue.head.opens):
            self._end_opening()
        if self._opened and self._extent != self._affordable_extent():  # a call was dear, not rows
            self._extent = self._affordable_extent()
            self._queue = self._planned()
        while self._queue.head or self._drawn_again():
            planned = self._queue.pop()
            self._number += 1
            self._used = max(self._used, planned.opens)
            if not self._claims.takes(planned.case):
                continue
            own = self._number % self._shard[1] == self._shard[0] - 1
            if not own and self._opened:
                self._elsewhere |= goals_of(planned)
            elif self._affordable(planned):
                return Step(planned, self._number, own)
            else:
                self._skipped.append(planned)
        return None

    def saw(self, step: Step, result: Result, seconds: float) -> None:
        """Count the ``result`` of a case that took so many ``seconds``."""
        planned = step.planned
        question = self._questions.popleft() if self._questions else None
        again, self._again = self._again, None if question is None else self._again
        if result.refused:
            if place_of(planned.case) not in self.costs.places:
                self._barred.add(place_of(planned.case))
            if question is not None or again is None:
                self._refused(planned, question)
            return
        first = not self.costs.places
        self.costs.count(planned, seconds)
        self._run += 1
        self._done |= goals_of(planned)
        self._admitted |= set(_refusable(planned.case).items())
        if planned.case.M > 1 and (self._base is None or planned.case.M * planned.case.N < self._base.M * self._base.N):
            self._base = planned.case
        if question is not None:
            self._end_questions()
        if question is None and self._shard[1] == 1:
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
        """Count the cost of a case after the core."""
        if not result.refused:
            self.costs.count(Planned(case, probe), seconds)

    def is_worth(self, case: Case, seconds: float) -> bool:
        """Whether a case at a shape of its own is worth its first call, for which there are so many ``seconds``."""
        return not self._draws_where_paid or self.costs.first_calls(Planned(case, "memory"))[1] <= seconds

    @property
    def _draws_where_paid(self) -> bool:
        """Whether first calls took most of the time, so that cases are drawn where these were paid for.

        Shards draw from one sequence, which what one of them measures must not change.
        """
        return self._shard[1] == 1 and (self._short is not None or self.costs.mostly_first_calls)

    @property
    def claims_to_draw(self) -> Claims:
        """The claims to draw cases from after the core: only of shapes that were paid for, if first calls are dear."""
        shapes = tuple(sorted(shape for shape in self.costs.shapes if math.prod(shape) <= max(ELEMENTS)))
        return replace(self._claims, shapes=shapes) if self._draws_where_paid and shapes else self._claims

    def where_paid(self, case: Case) -> Case:
        """This case with bias, dtype of the weights and layout that ran at its shape, if first calls are dear.

        Every _PAY_EVERY-th case stays as it is.
        """
        if not self._draws_where_paid or case.seed % _PAY_EVERY == 0 or not self.costs.news(case):
            return case
        places = [place for place in self.costs.places if place[:2] == (case.M, case.N)]
        if not places:
            return case
        _, _, bias, weight_dtype, layout = places[case.seed % len(places)]
        return replace(_with(case, "layout", layout), bias=bias, weight_dtype=weight_dtype)

    @property
    def seconds_after(self) -> float:
        """Seconds for the cases after the core; fewer after a short core that took all of its time, or longer."""
        seconds = self._seconds_after
        return seconds if self._short is None else min(seconds, max(seconds / 4, seconds / 2 + self._seconds_left()))

    def needs_more(self, cases: int) -> bool:
        """Whether a cell with a short core has judged too few cases, and has time for more."""
        return self._short is not None and cases < self.least[0] and self._seconds_left() > 0

    def coverage(self, cases: int) -> Coverage:
        """What was run of the core, and what was missed; ``cases``: of the whole cell. The core is over."""
        if self._short is not None:
            owed = self._owed()
            apart = [goal for goal in owed if len(goal) == 3]
            missed = (*in_words(owed.difference(apart)), *self._too_few(cases))
            left_out = [self._left_out(), *(f"not met: {words}" for words in in_words(apart))]
            planned = self._run + self._short.count(owed)
            return replace(self.so_far(), planned=planned, missed=missed, left_out="; ".join(filter(None, left_out)))
        wanted = goals(self._claims, self._extent, self._seed, self._model_size)
        left = wanted - self._done - self._elsewhere - self._given_up
        planned = self._run + len(self._skipped) + self._queue.count()
        return replace(self.so_far(), planned=planned, missed=in_words(left))

    def so_far(self) -> Coverage:
        """What was run of the core until now, and nothing missed: of a failed cell no more is needed."""
        return Coverage(
            planned=self._run,
            run=self._run,
            left_out=self._left_out(),
            refused=self._refused_share(),
            building=self.costs.building,
        )

    def why_thin(self) -> str:
        """Why the core is not finished: its time limit, with the time for all of it, or the number of cases."""
        if self._short is not None and self._seconds_left() < max(self.costs.dearest, self._wall / 10):
            return f"{self._wall:g} s are allowed with compiling and the like, which took {self.costs.building:.1f} s"
        if self.costs.building > _MOST_BUILDING * self._limit:
            return f"compiling and the like took {self.costs.building:.0f} s"
        if not self._skipped:
            return f"{self._run:,} cases are allowed"
        needed = self.costs.spent + sum(map(self.costs.expected, self._skipped))
        about = f", about {needed:.0f} s for all" if needed > self._limit else ""
        return f"{self._limit:g} s are allowed{about}"

    def _planned(self) -> _Queue:
        self._planned_for = self._claims, self._combinations
        done = frozenset(self._done | self._given_up)
        used = ALL_OPENED + self._combinations if self._opened else self._used
        return _Queue(drawn(self._claims, self._extent, self._seed, model_size=self._model_size, done=done, used=used))

    def _drawn_again(self) -> bool:
        """Draw cases for the goals of refused ones, without the refused values. Returns whether there are any."""
        if self._planned_for == (self._claims, self._combinations) or self._shard[1] > 1 or not self._opened:
            return False
        self._queue = self._planned()
        return self._queue.head is not None

    def _end_opening(self) -> None:
        """End the opening of the core: the cost of a row is known by now, and so the extent that is affordable."""
        self._opened = True
        if self._extent != self._affordable_extent() or self._planned_for != (self._claims, self._combinations):
            self._extent = self._affordable_extent()
            self._queue = self._planned()

    def _affordable_extent(self) -> Extent:
        """The extent of the core for the cost of a row. On a GPU first calls cost time, and rows do not."""
        if self._device != "cpu" or self._shard[1] > 1 or self._claims.shapes:
            return self._usual
        extent = self._usual
        if DEAR_ROW_SECONDS < self.costs.row < math.inf:
            extent = extent.with_dear_rows
        elif COSTLY_ROW_SECONDS < self.costs.row < math.inf:
            extent = extent.with_costly_rows
        return replace(extent, fine=False) if COSTLY_COLUMN_SECONDS < self.costs.column < math.inf else extent

    def _refused(self, planned: Planned, question: _Question | None) -> None:
        """Look for the value that is refused, by asking for one at a time."""
        if question is not None:
            self._drop(question.axis, question.value)
            return
        values = {axis: v for axis, v in _refusable(planned.case).items() if (axis, v) not in self._admitted}
        self._suspect = planned
        if self._base is None or len(values) == 1:
            if len(values) == 1:
                self._drop(*next(iter(values.items())))
            return  # nothing has run yet: another case tells more
        if not values:
            self._give_up()
        for axis, value in values.items():
            self._questions.append(_Question(axis, value, _with(self._base, axis, value)))
        if self._claims.shapes and set(values) & {"M", "N"}:
            self._questions = deque(q for q in self._questions if q.axis not in ("M", "N"))
            if not self._questions:
                self._give_up()

    def _end_questions(self) -> None:
        """If each value is accepted alone, give up the case: it was refused for a combination of them."""
        if not self._questions and self._suspect is not None:
            self._give_up()

    def _drop(self, axis: str, value: Any) -> None:
        self._questions.clear()
        self._suspect = None
        self._claims = self._claims.without(axis, value)

    def _give_up(self) -> None:
        """Leave out the pairs of sizes and declarations in a refused case.

        If all of them are left out already, other cases may reach the case's other goals; after _FRUITLESS such
        refusals, these are left out as well. So is a value, with whatever else, that only refused cases had, _OFTEN.
        """
        assert self._suspect is not None
        suspect, self._suspect = self._suspect, None
        case = suspect.case
        if self._claims.shapes:
            self._claims = self._claims.without_shape((case.M, case.N))
        self._combinations += 1
        whole = {axis: values for axis, values in covered(case, "memory").items() if axis in _STRUCTURAL}
        together: set[Value | Pair] = {pair for pair in pairs_of(whole) if pair not in self._done | self._given_up}
        self._fruitless += not together
        if not together and self._fruitless > _FRUITLESS:
            together = set(goals_of(suspect)) - self._done
        self._given_up |= together
        self._only_refused.update(goal for goal in goals_of(suspect) if len(goal) == 2 and goal not in self._done)
        for goal in goals_of(suspect):
            if len(goal) == 2 and goal not in self._done and self._only_refused[goal] == _OFTEN:
                wanted = goals(self._claims, self._extent, self._seed, self._model_size)
                self._given_up |= {one for one in wanted if goal in parts_of(one)}

    def _affordable(self, planned: Planned) -> bool:
        if self.costs.building > _MOST_BUILDING * self._limit:
            return False
        return self.costs.spent + self.costs.expected(planned) <= self._limit

    @property
    def is_short(self) -> bool:
        """Whether the core is a short one, because first calls are dear."""
        return self._short is not None

    @property
    def least(self) -> tuple[int, int]:
        """The cases, and the shapes among them, that a cell with a short core must have judged."""
        limits, seconds = self._limits, self.costs.dearest
        cases, shapes = limits.few if seconds >= DEAR_SECONDS else (limits.cases, limits.shapes)
        if 3 * seconds > limits.gpu_seconds:
            shapes = min(shapes, 3)
        return cases, min(shapes, len(self._claims.shapes) or shapes)

    @property
    def _usual_wall(self) -> float:
        """Seconds that a short core may take, with compiling and the like, if three shapes do not take longer."""
        return (1 + _MOST_BUILDING) * self._limit if self._device == "cpu" else self._limits.gpu_seconds

    @property
    def _wall(self) -> float:
        """Seconds that a short core may take, with compiling and the like."""
        is_longer = self._device != "cpu" and 3 * self.costs.dearest > self._usual_wall
        return self._limits.most_gpu_seconds if is_longer else self._usual_wall

    def _seconds_left(self) -> float:
        return self._wall - self._before - self.costs.spent - self.costs.building

    def _choose_core(self, planned: Planned, seconds: float, *, first: bool, again: bool) -> None:
        """Go over to a short core if the first calls that are left take too long, and back if they do not any more.

        A case that takes long is repeated at once: only that tells its first call from slow rows or a slow machine.
        ``first``: it was the first of the cell; ``again``: it was such a repetition.
        """
        left = self._seconds_left()
        if self._short is not None:
            if self.costs.knows_sizes and self._ahead() < _CHEAP_SHARE * left:
                self._short, self.costs.dear = None, False
                self._queue = self._planned()
            return
        dear = self._ahead() > max(left, self._wall / 2)
        if again:
            if dear and seconds < self._before_again / 2:
                self._short, self.costs.dear = self._new_short(), True
            return
        long = seconds > (self._wall / _COLD_DIVISOR if first else max(left, 0.0) / _USUAL_CASES)
        if planned.case.M and (long if first or not self.costs.repeated else dear and long):
            self._before_again = seconds
            self._again = replace(planned, case=replace(planned.case, seed=planned.case.seed + 1), probe="memory")

    def _ahead(self) -> float:
        """Seconds of the first calls that are left of a core that is not short."""
        sizes = sizes_of(self._claims, self._extent, self._seed, self._model_size)
        return self.costs.ahead({"N": sum(map(len, sizes.widths.values())), **_FIRST_CALLS})

    def _new_short(self) -> ShortCore:
        self._planned_for = self._claims, self._combinations
        return ShortCore(
            self._claims,
            self._extent,
            self._seed,
            model_size=self._model_size,
            done=frozenset(self._done | self._given_up),
            number=ALL_OPENED + self._number + 1,
            prices=self.costs,
            barred=self._barred,
        )

    def _next_of_short(self, short: ShortCore) -> Step | None:
        if self._planned_for != (self._claims, self._combinations):
            self._short = short = self._new_short()
        seconds, (cases, shapes) = self._seconds_left(), self.least
        widths = len({n for _, n in self.costs.shapes})
        missing = max(0, shapes - len(self.costs.shapes), min(shapes, _SEVERAL_WIDTHS) - widths)
        owed = self._owed()
        data = max(len(owed) / _PAIRS_OF_A_CASE, cases - self._run) * _RUNS_OF_A_CASE * self.costs.call
        data = min(data, seconds / 3) if missing else data
        enough = not missing and widths >= _SEVERAL_WIDTHS and self._wall - seconds > ENOUGH_SHARE * self._usual_wall
        planned = None if enough else short.next(seconds, missing * self.costs.first_call("N"), data)
        planned = planned or short.last(seconds, owed)
        if planned is None and not enough:
            planned = short.next(seconds, 0.0, 0.0)
        if planned is None and self._run < cases:
            planned = short.more(seconds + _GRACE_SHARE * self._usual_wall)
        if planned is None:
            return None
        self._number += 1
        return Step(planned, self._number, own=True)

    def _owed(self) -> set[Value | Pair]:
        """What a short core must cover yet. Sizes as well, if they cost little more than a repeated call."""
        cheap = {axis for axis, news in (("m", "rows"), ("n", "N")) if self._is_cheap(news)}
        key = len(self.costs.shapes), *sorted(cheap), self._planned_for
        if self._required[0] != key:
            wanted = goals(self._claims, self._extent, self._seed, self._model_size)
            self._required = key, required(wanted, self._done, cheap)
        return self._required[1] - self._done - self._given_up

    def _is_cheap(self, news: str) -> bool:
        return self.costs.first_call(news) <= _CHEAP_CALLS * self.costs.call

    def _too_few(self, cases: int) -> Iterator[str]:
        least, shapes = self.least
        if cases < least:
            yield f"{cases:,} of {least:,} cases at least"
        if len(self.costs.shapes) < shapes:
            yield f"{len(self.costs.shapes)} of {shapes} shapes at least"

    def _left_out(self) -> str:
        wanted = goals(self._claims, self._extent, self._seed, self._model_size)
        refused = in_words(goal for goal in wanted & self._given_up if len(goal) == 2)
        dear = self._too_dear()
        if self._short is not None:
            first = f"a first call takes {self.costs.first_call('N'):.2g} s here"
            dear = f"{first}: a short core of {len(self.costs.shapes)} shapes"
        return "; ".join([dear] * bool(dear) + [f"refused with whatever else: {', '.join(refused)}"] * bool(refused))

    def _too_dear(self) -> str:
        if self._extent == self._usual or self._claims.shapes:
            return ""
        reasons = []
        if self._extent.rows < self._usual.rows:
            reasons.append(
                f"a row costs {self.costs.row * 1e3:.1f} ms here: no M above {self._extent.rows} in the core"
            )
        elif self._extent.paired_rows < self._usual.paired_rows:
            few = f"M above {self._extent.paired_rows} in few cases of the core"
            reasons.append(f"a row costs {self.costs.row * 1e3:.1f} ms here: {few}")
        if self._extent.fine != self._usual.fine:
            what = "not every layout and dy in each class of N"
            reasons.append(f"a column costs {self.costs.column * 1e3:.2f} ms here: {what} in the core")
        return "; ".join(reasons)

    def _refused_share(self) -> float:
        """The share, 0 to 1, of the declared sizes and layouts that was refused.

        A refused bias or fp32 weight does not count: an op without them is whole.
        """
        if self._claims == self._declared and not self._given_up:
            return 0.0
        sizes = sizes_of(self._declared, self._extent, self._seed, self._model_size).every()
        promised = [(m, n, layout) for m, n in sizes if m for layout in self._declared.layouts]
        return sum(not self._takes(*one) for one in promised) / len(promised) if promised else 0.0

    def _takes(self, m: int, n: int, layout: str) -> bool:
        if self._claims.shapes and (m, n) not in self._claims.shapes:
            return False
        if not all(self._claims.admits(axis, value) for axis, value in (("M", m), ("N", n), ("layout", layout))):
            return False
        low, fit = key_of(n)
        axes = {"N": (n,), "m": (low_of(m),), "n": ((low, fit),), "width": (low,), "fit": (fit,), "layout": (layout,)}
        return self._given_up.isdisjoint(pairs_of(axes))


_FRUITLESS = 20  # refusals that gave no new pair
_OFTEN = 5
_STRUCTURAL = ("N", "m", "n", "width", "fit", "layout", "bias", "weight_dtype", "shape")


def _refusable(case: Case) -> dict[str, Any]:
    """Axis -> value, for the axes of a case of which an implementation may refuse a value."""
    return {**{axis: getattr(case, axis) for axis in REFUSABLE}, "N": case.N, "M": case.M}


def _with(base: Case, axis: str, value: Any) -> Case:
    changed: dict[str, Any] = {axis: value}
    if axis == "layout":
        changed["gap"] = GAPS[0] if value in STRIDED else 0
        changed["dy"] = "normal" if value in EXPANDED else base.dy
    return replace(base, **changed)
