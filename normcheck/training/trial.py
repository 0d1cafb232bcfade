"""The trial of one file: a fixed number of cases, drawn by its seed, all of which are run whatever the first one shows.

How many there are follows from ``seconds`` alone, and the score from their results. The clock only ends a trial early,
and chooses other cases where first calls are dear, because they compile, tune or plan: few shapes are paid for, as in a
sweep.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from dataclasses import dataclass, field, replace

from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.planned import Planned
from normcheck.cases.tensor_names import GRADIENTS
from normcheck.checks import gpu_memory
from normcheck.checks.attempt import died, timed_out, why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.finding import finding
from normcheck.errors import Broken, ImportFailed, UnsupportedCase, UsageError, one_line
from normcheck.gate.blame import run_surely
from normcheck.gate.tally import Tally
from normcheck.gate.torn import without_graph
from normcheck.impls.implementation import Implementation
from normcheck.isolation import forkserver
from normcheck.isolation.intact import WATCHED
from normcheck.isolation.sandbox import Sandbox
from normcheck.isolation.select import select_apart
from normcheck.isolation.session import ProcessSession
from normcheck.oracle import judging
from normcheck.runner.call import poisoned_memory
from normcheck.runner.device import device_for
from normcheck.runner.session import session_of
from normcheck.training.cheating import cheat_of, never_written
from normcheck.training.score import NEARLY_ALL, STAGES, Reward, capped, stage_of
from normcheck.training.sequence import CellCases

CASES_A_SECOND = 12
"""Cases that are planned for each of the seconds: an eighth of what a plain kernel in torch runs on two cores, so that
the clock decides nothing on a machine that is busy."""

_IMPORT_SHARE, _IMPORT_SECONDS = 0.5, 3.0  # of the seconds, and at least, for the import of the file
FIRST_CALL_SECONDS = 60.0
"""A case has so many seconds at least, and those that are left: any may be the first to compile, to tune or to plan."""

_LEAST_SECONDS = 5.0  # what would be dear in less time is how a plain kernel starts
_FIRST_CALLS_TIMES = 3  # all first calls may take so many times the seconds, and FIRST_CALL_SECONDS at least
_CASE_SHARE, _CASE_SECONDS = 0.2, 1.0  # for a case of a kernel that hangs
_MOST_DEATHS = 3  # a kernel whose process has ended so often is not asked any more
_MOST_WORDS = 600  # characters of a message


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A file to judge, as ``reward`` was asked; all fields are plain data. ``spec``: FILE.py or FILE.py:NAME."""

    spec: str
    op: str
    dtypes: tuple[str, ...]
    seconds: float
    seed: int
    device: str

    @property
    def cases_a_dtype(self) -> int:
        """The cases that are planned in each dtype."""
        return max(1, int(CASES_A_SECOND * self.seconds) // len(self.dtypes))

    @property
    def import_seconds(self) -> float:
        """The time within which the file must be imported."""
        return max(_IMPORT_SECONDS, _IMPORT_SHARE * self.seconds)

    @property
    def first_calls_seconds(self) -> float:
        """The time for all first calls, beside the ``seconds``, of a kernel that compiles, tunes or plans."""
        return max(FIRST_CALL_SECONDS, _FIRST_CALLS_TIMES * self.seconds)

    @property
    def case_seconds(self) -> float:
        """The time limit of a case once the kernel has hung in one."""
        return max(_CASE_SECONDS, _CASE_SHARE * self.seconds)


def judged(asked: Asked) -> Reward:
    """The reward of a file. Whatever its kernel has left behind, processes and files, is gone on return.

    Raises whatever shows that normcheck itself, or the machine, has failed.
    """
    begun = time.monotonic()
    try:
        reward = _judged(asked)
    finally:
        forkserver.replace()
        forkserver.warm()
        shutil.rmtree(Sandbox.of(asked.spec).folder, ignore_errors=True)
    return replace(reward, seconds=round(time.monotonic() - begun, 3))


def unjudged(asked: Asked, why: str) -> Reward:
    """The reward of a file of which nothing is known."""
    text = one_line(why)
    return Reward(ok=False, score=None, worst_ratio=None, kind="unjudged", why=text, stage="unjudged", seed=asked.seed)


def _judged(asked: Asked) -> Reward:
    try:
        device = device_for(asked.device)
    except UsageError as error:
        return unjudged(asked, str(error))
    try:
        found = select_apart(asked.spec, (asked.op,), device, 0.0, start_seconds=asked.import_seconds)
    except ImportFailed as error:
        return _at(asked, "import", str(error))
    except UsageError as error:
        return _at(asked, "cheating" if WATCHED in str(error) else "signature", str(error))
    if len(found) > 1:
        names = ", ".join(i.name for i in found)
        return _at(asked, "signature", f"impl={asked.spec}: expected one {asked.op}, or FILE:NAME of one of {names}")
    session = session_of(found[0])
    if not isinstance(session, ProcessSession):
        return _at(asked, "import", _why_it_ended(found[0]))
    session.start()  # on entry, an error of the machine would pass for one of the file
    with session, poisoned_memory():
        if not session.running:
            return _at(asked, "import", "it was imported once, and not again, in another process")
        try:
            return _Trial(asked, found[0], device, session).reward()
        except UsageError as error:  # a declaration that is none
            return _at(asked, "signature", str(error))


def _why_it_ended(stand_in: Implementation) -> str:
    """How the import of a file has ended its process."""
    try:
        stand_in.forward()
    except Broken as broken:
        return broken.message
    return "its process ended"


def _at(asked: Asked, stage: str, why: str, **more: object) -> Reward:
    """The reward of a file that got to ``stage`` and no further."""
    kind = "cheating" if stage == "cheating" else "wrong"
    text = one_line(f"{_WORDS[stage]}: {why}")
    reward = Reward(
        ok=False, score=STAGES[stage][0], worst_ratio=None, kind=kind, why=text, stage=stage, seed=asked.seed
    )
    return replace(reward, **more)  # type: ignore[arg-type]


_WORDS = {
    "cheating": "cheats",
    "import": "cannot be imported",
    "signature": "is no kernel of this op",
    "first case": "fails in the simplest case",
}


@dataclass
class _Trial:
    """The cases of one implementation, their results summed up.

    ``shares``: of each case that was run; ``hung``: whether one of them had no answer in time, nor when it was run
    again. ``failed_at_once``: whether the kernel returned nothing that can be judged in the simplest case of each
    dtype, or never returned from the first of them.
    """

    asked: Asked
    implementation: Implementation
    device: str
    session: ProcessSession
    shares: list[float] = field(default_factory=list)
    planned: int = 0
    refused: int = 0
    hung: bool = False
    deaths: int = 0
    unwritten: int = 0
    worst: float | None = None
    outputs: dict[str, None] = field(default_factory=dict)
    reason: str = ""
    cheat: str = ""
    first: tuple[Cell, Result] | None = None
    with_graph: str = ""  # a case whose y has a graph, if that of a later one has none
    failed_at_once: bool = False
    cells: tuple[CellCases, ...] = ()

    @property
    def op(self) -> Op:
        """The op that the implementation computes."""
        return OPS[self.asked.op]

    def reward(self) -> Reward:
        """Run the cases, for the seconds that were asked for and those of first calls, and say what they show."""
        begun = time.monotonic()
        self.cells = self._asked_for()
        self._run(begun)
        if self.cells and not self.cheat:
            self.cheat = self._touched()
        if self.unwritten * 2 > len(self.shares) and sum(self.shares) <= NEARLY_ALL * len(self.shares):
            self.cheat = self.cheat or f"returns memory that it never wrote, in {self.unwritten} cases"
        return self._concluded()

    def _asked_for(self) -> tuple[CellCases, ...]:
        """The cases of each dtype that the implementation declares; those of others count as refused."""
        asked, cells = self.asked, []
        for dtype in asked.dtypes:
            cell = Cell(self.op, self.implementation, dtype, asked.spec)
            reason = why_not(cell, self.device)
            if reason:
                self.planned += asked.cases_a_dtype
                self.refused += asked.cases_a_dtype
                self.reason = self.reason or f"{dtype}: {reason}"
                continue
            cells.append(cell)
        shared = max(asked.seconds, _LEAST_SECONDS), asked.first_calls_seconds
        seconds, most = (each / max(1, len(cells)) for each in shared)
        found = tuple(CellCases(cell, asked.seed, self.device, asked.cases_a_dtype, seconds, most) for cell in cells)
        self.planned += sum(one.planned for one in found)
        return found

    def _run(self, begun: float) -> None:
        """Run the cases of all cells by turns, the simplest first, so that an early end leaves out the same of each."""
        end = begun + self.asked.seconds
        last = end + self.asked.first_calls_seconds
        tallies = {id(one): Tally(undeclared_model(self.implementation, self.device)) for one in self.cells}
        waiting, broken = deque(self.cells), 0
        while waiting and (time.monotonic() < last or not self.shares):
            cases = waiting.popleft()
            again = cases.repeats
            over = time.monotonic() > end + sum(one.building for one in self.cells)
            planned = cases.next(over=over, pays=self.first is None)
            if planned is None:
                continue
            upcoming = waiting[0].upcoming if waiting else cases.upcoming
            result, seconds = self._result(cases, planned, upcoming, tallies[id(cases)], end)
            cases.saw(planned, result, seconds)
            self._count(cases.cell, result, again=again)
            broken += cases.run == 1 and not again and not result.checked and not result.refused
            self.failed_at_once = broken == len(self.cells) or (len(self.shares) == 1 and self.hung)
            if self.cheat or self.failed_at_once or self.deaths == _MOST_DEATHS:
                return
            (waiting.appendleft if cases.repeats else waiting.append)(cases)

    def _result(
        self, cases: CellCases, planned: Planned, upcoming: Case | None, tally: Tally, end: float
    ) -> tuple[Result, float]:
        """The result of a case, and the seconds that it took. It has the time that is left, and what a first call has.

        All first calls in it have that together. A kernel that has hung gets no more of it.
        """
        seconds = max(FIRST_CALL_SECONDS, end - time.monotonic())
        plan = replace(cases.plan, timeout=self.asked.case_seconds if self.hung else seconds, first_calls=1.0)
        ask = replace(tally.ask, depth=planned.probe, upcoming=upcoming, patient=not self.hung)
        begun, compiling = time.monotonic(), judging.compiling_seconds()
        result = run_surely(cases.cell, planned.case, plan, ask)
        tally.add(result)
        bare = without_graph(tally)
        if bare is not None and result.has_graph is False and not result.failed:
            result = replace(result, problems=bare.problems)
            self.with_graph = self.with_graph or str(tally.graphs[True].case)
        return result, time.monotonic() - begun - (judging.compiling_seconds() - compiling)

    def _count(self, cell: Cell, result: Result, *, again: bool) -> None:
        """Count a result; that of a case that ran ``again`` only if it is worse than what it repeats."""
        if result.refused:
            self._count_refused(result.refused)
            return
        self.deaths += died(result)
        self.cheat = next(filter(None, map(cheat_of, result.problems)), "")
        self.unwritten += never_written(result, self.op.main_output)
        for checked in result.checked:
            self.worst = capped(max(self.worst or 0.0, checked.comparison.ratio))
            self.outputs[checked.output] = None
        share = self._share(result)
        self.hung |= timed_out(result)
        if again and self.shares:
            share = min(share, self.shares.pop())
        self.shares.append(share)
        if share < 1.0 and self.first is None:
            self.first = cell, result

    def _count_refused(self, reason: str) -> None:
        if gpu_memory.is_short(reason):  # others use it: that says nothing of the kernel
            self.planned -= 1
            return
        self.refused += 1
        self.reason = self.reason or reason

    def _share(self, result: Result) -> float:
        """The share of a case that is right: of its outputs, if the main one is right and nothing else is wrong.

        What is right only because the file declares something that widens its bound is wrong here.
        """
        wrong = {c.output for c in (*result.checked, *result.undeclared) if not c.comparison.ratio <= 1}
        outputs = {c.output for c in result.checked}
        if result.problems or not outputs or self.op.main_output in wrong:
            return 0.0
        return 1.0 - len(wrong) / len(outputs | wrong)

    def _touched(self) -> str:
        """What the kernel has done to torch in its process, or "": nobody asks a process that has ended."""
        case = self.cells[0].first
        if not self.session.running or case is None:
            return ""
        try:
            with self.session.case(case, self.asked.case_seconds):
                said = one_line(str(self.session.ask("touched", case)), 200)
        except (Broken, UnsupportedCase):
            return ""
        return said and f"{said} in its process"

    def _concluded(self) -> Reward:
        shown: dict[str, object] = {"cases": len(self.shares), "planned": self.planned, "worst_ratio": self.worst}
        shown |= {"outputs": tuple(self.outputs)} | self._fault()
        why = str(shown.pop("why", ""))
        if self.cheat:
            return _at(self.asked, "cheating", self.cheat, **shown)
        if not self.planned:
            return unjudged(self.asked, f"no case could be judged: {gpu_memory.IN_USE}")
        if self.failed_at_once or not self.shares:
            return _at(self.asked, "first case", why or self.reason, **shown)
        dear = [one for one in self.cells if one.dear]
        narrow = any(one.narrow for one in dear)
        stage, score = stage_of(self.shares, self.planned, refused=self.refused, narrow=narrow)
        kind = "wrong" if min(self.shares) < 1.0 else "right" if stage == "right" else "thin"
        left = self.planned - len(self.shares) - self.refused
        parts = [f"{sum(share == 1.0 for share in self.shares)} of {self.planned} cases are right"]
        gradients = self.op.quantises or any(name in self.outputs for name in GRADIENTS)
        parts += ["gradients are not checked, as y carries no graph"] * (not gradients)
        parts += [f"{self.refused} refused, as {self.reason}"] * bool(self.refused)
        parts += [f"time was over after {len(self.shares)}"] * (left > 0 and self.deaths < _MOST_DEATHS)
        if dear:
            seconds, shapes = sum(one.building for one in dear), min(one.shapes for one in dear)
            parts += [f"first calls took {seconds:.1f} s: they were paid for few shapes, {shapes} in a dtype at least"]
        parts += [f"its process ended {self.deaths} time{'s' * (self.deaths > 1)}"] * bool(self.deaths)
        parts += [why] * bool(why)
        text = one_line("; ".join(parts))
        reward = Reward(
            ok=kind == "right", score=score, worst_ratio=None, kind=kind, why=text, stage=stage, seed=self.asked.seed
        )
        return replace(reward, **shown)  # type: ignore[arg-type]

    def _fault(self) -> dict[str, object]:
        """The first case that is wrong, how to run it again, and what is wrong in it."""
        if self.first is None:
            return {}
        cell, result = self.first
        if not result.failed:  # wrong without its declarations only
            return {"case": str(result.case), "why": "right only by what the file declares, which widens its bounds"}
        torn = result.has_graph is False and any(problem.kind == "missing" for problem in result.problems)
        after = (self.with_graph,) if torn and self.with_graph else ()
        found = finding(cell, result, self.device, advise=False, after=after)
        why = one_line("; ".join(filter(None, [found.message, found.cause])), _MOST_WORDS)
        return {"case": found.case, "reproduce": found.reproduce, "why": why}
