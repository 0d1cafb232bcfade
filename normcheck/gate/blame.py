"""Which case caused a failure: the one that failed, if it also fails alone in a new process; otherwise an earlier one.

A kernel that writes out of bounds may damage its process in one case and end it in another, which is innocent.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normcheck.cases.case import Case
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_alone, run_case, timed_out
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.earlier import SEARCH_SECONDS, Alone, OutOfTime, Search, crashed, differences, spoilt
from normcheck.gate.plan import Plan
from normcheck.gate.shrink import shrunk
from normcheck.isolation.replies import WITH_ITS_SERVER
from normcheck.result import Finding
from normcheck.runner.session import session_of

_MOST_PASTED = 4  # cases before the failing one in a line to paste


@dataclass(frozen=True)
class Blame:
    """A failing ``result``, and whether its case fails ``alone`` in a new process.

    If it does not, ``needed`` are the earlier cases, in their order, after which it fails again; () if not known.
    """

    result: Result
    alone: bool = True
    needed: tuple[Case, ...] = ()


def run_surely(
    cell: Cell,
    case: Case,
    plan: Plan,
    ask: Ask,
) -> Result:
    """As ``run_case``, but three things are no proof if they happen once: the case runs again.

    A process that ends in its first case, or with the fork server that it comes from: other code under test may have
    damaged the one or ended the other; the second process comes from a new server. A GPU without memory: other
    processes may have had it. And, if one is ``patient``, a case without a result in time: other processes may have had
    the cores.
    """
    result = run_case(cell, case, plan, ask)
    with_server = any(WITH_ITS_SERVER in problem.message for problem in result.problems)
    if crashed(result) and (with_server or not result.after):
        session_of(cell.implementation).restart(cleanly=True)
        note = _ENDED_ONCE
    elif plan.device == "cuda" and any("out of memory" in problem.message for problem in result.problems):
        time.sleep(_SECONDS_FOR_MEMORY)
        note = _FULL_ONCE
    elif timed_out(result) and ask.patient:
        session_of(cell.implementation).restart()
        note = _LATE_ONCE
    else:
        return result
    again = run_case(cell, case, plan, replace(ask, upcoming=None))
    if again.failed:
        return again
    return replace(again, notes=(*again.notes, note.format(case, result.problems[-1])), late=timed_out(result))


_ENDED_ONCE = "a process ended in {}, and another one, from a new server, did not: {.message}"
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
    after many others.
    """
    search = Search(cell, plan, failed, time.perf_counter() + SEARCH_SECONDS)
    try:
        search.narrow()
        if search.needed and smallest is not failed:
            search.try_also(smallest)
        search.end = time.perf_counter() + min(SEARCH_SECONDS, plan.profile.shrink_seconds)
        search.make_plain()
    except OutOfTime:
        pass
    except Alone as found:
        return Blame(shrunk(cell, plan, found.result, alone=True))
    return Blame(search.failed, alone=False, needed=search.needed)


def with_blame(cell: Cell, plan: Plan, blame: Blame, failure: Finding) -> Finding:
    """``failure``; if its case passes alone, with the earlier cases that cause it and a command that shows it again."""
    if blame.alone:
        return failure
    needed, count = blame.needed, len(blame.result.after)
    lines = [str(case) for case in (*needed, blame.result.case)]
    reproduce = repro_of(cell, (*needed, blame.result.case), plan.within)
    if not 0 < len(needed) <= _MOST_PASTED:
        reproduce = whole_sweep(cell, plan)
    if not spoilt(blame.result):
        advice = f"{_REMAINED}{_after(needed)}.{_in_what(needed, blame.result.case)}"
        return replace(failure, advice=advice, reproduce=reproduce)
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


def repro_of(cell: Cell, cases: Sequence[Case], within: Sequence[str] = ()) -> str:
    """The command that runs these cases of this cell, in this order, in one process; "" for none.

    ``within``: the contexts that they are tried in.
    """
    contexts = (word for name in within for word in ("--context", name))
    words = ("normcheck", "repro", *cell.named, *contexts, *map(str, cases))
    return " ".join(shlex.quote(word) for word in words) if cases else ""


def _in_what(needed: Sequence[Case], last: Case) -> str:
    """What to look at if one case is needed and differs from the last one in one thing alone; else ""."""
    differ = differences(needed[0], last) if len(needed) == 1 else ()
    if differ == ("the values",):
        return " The two differ only in their values: is a result, or a tensor, of the earlier call used again?"
    if len(differ) != 1:
        return ""
    return f" The two differ only in {differ[0]}: is a compiled kernel, or a buffer, used again that depends on it?"


def whole_sweep(cell: Cell, plan: Plan) -> str:
    """The command that runs the same cases of this cell in the same order."""
    shard = [] if plan.shard == (1, 1) else ["--shard", f"{plan.shard[0]}/{plan.shard[1]}"]
    named = cell.loaded or ("--impl", cell.spec, "--op", cell.op.name)
    words = ["normcheck", "verify", *named, "--dtype", cell.dtype]
    words += [word for layout in cell.layouts for word in ("--layout", layout)]
    words += ["--profile", plan.profile.name, "--max-examples", str(plan.profile.max_examples)]
    words += ["--time-budget", f"{plan.profile.seconds:g}", "--seed", str(plan.seed), "--device", plan.device]
    return " ".join(shlex.quote(word) for word in (*words, *shard))
