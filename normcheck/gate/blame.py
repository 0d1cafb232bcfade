"""Whose fault a failure is: a case is blamed for what it does alone in a new process, and otherwise an earlier case is.

A kernel that writes where it should not may damage its process in one case and end it in another, which is innocent.
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
from normcheck.result import Finding
from normcheck.runner.call import link_of

_SECONDS = 10.0  # of looking for the case that did the damage
_SHARE = 3  # of the time that is left, what one case may take: its first call may take three times its limit
_TAKEN_APART = 16  # cases of which each is left out once, to see whether it is needed
_PASTED = 4  # cases that a line to paste holds before the one that fails


@dataclass(frozen=True)
class Blame:
    """A failing ``result``, and whether its case fails ``alone`` in a new process.

    If not, ``needed`` are those of the cases before it, in their order, after which it fails again; () if not known.
    """

    result: Result
    alone: bool = True
    needed: tuple[Case, ...] = ()


def crashed(result: Result) -> bool:
    """Whether the implementation's process ended in this case."""
    return any(problem.kind == "crash" for problem in result.problems)


def spoilt(result: Result) -> bool:
    """Whether the process ended, or its GPU's context is lost: what may have been done in any case before."""
    return crashed(result) or any(map(context_lost, result.problems))


def run_surely(cell: Cell, case: Case, plan: Plan, floors: Mapping[str, float], depth: Depth) -> Result:
    """As ``run_case``. A process that ends in its first case says nothing yet: the case is run again from a new server.

    Other code under test may have hit the process, or the server that it is from.
    """
    result, link = run_case(cell, case, plan, floors, depth), link_of(cell.implementation)
    if link is None or result.after or not crashed(result):
        return result
    link.renew()
    again = run_case(cell, case, plan, floors, depth)
    return again if again.failed else replace(again, notes=(*again.notes, _ONCE.format(case, result.problems[-1])))


_ONCE = "a process ended in its first case, {}, and another one, from a new server, did not: {.message}"


def blamed(cell: Cell, plan: Plan, failed: Result) -> Blame:
    """What a failure of the sweep comes to: shrunk if it fails alone, else with what must come before it."""
    link = link_of(cell.implementation)
    if link is None or timed_out(failed):
        return Blame(shrunk(cell, plan, failed))
    if spoilt(failed):
        if crashed(failed) and failed.after:  # without cases before it, this was done before the failure was believed
            link.renew()
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
    """``failed`` passes alone: look for what must come before it, and before its smaller form, while there is time.

    Few cases came before it: more came before the smaller form, which the shrinker found after many others.
    """
    end = time.perf_counter() + _SECONDS
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
    """The search is to end."""


class _Alone(Exception):
    """A case of the search failed in a new process, before any other: it is to blame."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


@dataclass
class _Search:
    """Runs cases again in new processes, the last ones before ``failed`` first, since damage shows soon.

    ``needed``: the fewest cases so far after which it failed again, in their order; () as long as it has not.
    """

    cell: Cell
    plan: Plan
    failed: Result
    end: float
    needed: tuple[Case, ...] = ()

    def narrow(self) -> None:
        """Look for as few of the last cases as it takes. Raises _OutOfTime, or _Alone."""
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
        """Without the first of the cases it passes: try the first alone, and then without each of the others."""
        last = self.needed
        if len(last) < 2 or self.seen_again(last[:1]) is not None:
            return
        for case in last[1:] if len(last) <= _TAKEN_APART else ():
            self.seen_again(tuple(other for other in self.needed if other is not case))

    def seen_again(self, earlier: tuple[Case, ...]) -> Result | None:
        """The failure, seen again after these cases in a new process; None where it is not."""
        for number, case in enumerate((*earlier, self.failed.case)):
            left = self.end - time.perf_counter()
            if left <= 0:
                raise _OutOfTime
            plan = replace(self.plan, timeout=min(self.plan.timeout, left / _SHARE))
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


def told(cell: Cell, plan: Plan, blame: Blame, failure: Finding) -> Finding:
    """``failure`` of a case that passes alone, told as what it is: with the case that did it, and how to see it."""
    if blame.alone:
        return failure
    needed, count = blame.needed, len(blame.result.after)
    lines = [str(case) for case in (*needed, blame.result.case)]
    reproduce = " ".join(shlex.quote(word) for word in ("normcheck", "repro", cell.spec, *lines))
    if not 0 < len(needed) <= _PASTED:
        reproduce = _whole_sweep(cell, plan)
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


def _whole_sweep(cell: Cell, plan: Plan) -> str:
    """The command that runs the same cases of this cell in the same order."""
    shard = [] if plan.shard == (1, 1) else ["--shard", f"{plan.shard[0]}/{plan.shard[1]}"]
    words = ["normcheck", "verify", "--impl", cell.spec, "--op", cell.op.name, "--dtype", cell.dtype]
    words += ["--profile", plan.profile.name, "--max-examples", str(plan.profile.max_examples)]
    words += ["--time-budget", f"{plan.profile.seconds:g}", "--seed", str(plan.seed), "--device", plan.device]
    return " ".join(shlex.quote(word) for word in (*words, *shard))
