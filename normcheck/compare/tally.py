"""Adding up what the cases of a pair showed: each side against its bounds, each output against the other side's."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import died, run_case, timed_out
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.finding import finding, place, worst_ratio
from normcheck.compare.measure import Moved, Off, Ran, differences, unlike
from normcheck.compare.results import DIFFER, OUTSIDE, SAME, SKIP, Errors, OutputPair, Pair, Side
from normcheck.gate.plan import Plan
from normcheck.gate.shrink import Stop
from normcheck.gate.tally import Tally
from normcheck.gate.torn import tear
from normcheck.gate.what_ran import looked
from normcheck.oracle.compare import Expectation
from normcheck.reports._ran import changes

_MOST_DEATHS = 3  # of a side's process, each of which costs a new one
_MOST_NOTES = 8
_LOOKING_SECONDS = 1.0  # of each side, for what it launches


class SideTally:
    """One side: its counts, and the failing result that tells most."""

    def __init__(self, cell: Cell, plan: Plan) -> None:
        self.cell, self._plan = cell, plan
        self.tally = Tally(undeclared_model(cell.implementation, plan.device))
        self._failed: Result | None = None
        self.outside = self.deaths = 0
        self.ended = ""  # why no more cases are run

    @property
    def worst(self) -> float:
        """The worst ratio so far."""
        return max((worst.ratio for worst in self.tally.worst.values()), default=0.0)

    def run(self, case: Case) -> Ran:
        """Run a case, and count it if it was not refused."""
        watched: list[Expectation] = []
        result = run_case(
            self.cell, case, self._plan, Ask(Depth.OFF, watch=watched.append, conventions=self.tally.conventions)
        )
        self.tally.add(result)
        if result.failed:
            self._count(result)
        return Ran.of(result, watched)

    def _count(self, result: Result) -> None:
        self.outside += 1
        if self._failed is None or _rank(result) < _rank(self._failed):
            self._failed = result
        if died(result):
            self.deaths += 1
        if timed_out(result) or self.deaths >= _MOST_DEATHS:
            self.ended = result.problems[-1].message

    def side(self, repeat: tuple[str, ...]) -> Side:
        """What reports say of it. ``repeat``: the words of a command that runs a case line again; () is repro's."""
        failure = None
        if self._failed is not None:
            torn = tear(self.tally, self._failed)
            advise = not (died(self._failed) or torn or repeat)
            failure = finding(self.cell, self._failed, self._plan.device, advise=advise)
            failure = replace(failure, advice=torn.advice) if torn else failure
            if repeat:
                failure = replace(failure, reproduce=_pasted((*repeat, failure.case)), explain="")
        return Side(
            implementation=self.cell.implementation.name,
            outside=self.outside,
            failure=failure,
            refused=dict(self.tally.refused),
        )


def _rank(result: Result) -> tuple[tuple[int, int], float]:
    return place(result), -worst_ratio(result)


@dataclass
class _OffSum:
    """The errors of one side of an output, added up case by case."""

    nearer: int = 0
    count: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    sum_ratio: float = 0.0

    def add(self, off: Off) -> None:
        """Add those of one case."""
        self.nearer += off.nearer
        self.count += off.count
        self.sum_abs += off.sum_abs
        self.max_abs = max(self.max_abs, off.max_abs)
        self.sum_ratio += off.sum_ratio

    def errors(self, ratio: float | None) -> Errors:
        """What reports say of them; ``ratio``: the worst of all checks."""
        if not self.count:
            return Errors(ratio=ratio, nearer=self.nearer, mean_abs=None, max_abs=None, mean_ratio=None)
        return Errors(
            ratio=ratio,
            nearer=self.nearer,
            mean_abs=self.sum_abs / self.count,
            max_abs=self.max_abs,
            mean_ratio=self.sum_ratio / self.count,
        )


@dataclass
class _Sum:
    """How one output differs, added up case by case. ``largest``: (over the bound, in ulps), of ``case``."""

    elements: int = 0
    differing: int = 0
    signs: int = 0
    cases: int = 0
    ulps: float | None = None
    of_bound: float | None = None
    largest: tuple[float, float] = (-1.0, -1.0)
    case: str = ""
    off: tuple[_OffSum, _OffSum] = field(default_factory=lambda: (_OffSum(), _OffSum()))

    def add(self, moved: Moved, case: Case) -> None:
        self.elements += moved.elements
        self.differing += moved.differing
        self.signs += moved.signs
        self.cases += bool(moved.differing)
        if moved.ulps is not None:
            self.ulps = max(self.ulps or 0.0, moved.ulps)
        if moved.of_bound is not None:
            self.of_bound = max(self.of_bound or 0.0, moved.of_bound)
        own = (moved.of_bound or 0.0, moved.ulps or 0.0)
        if moved.differing and own > self.largest:
            self.largest, self.case = own, str(case)
        for own_sum, off in zip(self.off, moved.off or (), strict=False):
            own_sum.add(off)


