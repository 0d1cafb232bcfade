"""Which case caused a failure: the one that failed, if it also fails alone in a new process; otherwise an earlier one.

A kernel that writes out of bounds may damage its process in one case and end it in another, which is innocent.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from normcheck.cases.case import Case
from normcheck.checks.attempt import run_alone, run_case, timed_out
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, context_lost
from normcheck.checks.finding import signature
from normcheck.checks.probes import Depth
from normcheck.gate.plan import Plan
from normcheck.gate.shrink import shrunk
from normcheck.oracle.conventions import Convention
from normcheck.result import Finding
from normcheck.runner.session import session_of

_SEARCH_SECONDS = 10.0  # for the search for the case that did the damage
_TIMEOUT_DIVISOR = 3  # remaining seconds / timeout of a case: its first call may take three times its timeout
_MOST_LEFT_OUT = 16  # only among so many cases is each left out once, to see whether it is needed
_MOST_PASTED = 4  # cases before the failing one in a line to paste


@dataclass(frozen=True)
class Blame:
    """A failing ``result``, and whether its case fails ``alone`` in a new process.

    If it does not, ``needed`` are the earlier cases, in their order, after which it fails again; () if not known.
    """

    result: Result
    alone: bool = True
    needed: tuple[Case, ...] = ()


def crashed(result: Result) -> bool:
    """Whether the implementation's process ended in this case."""
    return any(problem.kind == "crash" for problem in result.problems)


def spoilt(result: Result) -> bool:
    """Whether the process ended or lost its GPU's context, which any earlier case may have caused."""
    return crashed(result) or any(map(context_lost, result.problems))


def run_surely(
    cell: Cell,
    case: Case,
    plan: Plan,
    floors: Mapping[str, float],
    depth: Depth,
    upcoming: Case | None = None,
    conventions: tuple[Convention, ...] | None = None,
    *,
    patient: bool = True,
) -> Result:
    """As ``run_case``, but three things are no proof if they happen once: the case runs again.

    A process that ends in its first case: other code under test may have damaged it, or the fork server that it comes
    from; the second one comes from a new server. A GPU without memory: other processes may have had it. And, if one is
    ``patient``, a case without a result in time: other processes may have had the cores.
    """
    result = run_case(cell, case, plan, floors, depth, upcoming=upcoming, conventions=conventions)
    if crashed(result) and not result.after:
        session_of(cell.implementation).restart(cleanly=True)
        note = _ENDED_ONCE
    elif plan.device == "cuda" and any("out of memory" in problem.message for problem in result.problems):
        time.sleep(_SECONDS_FOR_MEMORY)
        note = _FULL_ONCE
    elif timed_out(result) and patient:
        session_of(cell.implementation).restart()
        note = _LATE_ONCE
    else:
        return result
    again = run_case(cell, case, plan, floors, depth, conventions=conventions)
    if again.failed:
        return again
    return replace(again, notes=(*again.notes, note.format(case, result.problems[-1])), late=timed_out(result))


_ENDED_ONCE = "a process ended in its first case, {}, and another one, from a new server, did not: {.message}"
_FULL_ONCE = "the GPU's memory ran out in {}, and did not soon after: {.message}"
_LATE_ONCE = "{} was late once, and in time when it was run again, as it may be on a busy machine: {.message}"
_SECONDS_FOR_MEMORY = 2.0  # by then what ran beside may have ended, or freed its own


def blamed(cell: Cell, plan: Plan, failed: Result) -> Blame:
    """The cause of a failure of the sweep: the case itself, shrunk, or else the cases that must come before it."""
    session = session_of(cell.implementation)
    if not session.isolated or timed_out(failed):
        return Blame(shrunk(cell, plan, failed))
    if spoilt(failed):
        if crashed(failed) and failed.after:  # a crash in the first case: ``run_surely`` has restarted already
            session.restart(cleanly=True)
        return _alone_or_after(cell, plan, failed)
    smallest = shrunk(cell, plan, failed)
    if run_alone(cell, smallest.case, plan).failed:
        return Blame(smallest)
    if smallest.case != failed.case and run_alone(cell, failed.case, plan).failed:
        return _alone_or_after(cell, plan, failed)
    return _after_others(cell, plan, failed, smallest)


def _alone_or_after(cell: Cell, plan: Plan, failed: Result) -> Blame:
    again = run_alone(cell, failed.case, plan)
    if again.failed:
        return Blame(shrunk(cell, plan, again, alone=True))
    return _after_others(cell, plan, failed, failed)


def _after_others(cell: Cell, plan: Plan, failed: Result, smallest: Result) -> Blame:
    """``failed`` passes alone: find the cases that must come before it, then try them before ``smallest`` as well.

    The search starts from ``failed``: fewer cases came before it than before ``smallest``, which the shrinker found
    after many others. It ends after _SEARCH_SECONDS.
    """
    end = time.perf_counter() + _SEARCH_SECONDS
    search = _Search(cell, plan, failed, end)
    try:
        search.narrow()
        needed = search.needed
        if needed and smallest is not failed and _Search(cell, plan, smallest, end).seen_again(needed) is not None:
            return Blame(smallest, alone=False, needed=needed)
    except _OutOfTime:
        pass
    except _Alone as found:
        return Blame(shrunk(cell, plan, found.result, alone=True))
    return Blame(failed if search.needed else smallest, alone=False, needed=search.needed)


