"""A first look at a kernel: the cases that open its core, after which its planner knows what it builds."""

from __future__ import annotations

import time

from normcheck.cases.core import drawn
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.gate.blame import run_surely
from normcheck.gate.plan import Plan, planner_of
from normcheck.planner.planner import Planner
from normcheck.runner.call import poisoned_memory
from normcheck.runner.session import session_of

_SECONDS = 30.0  # at most: it is a look


def first_look(cell: Cell, plan: Plan) -> tuple[Planner, str]:
    """The planner of ``cell`` after the cases that open its core, and why there are none or fewer, "" if all ran."""
    core = planner_of(cell, plan)
    reason = why_not(cell, plan.device)
    if reason:
        return core, reason
    opening = sum(planned.opens > 0 for planned in drawn(cell.claims, plan.profile.extent.on(plan.device), plan.seed))
    end = time.perf_counter() + _SECONDS
    with session_of(cell.implementation), poisoned_memory():
        while _goes_on(core, opening) and (step := core.next()) is not None:
            began = time.perf_counter()
            if began > end:
                return core, f"only {core.record.run} cases ran in {_SECONDS:g} s"
            result = run_surely(cell, step.planned.case, plan, Ask(step.planned.probe))
            if result.failed:
                return core, f"it fails in {result.case}: normcheck verify says how"
            core.saw(step, refused=bool(result.refused), seconds=time.perf_counter() - began)
    return core, ""


def _goes_on(core: Planner, opening: int) -> bool:
    """Until the opening has run, or, if something is built and it is not yet told what for, three times as many."""
    untold = core.prices.dearest > 0 and not core.prices.dear
    return core.record.run < opening * (3 if untold else 1)
