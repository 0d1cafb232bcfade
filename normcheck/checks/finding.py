"""A failed Result as a Finding: the one thing to look at first, and what would help to understand it."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from normcheck.checks import own_limit
from normcheck.checks.bitmask_diff import bit_diff
from normcheck.checks.cause import cause
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.contract import Problem
from normcheck.checks.probes import Depth
from normcheck.checks.where import locate
from normcheck.impls import source_location
from normcheck.impls.implementation import OVERWRITABLE
from normcheck.oracle.compare import Comparison
from normcheck.oracle.judge import END_TO_END, GIVEN_OWN, Checked
from normcheck.oracle.rounding import NO_ROOM
from normcheck.result import Finding

_ALTERNATIVES: tuple[tuple[dict[str, object], str], ...] = (
    (
        {"y_given_stats": False},
        "y and the saved statistics disagree: y alone is within its bound. If y is meant to come from other numbers "
        "than those saved, declare model={'y_given_stats': False}.",
    ),
    (
        {"y_form": "folded"},
        "It would pass as a folded y = x * a + c, which loses accuracy on rows far from zero. If that is meant, "
        "declare model={'y_form': 'folded'}.",
    ),
    (
        {"bwd_form": "raw"},
        "It would pass as a backward from raw sums of dy * g * x, which cancel on rows far from zero. If that is "
        "meant, declare model={'bwd_form': 'raw'}.",
    ),
)


_WAY = ("", "mean", "rstd", "y", "bitmask", "input", "dx", "dw", "db")


def signature(result: Result) -> tuple[str, str]:
    """Kind and output of what is to be looked at first; a value that is not finite is a mismatch like another."""
    first = _first(result)
    return (first.kind, first.output) if isinstance(first, Problem) else ("mismatch", first.output)


def place(result: Result) -> tuple[int, int]:
    """How early on the data's way a failed result is wrong; smaller is nearer to the root."""
    return _place(_first(result))


def worst_ratio(result: Result) -> float:
    """The ratio of what is to be looked at first; infinite where it is not a matter of values or of numbers."""
    if not result.failed:
        return 0.0
    first = _first(result)
    return first.comparison.ratio if isinstance(first, Checked) else math.inf


def finding(cell: Cell, result: Result, device: str, *, advise: bool = True) -> Finding:
    """The finding of a failed ``result``. ``advise``: also try whether another declared model would pass."""
    first = _first(result)
    line = str(result.case)
    reproduce = f"normcheck repro {shlex.quote(cell.spec)} {shlex.quote(line)}"
    also = tuple(dict.fromkeys([p.output or p.kind for p in result.problems] + [c.output for c in result.wrong]))
    if isinstance(first, Problem):
        return Finding(
            kind=first.kind,
            output=first.output,
            case=line,
            message=first.message,
            reproduce=reproduce,
            also=tuple(name for name in also if name not in (first.output, first.kind)),
            traceback=first.frames,
            advice=own_limit.advice(first) or _overwriting(first),
            line=source_location.line_in(source_location.of(cell.implementation), first.frames),
        )
    found = _mismatch(first, line, reproduce)
    why = cause(cell.op, result, device)
    advice = _advice(cell, result, device) if advise and not why else ""
    if first.output == "bitmask" and first.comparison.worst is not None and first.check == END_TO_END:
        returned = result.seen.outputs.get("bitmask")
        told = bit_diff(cell.op, result.case, result.model, returned, first.comparison.worst, device)
        advice = f"{told}\n{advice}".strip()
    return replace(found, also=tuple(name for name in also if name != first.output), advice=advice, cause=why)


def _overwriting(problem: Problem) -> str:
    """How to declare that an input may be written to, "" when the problem is another."""
    if problem.kind != "input_modified" or problem.output not in OVERWRITABLE:
        return ""
    return f'If callers know that the kernel overwrites {problem.output}, declare overwrites=("{problem.output}",).'


def _first(result: Result) -> Problem | Checked:
    """In the order of the data's way, the root is the first that is wrong: a call that broke, what forward returned,
    an input that was written to, what backward returned; of one output its shape before its values."""
    candidates: list[Problem | Checked] = [*result.problems, *result.wrong]
    return min(candidates, key=_place)


def _place(found: Problem | Checked) -> tuple[int, int]:
    if isinstance(found, Problem) and found.kind == "input_modified":
        return (_WAY.index("input"), 0)
    where = _WAY.index(found.output) if found.output in _WAY else 0
    return (where, int(isinstance(found, Checked)))


def _mismatch(first: Checked, line: str, reproduce: str) -> Finding:
    c = first.comparison
    assert c.worst is not None and c.wrong is not None
    worst, mismatched = c.worst, int(c.wrong.sum())
    grid = c.wrong if c.wrong.dim() == 2 and c.wrong.shape[1] > 1 else c.wrong.reshape(1, -1)
    if first.output in ("mean", "rstd"):
        grid = c.wrong.reshape(-1, 1)
    return Finding(
        kind="non_finite" if c.non_finite and not math.isfinite(worst.actual) else "mismatch",
        output=first.output,
        case=line,
        message=_message(first, c, mismatched),
        reproduce=reproduce,
        check=first.check,
        index=worst.index[:1] if first.output in ("mean", "rstd") else worst.index,
        actual=worst.actual,
        expected=worst.expected,
        error=worst.error,
        bound=worst.bound if worst.bound > NO_ROOM else 0.0,
        ratio=c.ratio,
        max_ulp=c.max_ulp,
        mismatched=mismatched,
        numel=c.numel,
        terms=worst.terms,
        where=locate(grid),
    )


def _message(first: Checked, c: Comparison, mismatched: int) -> str:
    assert c.worst is not None
    if first.output == "bitmask":
        return f"bitmask: {mismatched} of {c.numel} bits differ from lower_clip < z < upper_clip"
    return (
        f"{first.output}: {mismatched} of {c.numel} elements are off by more than their bound, {first.check}; "
        f"at {list(c.worst.index)} got {c.worst.actual:.9g}, expected {c.worst.expected:.9g}"
    )


def _advice(cell: Cell, result: Result, device: str) -> str:
    """What a declaration about the kernel's arithmetic would change, tried on this very case."""
    only_given = {c.check for c in result.wrong} == {GIVEN_OWN}
    for changes, text in _ALTERNATIVES:
        if "y_given_stats" in changes and not only_given:
            continue
        model = replace(result.model, **changes)  # type: ignore[arg-type]
        if model == result.model:
            continue
        tried = check(cell.implementation, cell.op, result.case, device, model=model, depth=Depth.OFF)
        if not tried.failed:
            return text
    return ""
