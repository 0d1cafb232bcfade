"""Whether a formula predicts everything that a kernel returned in a case: every element within its bound.

The bound of an element is that of a correct kernel, taken around the formula's own numbers: what goes into it, such as
|xhat| and the sums over a row, are the formula's. An element lies within it if the formula's number, moved by the error
of fp32 arithmetic either way and then stored as the formula stores it, can be what was returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from normcheck.diagnosis.evidence import Evidence
from normcheck.diagnosis.expected import Expected, Forward
from normcheck.diagnosis.formula import BACKWARD, TEXTBOOK, Formula, Way, by_autograd
from normcheck.diagnosis.forward import call_of, forward
from normcheck.diagnosis.gradients import gradients


def explains(formula: Formula, found: Evidence, way: Way) -> bool:
    """Whether every element that was returned lies where ``formula`` puts it, if the kernel has this ``way``."""
    with torch.no_grad():
        if _has_usual_forward(formula):
            before = _usual(found, way)
            return before.fits and all(map(_inside(found), _of_backward(formula, found, before)))
        before = forward(formula, found, way)
        return all(map(_inside(found), chain(before.expected, _of_backward(formula, found, before))))


def predicted(formula: Formula, found: Evidence, way: Way) -> int:
    """Of how many elements ``formula`` says where they lie: not of those whose bound is infinite."""
    return sum(int((~each.unbounded).sum()) for each in _every(formula, found, way))


def tells(formula: Formula, found: Evidence, way: Way) -> bool:
    """Whether ``formula`` says where an element lies that the textbook has elsewhere. At N = 1 a division by N - 1 says
    nothing of y, and of all else what the textbook does.
    """
    usual = {each.output: each.holds(found.returned[each.output]) for each in _every(TEXTBOOK, found, way)}
    own = (each for each in _every(formula, found, way) if each.output in usual)
    return any(bool((~usual[each.output] & ~each.unbounded).any()) for each in own)


def _every(formula: Formula, found: Evidence, way: Way) -> list[Expected]:
    with torch.no_grad():
        before = _usual(found, way) if _has_usual_forward(formula) else forward(formula, found, way)
        return [*before.expected, *_of_backward(formula, found, before)]


def _inside(found: Evidence) -> Callable[[Expected], bool]:
    return lambda expected: bool(expected.holds(found.returned[expected.output]).all())


def _has_usual_forward(formula: Formula) -> bool:
    return formula.changed <= _AFTER_FORWARD


_AFTER_FORWARD = BACKWARD - {"read"}


def _usual(found: Evidence, way: Way) -> Forward:
    """The textbook's forward, which every fault of a backward shares."""
    if way not in found.usual:
        before = forward(TEXTBOOK, found, way)
        found.usual[way] = replace(before, fits=all(map(_inside(found), before.expected)))
    return found.usual[way]


def _of_backward(formula: Formula, found: Evidence, before: Forward) -> Iterator[Expected]:
    """What ``formula`` predicts of each gradient that was returned, behind the forward ``before`` it."""
    if "dx" not in found.returned or formula.lossy:
        return
    made: dict[str, Tensor] = {}
    call = copy(before.call)
    call.formula = formula
    if not found.own_backward and not formula.is_backward:
        call = call_of(formula, found, call.way)
        with torch.enable_grad():
            made = by_autograd(call)
    yield from gradients(call, found, made, before.doubt, before.given)
