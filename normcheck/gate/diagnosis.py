"""What a known fault says of a failure: the explanation of a finding, and the case that shows it best."""

from __future__ import annotations

from dataclasses import replace

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.checks.ask import UNPROBED, Ask
from normcheck.checks.attempt import run_alone, run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.finding import finding, signature, with_larger
from normcheck.diagnosis.explain import VALUES, explanation, tells
from normcheck.gate.blame import Blame
from normcheck.gate.plan import Plan
from normcheck.gate.shrink import clearer, widened
from normcheck.oracle.conventions import shown
from normcheck.result import Finding


def of_torn(cell: Cell, plan: Plan, case: Case | None, failed: Result) -> Finding | None:
    """What a known fault says of a kernel whose cases fit different conventions; None if none explains it.

    ``case``: the earlier one, which fits another convention than ``failed``. It is taken for the wrong one: by chance a
    fault may look like a convention in a few cases.
    """
    fits = failed.conventions
    if case is None or not fits or not plan.profile.explain_seconds:
        return None
    other = run_case(cell, case, plan, Ask(Depth.OFF, conventions=fits[:1]))
    if not other.failed or signature(other)[0] not in VALUES:
        return None
    known = explanation(cell, other, plan, seconds=plan.profile.explain_seconds, settled=True)
    if known is None:
        return None
    judged = f"It is judged by {shown(fits[0])}, which {failed.case} fits."
    return replace(finding(cell, other, plan.device, advise=False), explanation=known, advice=judged)


def of_earlier(cell: Cell, plan: Plan, blame: Blame, failure: Finding) -> Finding:
    """``failure`` explained by what the kernel may have kept of the earlier cases that it needs."""
    if failure.kind not in VALUES or not plan.profile.explain_seconds:
        return failure
    for number, case in enumerate(blame.needed):
        (run_case if number else run_alone)(cell, case, plan, UNPROBED)
    seconds, earlier = plan.profile.explain_seconds, tuple(case.eps for case in blame.needed)
    known = explanation(cell, blame.result, plan, seconds=seconds, earlier=earlier)
    return replace(failure, explanation=known)


def named(cell: Cell, plan: Plan, smallest: Result, failed: Result, failure: Finding) -> Finding:
    """``failure`` explained; of a larger case than ``smallest`` if other known faults explain that one as well."""
    failure = explained(cell, plan, smallest, failure)
    known = failure.explanation
    if known is None or not plan.profile.shrink_seconds:
        return failure
    case = clearer(cell, plan, smallest, lambda result: tells(cell, result, known.name))
    if case is smallest:
        return failure
    larger = replace(finding(cell, case, plan.device), explanation=known)
    return larger if larger.where is None else with_larger(larger, widened(cell, plan, case, failed))


def explained(cell: Cell, plan: Plan, smallest: Result, failure: Finding) -> Finding:
    """``failure`` with the known fault that explains it, if it is one of values and its cause is not known."""
    seconds = plan.profile.explain_seconds
    if failure.kind not in VALUES or failure.cause or not seconds:
        return failure
    return replace(failure, explanation=explanation(cell, smallest, plan, seconds=seconds))
