"""The core of one cell as it is run: what comes next, what a refusal means, what it costs, and what was not reached."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.axes import MODEL_SIZES, Pair, Value, covered, pairs_of
from normcheck.cases.case import EXPANDED, STRIDED, Case
from normcheck.cases.claims import REFUSABLE, Claims, claims_of
from normcheck.cases.core import ALL_OPENED, GAPS, Planned, drawn, goals_of
from normcheck.cases.goals import Extent, goals, key_of, low_of, sizes_of
from normcheck.cases.missed import in_words
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.plan import Plan
from normcheck.gate.shrink import seed_of
from normcheck.result import Coverage

RUNS = {"reason": 1.0, "memory": 2.0, "rows": 5.5}
"""How much a case costs by what its probes are asked, in runs of the kernel: counted in the probes' calls."""

COSTLY_ROW, DEAR_ROW = 1e-4, 6e-4
"""Seconds from which on a row costs something, and from which on it is dear. Torch takes some 2e-6, our tiled kernels
under the interpreter 2e-4, a kernel with a program for each row 2e-3 and more."""

COSTLY_COLUMN = 1e-5
"""Seconds from which on a column of the widest rows costs something, as with an interpreted kernel that takes a row in
small blocks, 1e-4; one with a whole row in a block takes less than 2e-6."""

_BUILDING = 2.0  # times the seconds of a core: what compiling and the like may take beside it
_JUDGING = {"cpu": 2.5e-6, "cuda": 2e-8}  # seconds for an element, at most; for planning only


def model_size_of(cell: Cell, seed: int) -> int:
    """The hidden size of a well-known model that is in the core of this cell: another one in another cell."""
    return MODEL_SIZES[seed_of(cell, seed) % len(MODEL_SIZES)]


@dataclass(frozen=True)
class Step:
    """A case to run. ``number``: its place in the sequence that shards share; ``own``: whether this shard counts it."""

    planned: Planned
    number: int
    own: bool


@dataclass(frozen=True)
class _Question:
    """A value that may be why a case was refused, asked alone: a case that was run before, but for this value."""

    axis: str
    value: Any
    case: Case


class _Queue:
    """Cases to run, each made when it is its turn. ``head``: the next one, None if there is none."""

    def __init__(self, cases: Iterable[Planned]) -> None:
        self._cases = iter(cases)
        self.head = next(self._cases, None)

    def pop(self) -> Planned:
        """The next one, which is taken away."""
        assert self.head is not None
        taken, self.head = self.head, next(self._cases, None)
        return taken

    def count(self) -> int:
        """How many are left, once all are made: then none is."""
        left = (self.head is not None) + sum(1 for _ in self._cases)
        self.head = None
        return left


