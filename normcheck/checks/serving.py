"""Probe for what a kernel does if nobody wants a gradient, as where it serves: it may take a shorter way then.

What that way returns need not have the bits of the usual one. It must be within its bounds, and inputs as they were.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.checks.contract import Problem, usable_outputs
from normcheck.checks.observe import Seen, Started, start, strays, written
from normcheck.checks.refusal import refusal
from normcheck.checks.rerun import Subject
from normcheck.errors import Broken, UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.result import CONTEXT
from normcheck.runner.arena import Surroundings
from normcheck.runner.run import SERVING
from normcheck.runner.session import session_of

INFERENCE = "inference"
"""The context of which this is a part, on every case that is probed."""

_OF_OTHERS = 4
"""A kernel that has no graph seldom looks whether a gradient is wanted: one of so many cases is called so."""


def is_served(implementation: Implementation, op: Op, case: Case) -> bool:
    """Whether a case is called without gradients as well, for which torch.compile would compile it anew."""
    if case.huge or session_of(implementation).graphs:
        return False
    return (implementation.backward is None and not op.quantises) or case.seed % _OF_OTHERS == 0


def served(subject: Subject) -> Problem | None:
    """What is wrong with a case that is right if gradients are wanted; None if nothing is."""
    mode = tuple(SERVING)[subject.case.seed % len(SERVING)]
    try:
        started = start(subject.implementation, subject.case, subject.inputs, Surroundings(), serving=mode)
        output, message = _wrong(subject, started, started.forward.result().outputs)
    except UnsupportedCase:
        return None
    except Broken as broken:
        problem = Problem(broken.kind, broken.output, broken.message, broken.frames)
        if "out of memory" in broken.message or refusal(subject.case, problem):
            return None
        return Problem(CONTEXT, broken.output, f"{broken.message} (under {mode})", broken.frames, INFERENCE)
    return Problem(CONTEXT, output, f"{message} under {mode}", check=INFERENCE) if message else None


def _wrong(subject: Subject, started: Started, returned: Mapping[str, Tensor]) -> tuple[str, str]:
    """An output or input, and what is wrong with it, in words; ("", "") if nothing is."""
    op, case, first = subject.op, subject.case, subject.first.outputs
    outputs, unusable = usable_outputs(op, case, started.given, returned)
    done = written(subject.implementation, started.before, started.given) + strays(started.run, outputs)
    for problem in (*unusable, *done):
        return problem.output, problem.message
    if op.main_output not in outputs:
        return op.main_output, f"{op.main_output} is missing"
    differing = [name for name in first if name in outputs and not guard_bands.same_bits(first[name], outputs[name])]
    if not differing:
        return "", ""
    others = [name for name in differing if case.rows == "nan" and _other_nans(first[name], outputs[name])]
    for name in [*subject.wrong_values(subject.inputs, Seen(outputs)), *others]:
        return name, f"{name} is outside its bound"
    return "", ""


def _other_nans(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() and not torch.equal(one.isnan(), other.isnan())
