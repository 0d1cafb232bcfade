"""Sanity check of a verdict before it is reported: a pass that no comparison can have produced is no pass.

A verdict may come from a package that somebody has edited, or from a report that somebody has written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from normcheck.errors import ITSELF_FAILED, one_line
from normcheck.result import KINDS, Finding, Verdict

_OF_VALUES = ("mismatch", "non_finite")
"""Kinds of findings that are about the values of an output, and so have numbers."""


def sensible(verdict: Verdict) -> Verdict:
    """``verdict`` as it is if it makes sense; otherwise an ``error`` whose detail says what does not."""
    problems = nonsense(verdict)
    if not problems:
        return verdict
    detail = f"{ITSELF_FAILED}: status={verdict.status} makes no sense: {'; '.join(problems)}"
    if verdict.failure is not None:
        detail += f" (it says: {one_line(verdict.failure.message, 300)})"
    return replace(verdict, status="error", detail=detail, failure=None, known="", failed_at=None)


def nonsense(verdict: Verdict) -> tuple[str, ...]:
    """The contradictions in a verdict, each as ``name=value: expected ...``; () for every verdict that normcheck gives.

    Only the verdict itself is read. An ``error`` may hold any counts of the time before it, and needs a detail.
    """
    return (*_counts(verdict), *_of_status(verdict))


def _of_status(v: Verdict) -> Iterator[str]:
    if v.status in ("pass", "thin"):
        yield from _passed(v)
    elif v.status == "fail":
        yield from _failed(v)
    elif v.status in ("skip", "error"):
        if not v.detail:
            yield 'detail="": expected why'
        if v.failure is not None:
            yield f"failure.kind={v.failure.kind}: expected no failure"
    else:
        yield "expected pass, thin, fail, skip or error"


def _passed(v: Verdict) -> Iterator[str]:
    if v.failure is not None:
        yield f"failure.kind={v.failure.kind}: expected no failure"
    if v.cases < 1:
        yield f"cases={v.cases}: expected one at least"
    if v.shapes is not None and v.shapes < 1:
        yield f"shapes={v.shapes}: expected one at least"
    if not v.worst:
        yield "worst has no output: expected that one was compared at least"
    for name, worst in v.worst.items():
        if not 0 <= worst.ratio <= 1:
            yield f"worst.{name}.ratio={worst.ratio:g}: expected 0 to 1"
    if v.status == "pass" and v.core is not None and v.core.missed:
        yield f"core.missed={one_line(v.core.missed[0], 100)}: expected nothing, or thin"
    if v.status == "thin" and not v.detail:
        yield 'detail="": expected what was not checked'
    if v.known:
        yield "known: expected a failure, of which a reason is known"


def _failed(v: Verdict) -> Iterator[str]:
    if v.failure is None:
        yield "failure=None: expected what failed"
    else:
        yield from _finding(v.failure)


def _finding(found: Finding) -> Iterator[str]:
    if found.kind not in KINDS:
        yield f"failure.kind={found.kind}: expected one of {', '.join(KINDS)}"
    if not found.case:
        yield 'failure.case="": expected the case that failed'
    if found.kind not in _OF_VALUES:
        return
    if not found.output:
        yield 'failure.output="": expected the output whose values are wrong'
    if found.ratio is None or found.ratio <= 1:
        yield f"failure.ratio={found.ratio}: expected more than 1, or NaN"
    if found.mismatched is None or found.numel is None or not 1 <= found.mismatched <= found.numel:
        yield f"failure.mismatched={found.mismatched}: expected 1 to failure.numel={found.numel}"


def _counts(v: Verdict) -> Iterator[str]:
    """Counts that are negative or larger than the total that they are a part of; seconds that are negative or not
    finite."""
    if v.cases < 0:
        yield f"cases={v.cases}: expected 0 or more"
    if not (math.isfinite(v.seconds) and v.seconds >= 0):
        yield f"seconds={v.seconds:g}: expected 0 or more"
    if v.failed_at is not None and v.failed_at < -1:
        yield f"failed_at={v.failed_at}: expected -1 or more"
    parts = [(f"uncheckable.{name}.count", part.count, part.total) for name, part in v.uncheckable.items()]
    for name, vacuity in v.vacuity.items():
        parts.append((f"vacuity.{name}.zeros", vacuity.zeros, vacuity.total))
        parts.append((f"vacuity.{name}.empty", vacuity.empty, vacuity.checks))
    for what, each in (("repeats", v.repeats), ("invariance", v.invariance)):
        for name, steadiness in each.items():
            parts.append((f"{what}.{name}.differ", steadiness.differ, steadiness.cases))
            parts.append((f"{what}.{name}.cases", steadiness.cases, v.cases))
    if v.shapes is not None:
        parts.append(("shapes", v.shapes, v.cases))
    parts.append(("backward_refused", sum(v.backward_refused.values()), v.cases))
    yield from (f"{name}={part}: expected 0 to {whole}" for name, part, whole in parts if not 0 <= part <= whole)
    refused = {**v.skipped, **v.backward_refused}
    yield from (f"refused={count}: expected 1 or more" for count in refused.values() if count < 1)
    yield from (f"not_returned={name}: expected no ratio of it" for name in v.not_returned if name in v.worst)