class CoreRun:
    """Gives the cases of a core one by one and is told what became of each.

    What an implementation refuses costs little: the value that it refuses is found by asking it alone, and the rest of
    the core is drawn anew without it. Shards share one sequence: all of them run what opens the core, which shows what
    is refused, and then each its own part of the rest, which is not drawn anew any more.
    """

    def __init__(self, cell: Cell, plan: Plan) -> None:
        self._device, self._limit, self._shard = plan.device, plan.profile.core_seconds, plan.shard
        self._declared = self._claims = claims_of(cell.op, cell.implementation, cell.dtype)
        self._seed, self._extent = plan.seed, plan.profile.extent.on(plan.device)
        self._model_size = model_size_of(cell, plan.seed)
        self._done: set[Value | Pair] = set()
        self._elsewhere: set[Value | Pair] = set()  # what other shards cover
        self._given_up: set[Value | Pair] = set()  # what is refused only together
        self._number, self._run, self._combinations, self._fruitless = -1, 0, 0, 0
        self._admitted: set[tuple[str, Any]] = set()
        self._base: Case | None = None
        self._questions: deque[_Question] = deque()
        self._suspect: Planned | None = None
        self._spent = self._building = 0.0
        self._row = self._call = self._column = math.inf
        self._opened, self._used = False, 0
        self._usual = self._extent
        self._queue = self._planned()
        self._skipped: list[Planned] = []

    @property
    def claims(self) -> Claims:
        """What is left of what the implementation declares."""
        return self._claims

    @property
    def length(self) -> int:
        """How many numbers of the sequence have been given away."""
        return self._number + 1

    def next(self) -> Step | None:
        """The next case, None if the core is finished or nothing that is left of it is affordable."""
        if self._questions:
            return Step(Planned(self._questions[0].case, "memory"), self._number, self._opened or self._shard[0] == 1)
        if not self._opened and not (self._queue.head and self._queue.head.opens):
            self._look_ahead()
        if self._opened and self._extent != self._affords():  # what made rows look dear was the cost of a call
            self._extent = self._affords()
            self._queue = self._planned()
        while self._queue.head or self._drawn_anew():
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
        """Take note of what became of a case, and of what it took."""
        planned = step.planned
        question = self._questions.popleft() if self._questions else None
        if result.refused:
            self._refused(planned, question)
            return
        self._count(planned, seconds)
        self._run += 1
        self._done |= goals_of(planned)
        self._admitted |= set(_asked(planned.case).items())
        if planned.case.M > 1 and (self._base is None or planned.case.M * planned.case.N < self._base.M * self._base.N):
            self._base = planned.case
        if question is not None:
            self._answered()

    def coverage(self) -> Coverage:
        """What was run of the core, and what was not."""
        wanted = goals(self._claims, self._extent, self._seed, self._model_size)
        left = wanted - self._done - self._elsewhere - self._given_up
        planned = self._run + len(self._skipped) + self._queue.count()
        return replace(self.so_far(), planned=planned, missed=in_words(left))

    def so_far(self) -> Coverage:
        """What was run of the core of a cell that needs no more of it: it failed."""
        return Coverage(
            planned=self._run,
            run=self._run,
            left_out=self._left_out(),
            refused=self._refused_share(),
            building=self._building,
        )

    def why_thin(self) -> str:
        """Why the core is not finished: the time that it took, and would have taken, or the number of cases."""
        if self._building > _BUILDING * self._limit:
            return f"compiling and the like took {self._building:.0f} s"
        if not self._skipped:
            return f"{self._run:,} cases are allowed"
        needed = self._spent + sum(map(self._expected, self._skipped))
        about = f", about {needed:.0f} s for all" if needed > self._limit else ""
        return f"{self._limit:g} s are allowed{about}"

    def _planned(self) -> _Queue:
        self._planned_for = self._claims, self._combinations
        done = frozenset(self._done | self._given_up)
        used = ALL_OPENED + self._combinations if self._opened else self._used
        return _Queue(drawn(self._claims, self._extent, self._seed, model_size=self._model_size, done=done, used=used))

    def _drawn_anew(self) -> bool:
        """Whether there is more to run since values were refused: what they were to cover is drawn without them."""
        if self._planned_for == (self._claims, self._combinations) or self._shard[1] > 1 or not self._opened:
            return False
        self._queue = self._planned()
        return self._queue.head is not None

    def _look_ahead(self) -> None:
        """Once the core has been opened it is known what a row costs, and so what the rest will."""
        self._opened = True
        if self._extent != self._affords() or self._planned_for != (self._claims, self._combinations):
            self._extent = self._affords()
            self._queue = self._planned()

    def _affords(self) -> Extent:
        """How far the core goes at what a row costs; on a GPU it is the first calls that cost."""
        if self._device != "cpu" or self._shard[1] > 1 or self._claims.shapes:
            return self._usual
        extent = self._usual
        if DEAR_ROW < self._row < math.inf:
            extent = extent.with_dear_rows
        elif COSTLY_ROW < self._row < math.inf:
            extent = extent.with_costly_rows
        return replace(extent, fine=False) if COSTLY_COLUMN < self._column < math.inf else extent

    def _refused(self, planned: Planned, question: _Question | None) -> None:
        """Look for the value that is refused, asking one at a time."""
        if question is not None:
            self._drop(question.axis, question.value)
            return
        asked = {item: value for item, value in _asked(planned.case).items() if (item, value) not in self._admitted}
        self._suspect = planned
        if self._base is None or len(asked) == 1:
            if len(asked) == 1:
                self._drop(*next(iter(asked.items())))
            return  # nothing has run yet: another case tells more
        if not asked:
            self._give_up()
        for axis, value in asked.items():
            self._questions.append(_Question(axis, value, _with(self._base, axis, value)))
        if self._claims.shapes and set(asked) & {"M", "N"}:
            self._questions = deque(q for q in self._questions if q.axis not in ("M", "N"))
            if not self._questions:
                self._give_up()

    def _answered(self) -> None:
        """A value that was asked alone is taken; if all were, the case was refused for what it has together."""
        if not self._questions and self._suspect is not None:
            self._give_up()

    def _drop(self, axis: str, value: Any) -> None:
        self._questions.clear()
        self._suspect = None
        self._claims = self._claims.without(axis, value)

    def _give_up(self) -> None:
        """Leave out the sizes and declarations of a refused case as far as they come together.

        If all of them are left out already, other cases may cover the rest; after some of those that is left out, too.
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

    def _affordable(self, planned: Planned) -> bool:
        if self._building > _BUILDING * self._limit:
            return False
        return self._spent + self._expected(planned) <= self._limit

    def _expected(self, planned: Planned) -> float:
        """Seconds that a case is expected to take, once everything is built."""
        runs, case = RUNS[planned.probe], planned.case
        call, row, column = (cost if cost < math.inf else 0.0 for cost in (self._call, self._row, self._column))
        return runs * (call + row * case.M + column * case.N) + case.M * case.N * _JUDGING[self._device]

    def _count(self, planned: Planned, seconds: float) -> None:
        """What a case took: its own seconds, and what is far beyond them, as compiling is, and a busy machine.

        What is compiled anew is the kernel's to say, if by N, by M, by what 16 divides or by a layout: any case may be.
        """
        case, runs = planned.case, RUNS[planned.probe]
        expected = _SLACK * self._expected(planned) if self._call < math.inf else 0.0
        beyond = max(0.0, seconds - expected)
        self._building += beyond
        self._spent += seconds - beyond
        self._call = min(self._call, seconds / runs)
        if case.M >= _ROWS_TELL:
            self._row = min(self._row, seconds / runs / case.M)
        if case.N >= _COLUMNS_TELL and case.M and self._row < math.inf:
            own = seconds - case.M * case.N * _JUDGING[self._device]
            self._column = min(self._column, max(0.0, own / runs - self._call - self._row * case.M) / case.N)

    def _left_out(self) -> str:
        wanted = goals(self._claims, self._extent, self._seed, self._model_size)
        refused = in_words(goal for goal in wanted & self._given_up if len(goal) == 2)
        dear = self._too_dear()
        return "; ".join([dear] * bool(dear) + [f"refused with whatever else: {', '.join(refused)}"] * bool(refused))

    def _too_dear(self) -> str:
        if self._extent == self._usual or self._claims.shapes:
            return ""
        told = []
        if self._extent.rows < self._usual.rows:
            told.append(f"a row costs {self._row * 1e3:.1f} ms here: no M above {self._extent.rows} in the core")
        elif self._extent.paired_rows < self._usual.paired_rows:
            few = f"M above {self._extent.paired_rows} in few cases of the core"
            told.append(f"a row costs {self._row * 1e3:.1f} ms here: {few}")
        if self._extent.fine != self._usual.fine:
            what = "not every layout and dy in each class of N"
            told.append(f"a column costs {self._column * 1e3:.2f} ms here: {what} in the core")
        return "; ".join(told)

    def _refused_share(self) -> float:
        """Of the sizes in their layouts that the declaration promises, those that were refused.

        A bias and fp32 weights are left out of it: an op without them is whole.
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


_FRUITLESS = 20  # cases that are refused for no new reason
_SLACK = 3.0  # times what is expected: what a case may take before the rest counts as building
_ROWS_TELL = 16  # from so many rows on they cost more than the call
_COLUMNS_TELL = 4096  # likewise
_STRUCTURAL = ("N", "m", "n", "width", "fit", "layout", "bias", "weight_dtype", "shape")


def _asked(case: Case) -> dict[str, Any]:
    """What an implementation may refuse of a case."""
    return {**{axis: getattr(case, axis) for axis in REFUSABLE}, "N": case.N, "M": case.M}


def _with(base: Case, axis: str, value: Any) -> Case:
    changed: dict[str, Any] = {axis: value}
    if axis == "layout":
        changed["gap"] = GAPS[0] if value in STRIDED else 0
        changed["dy"] = "normal" if value in EXPANDED else base.dy
    return replace(base, **changed)