class _OutOfTime(Exception):
    """The seconds of the search are used up."""


class _Alone(Exception):
    """A case of the search failed as the first one of a new process: it is the cause."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


@dataclass
class _Search:
    """Runs cases again in new processes, the last ones before ``failed`` first, since damage shows soon.

    ``needed``: the fewest cases found so far after which it fails again, in their order; () until it does.
    """

    cell: Cell
    plan: Plan
    failed: Result
    end: float
    needed: tuple[Case, ...] = ()

    def narrow(self) -> None:
        """Find, by bisection, how few of the last cases suffice. Raises _OutOfTime, or _Alone."""
        earlier = self.failed.after
        passes, fails = 0, min(1, len(earlier))
        while self.seen_again(earlier[-fails:]) is None:
            if fails >= len(earlier):
                return
            passes, fails = fails, min(2 * fails, len(earlier))
        while fails - passes > 1:
            middle = (passes + fails) // 2
            passes, fails = (middle, fails) if self.seen_again(earlier[-middle:]) is None else (passes, middle)
        self._leave_out()

    def _leave_out(self) -> None:
        """Drop cases that are not needed. The first one is: try it alone, then leave out each of the others."""
        last = self.needed
        if len(last) < 2 or self.seen_again(last[:1]) is not None:
            return
        for case in last[1:] if len(last) <= _MOST_LEFT_OUT else ():
            self.seen_again(tuple(other for other in self.needed if other is not case))

    def seen_again(self, earlier: tuple[Case, ...]) -> Result | None:
        """The failure after these cases in a new process; None if it does not come again."""
        for number, case in enumerate((*earlier, self.failed.case)):
            left = self.end - time.perf_counter()
            if left <= 0:
                raise _OutOfTime
            plan = replace(self.plan, timeout=min(self.plan.timeout, left / _TIMEOUT_DIVISOR))
            result = (run_case if number else run_alone)(self.cell, case, plan)
            if spoilt(result) and spoilt(self.failed):
                if not number:
                    raise _Alone(result)
                break
        else:
            if not (result.failed and signature(result) == signature(self.failed)):
                return None
        self.needed = earlier
        return result


def with_blame(cell: Cell, plan: Plan, blame: Blame, failure: Finding) -> Finding:
    """``failure``; if its case passes alone, with the earlier cases that cause it and a command that shows it again."""
    if blame.alone:
        return failure
    needed, count = blame.needed, len(blame.result.after)
    lines = [str(case) for case in (*needed, blame.result.case)]
    reproduce = repro_of(cell, (*needed, blame.result.case))
    if not 0 < len(needed) <= _MOST_PASTED:
        reproduce = whole_sweep(cell, plan)
    if not spoilt(blame.result):
        return replace(failure, advice=f"{_REMAINED}{_after(needed)}. {failure.advice}".strip(), reproduce=reproduce)
    if not count:
        return replace(failure, message=f"{failure.message}. {_ALONE} it passes", reproduce=reproduce)
    message = f"{failure.message}. This came after {count} other {'case' if count == 1 else 'cases'} in that process. "
    message += f"{_ALONE} it passes: an earlier case damaged the process"
    if len(needed) == 1:
        message += f". That case is {lines[0]}; after it, {lines[1]} fails in a new process as well"
        return replace(failure, case=lines[0], message=message, reproduce=reproduce)
    return replace(failure, message=message + _after(needed), reproduce=reproduce)


_ALONE = "Alone, in a new process,"
_REMAINED = "Alone in a new process this case passes: it fails after other calls, whose effect must have remained"


def _after(needed: Sequence[Case]) -> str:
    if not needed:
        return ""
    return f"; it takes {needed[0] if len(needed) == 1 else f'{len(needed)} of the cases before it'}"


def repro_of(cell: Cell, cases: Sequence[Case]) -> str:
    """The command that runs these cases of this cell, in this order, in one process; "" for none."""
    words = ("normcheck", "repro", cell.spec, *map(str, cases))
    return " ".join(shlex.quote(word) for word in words) if cases else ""


def whole_sweep(cell: Cell, plan: Plan) -> str:
    """The command that runs the same cases of this cell in the same order."""
    shard = [] if plan.shard == (1, 1) else ["--shard", f"{plan.shard[0]}/{plan.shard[1]}"]
    words = ["normcheck", "verify", "--impl", cell.spec, "--op", cell.op.name, "--dtype", cell.dtype]
    words += [word for layout in cell.layouts for word in ("--layout", layout)]
    words += ["--profile", plan.profile.name, "--max-examples", str(plan.profile.max_examples)]
    words += ["--time-budget", f"{plan.profile.seconds:g}", "--seed", str(plan.seed), "--device", plan.device]
    return " ".join(shlex.quote(word) for word in (*words, *shard))
