"""Probe for repeatability: the same call again, with another pattern in memory that is not the implementation's own.

The same bits mean that a kernel repeats, reads nothing unwritten and nothing out of bounds. Only if they differ, more
runs change one thing each, to find the reason.
"""

from __future__ import annotations

import math

import torch

from normcheck.cases.case import Case
from normcheck.cases.guard_bands import LARGE, NEGATIVE, ONE, Pattern
from normcheck.cases.layouts import HEADS
from normcheck.checks.contract import Problem
from normcheck.checks.observe import observe
from normcheck.checks.rerun import Probed, Subject, changed, first_difference, refused_again, sharing_memory
from normcheck.result import LATER_CALLS
from normcheck.runner.arena import Surroundings

_REPEATS = 4


def other_surroundings(case: Case) -> Surroundings:
    """The surroundings of the second run: another pattern in all memory that is not the implementation's own."""
    return _everywhere(NEGATIVE if case.seed % 2 else LARGE)


def _everywhere(pattern: Pattern) -> Surroundings:
    return Surroundings(pattern, pattern, pattern, pattern)


def _wrongly_not_finite(subject: Subject) -> set[str]:
    """The outputs of the first run with a NaN or an infinity that is wrong: a large number read may make the same."""
    named = subject.first.named
    found = {name for name, t in named.items() if t.dtype.is_floating_point and not _is_finite(t.detach().float())}
    return found.intersection(subject.wrong_values(subject.inputs, subject.first)) if found else found


def _is_finite(t: torch.Tensor) -> bool:
    """Whether all of t is finite; its sum, which is quicker, tells if it is finite itself."""
    return math.isfinite(float(t.sum())) or bool(torch.isfinite(t).all())


def repeated(subject: Subject) -> Probed:
    """Compare the second run, in ``other_surroundings``, with the first."""
    pattern = subject.second.surroundings.inputs
    second, problems = observe(subject.implementation, subject.op, subject.case, subject.second, subject.bits)
    if second.refused and not subject.first.refused:
        return Probed((refused_again(second.refused),))
    shared = sharing_memory(subject.first, second)
    if shared:
        message = f"{shared} of two calls lies in the same memory: the second call overwrote the result of the first"
        return Probed((Problem("not_repeatable", shared, message, check=LATER_CALLS),))
    differing = changed(subject.first, second)
    if not problems and _wrongly_not_finite(subject) - {*differing}:
        others = changed(subject.first, subject.again(_everywhere(ONE))[0])
        pattern, differing = (ONE, others) if others else (pattern, differing)
    repeats = {name: name not in differing for name in subject.first.named}
    if not differing or problems:
        return Probed(problems, repeats)
    if subject.implementation.deterministic:
        return Probed((_reason(subject, pattern, differing),), repeats)
    wrong = subject.wrong_values(subject.inputs, second)
    message = f"is right at first, and wrong when run again with {pattern.name} in memory that is not its own"
    return Probed(tuple(Problem("not_repeatable", name, f"{name} {message}") for name in wrong[:1]), repeats)


def _reason(subject: Subject, pattern: Pattern, differing: list[str]) -> Problem:
    """Why the ``differing`` outputs do not have the bits of the first run, found by changing one thing at a time."""
    unsteady = _unsteady(subject, Surroundings(), _REPEATS)
    if unsteady is not None:
        return unsteady
    saved = " or ".join(subject.first.outputs)
    between = "behind the heads of its tokens" if subject.case.layout == HEADS else "in the gaps of its rows"
    for kind, surroundings, what in (
        ("unwritten", Surroundings(fresh=pattern), "memory that was never written, such as what torch.empty returns"),
        ("out_of_bounds_read", Surroundings(allocated=pattern), "what lies around memory that it allocated"),
        ("out_of_bounds_read", Surroundings(inputs=pattern), f"what lies around an input, or {between}"),
        ("out_of_bounds_read", Surroundings(saved=pattern), f"what lies around {saved}, as backward gets it"),
    ):
        found = first_difference(subject.first, subject.again(surroundings)[0])
        if found:
            name, how_many = found
            unsteady = _unsteady(subject, surroundings, 1) or _unsteady(subject, Surroundings(), _REPEATS)
            return unsteady or Problem(kind, name, f"{name} depends on {what}: {how_many}")
    message = f"{differing[0]} depends on memory that is not the implementation's own"
    return Problem("out_of_bounds_read", differing[0], message)


def _unsteady(subject: Subject, surroundings: Surroundings, repeats: int) -> Problem | None:
    """The problem if runs in the same surroundings differ, or None. If so, a difference says nothing about memory."""
    first = subject.first if surroundings == Surroundings() else subject.again(surroundings)[0]
    for _ in range(repeats):
        again = subject.again(surroundings)[0]
        found = first_difference(first, again)
        if found:
            name, how_many = found
            wrong = any(name in subject.wrong_values(subject.inputs, seen) for seen in (first, again))
            more = "" if wrong else "; if that is meant, declare deterministic=False"
            return Problem("not_repeatable", name, f"{name} is not the same when run again: {how_many}{more}")
    return None