class PairTally:
    """Both sides, and what differs between them. ``repeat``: see ``pair.Both``."""

    def __init__(self, a: Cell, b: Cell, plan: Plan, repeat: tuple[str, ...]) -> None:
        self._plan, self._repeat = plan, repeat
        self.a, self.b = SideTally(a, plan), SideTally(b, plan)
        self.cases = 0
        self._sums: dict[str, _Sum] = {}
        self._notes: Counter[str] = Counter()
        self.differing: dict[Case, bool] = {}  # whether the main output does
        self.unlike: dict[str, None] = {}

    @property
    def sides(self) -> tuple[SideTally, SideTally]:
        """A and B."""
        return self.a, self.b

    @property
    def right(self) -> list[Case]:
        """Cases with plain data that are right on both sides."""
        return [case for case in self.a.tally.plain if case in self.b.tally.plain]

    def run(self, case: Case) -> tuple[Result, float]:
        """Run a case on both -> a result that is refused if one side refuses it, and the seconds of both.

        Raises Stop if a side is not worth another case: its process ends again and again.
        """
        begun = time.perf_counter()
        first = self.a.run(case)
        if first.result.refused:
            return first.result, time.perf_counter() - begun
        second = self.b.run(case)
        seconds = time.perf_counter() - begun
        if second.result.refused:
            return second.result, seconds
        self.cases += 1
        self.unlike |= dict.fromkeys(unlike(first, second))
        for found in differences(first, second):
            if isinstance(found, Moved):
                if found.differing or found.signs:
                    main = found.output == self.a.cell.op.main_output
                    self.differing[case] = main or self.differing.get(case, False)
                self._sums.setdefault(found.output, _Sum()).add(found, case)
            elif found in self._notes or len(self._notes) < _MOST_NOTES:
                self._notes[found] += 1
        if first.result.seen.refused or second.result.seen.refused:
            for label, side in (("A", first), ("B", second)):
                if side.result.seen.refused and len(self._notes) < _MOST_NOTES:
                    self._notes[f"{label} refused its backward: {side.result.seen.refused}"] += 1
        if self.a.ended or self.b.ended:
            raise Stop
        return first.result, seconds

    def pair(self, bare: Pair) -> Pair:
        """``bare`` with all that was counted."""
        outputs = tuple(self._output(name, own) for name, own in self._sums.items())
        a, b = self.a.side(()), self.b.side(self._repeat)
        status = SAME
        if not self.cases:
            status = SKIP
        elif a.outside or b.outside:
            status = OUTSIDE
        elif any(output.differing or output.signs for output in outputs):
            status = DIFFER
        ended = [f"{label} ended it: {side.ended}" for label, side in zip("AB", self.sides, strict=True) if side.ended]
        nothing = "" if self.cases else "no case that both take"
        notes = tuple(f"{note} ({count} cases)" if count > 1 else note for note, count in self._notes.items())
        return replace(
            bare,
            status=status,
            a=a,
            b=b,
            cases=self.cases,
            detail="; ".join(ended) or nothing,
            outputs=outputs,
            unlike=tuple(self.unlike),
            notes=(*notes, *self._launches()),
            reproduce=self._reproduce(),
        )

    def _launches(self) -> tuple[str, ...]:
        """What B launches on a GPU and A does not, for cases that are right on both sides."""
        cases = self.right
        if self._plan.device == "cpu" or self.a.ended or self.b.ended:
            return ()
        a, b = (looked(side.cell, self._plan, cases, _LOOKING_SECONDS).ran for side in self.sides)
        return tuple(f"other kernels run, {words}" for words in changes(a, b))

    def _output(self, name: str, own: _Sum) -> OutputPair:
        ratios = [side.tally.worst[name].ratio if name in side.tally.worst else None for side in self.sides]
        a, b = (off.errors(ratio) for off, ratio in zip(own.off, ratios, strict=True))
        return OutputPair(
            output=name,
            elements=own.elements,
            differing=own.differing,
            signs=own.signs,
            cases=own.cases,
            ulps=own.ulps,
            of_bound=own.of_bound,
            case=own.case,
            a=a,
            b=b,
        )

    def _reproduce(self) -> tuple[str, ...]:
        """The lines to paste for the case with the largest difference of any output."""
        case = max(self._sums.values(), key=lambda own: own.largest, default=_Sum()).case
        if not case:
            return ()
        repro = ("normcheck", "repro")
        lines = [(*repro, self.a.cell.spec, case), (*(self._repeat or (*repro, self.b.cell.spec)), case)]
        return tuple(dict.fromkeys(map(_pasted, lines)))


def _pasted(words: tuple[str, ...]) -> str:
    return " ".join(map(shlex.quote, words))
