"""The judge of a recorded case: the same reference, bounds and checks as for a case that has just been run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs, make
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import GRADIENTS
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.contract import Problem
from normcheck.checks.gradients import Gradients, autograd_checks, gradient_names
from normcheck.checks.observe import Seen
from normcheck.errors import UsageError
from normcheck.golden.schema import AUTOGRAD, BITMASK, FED, GIVEN, RecordedCase, digests
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import Checked, Judge, Reference, judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.special import is_special, judge_special, what_an_infinity_does
from normcheck.oracle.tolerances import Model, declared_model, is_wider


def judge_recorded(recorded: RecordedCase, device: str) -> Result:
    """Every check of a case that was recorded on ``device``, with the bounds of today.

    Raises UsageError if its inputs, made again from the case, are not those that it was recorded with.
    """
    op, case = OPS[recorded.case.op], recorded.case
    model, base = model_of(recorded, device), undeclared_model(placeholder(recorded), device)
    if recorded.refused:
        return Result(case, model, refused=recorded.refused)
    inputs = _same_inputs(recorded, op)
    outputs = {name: recorded.tensors[name] for name in op.outputs if name in recorded.tensors}
    missing = tuple(name for name in op.outputs if name not in outputs)
    if "y" not in outputs:
        return Result(case, model, problems=recorded.problems, not_returned=missing)
    checked, gradients, doubt = _checked(recorded, judge_of(op, case, inputs, model, {}, zeros=True), inputs, outputs)
    undeclared: tuple[Checked, ...] = ()
    if is_wider(model, base):
        undeclared, _, _ = _checked(recorded, judge_of(op, case, inputs, base, {}), inputs, outputs)
    if is_special(case):
        checked += judge_special(op, case, inputs, {**outputs, **gradients.end_to_end}, model, doubt)
    problems = dict.fromkeys((*recorded.problems, *gradients.problems))
    absent = missing + gradients.not_returned
    notes = (*gradients.notes, *filter(None, [what_an_infinity_does(op, case, inputs, outputs)]))
    seen = Seen(outputs, gradients.end_to_end, gradients.refused)
    return Result(case, model, checked, tuple(problems), absent, notes=notes, seen=seen, undeclared=undeclared)


def _checked(
    recorded: RecordedCase, judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor]
) -> tuple[tuple[Checked, ...], Gradients, Tensor | None]:
    """Every check of values by one judge, the gradients with their problems and notes, and the bits in doubt."""
    checked, saved = judge_forward(judge, outputs)
    gradients = _gradients(recorded, judge, inputs, outputs, saved)
    return checked + gradients.checked, gradients, saved.doubt


def _never_called(*arguments: object, **options: object) -> Any:
    """The placeholder for the functions of a recorded implementation."""
    raise TypeError("this implementation is a record")


def placeholder(recorded: RecordedCase) -> Implementation:
    """The implementation as far as a record knows it: its name, its op, and whether it has a backward."""
    backward = None if recorded.backward == AUTOGRAD else _never_called
    return Implementation(name=recorded.implementation, op=recorded.case.op, forward=_never_called, backward=backward)


def model_of(recorded: RecordedCase, device: str) -> Model:
    """The table's model with the implementation's recorded declarations. Raises UsageError if one is not allowed."""
    return declared_model(undeclared_model(placeholder(recorded), device), recorded.declared, recorded.implementation)


def _same_inputs(recorded: RecordedCase, op: Op) -> Inputs:
    """The inputs of the case. Raises UsageError if they are not those that it was recorded with."""
    inputs = make(recorded.case, op, "cpu")
    actual = digests(inputs)
    for name in sorted(actual.keys() | recorded.inputs.keys()):
        if actual.get(name) != recorded.inputs.get(name):
            was, now = recorded.inputs.get(name, "none"), actual.get(name, "none")
            raise UsageError(
                f"inputs.{name}={was} of case {str(recorded.case)!r}: made here it is {now}; "
                "expected the bits that were recorded with: record anew"
            )
    return inputs


def _gradients(
    recorded: RecordedCase, judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor], saved: Reference
) -> Gradients:
    own = {name: t for name, t in recorded.tensors.items() if name in GRADIENTS}
    if recorded.gradients_refused:
        return Gradients(not_returned=gradient_names(inputs), refused=recorded.gradients_refused)
    if recorded.backward == AUTOGRAD:
        shaped = {name: t.reshape(inputs.x.shape) if name == "dx" else t for name, t in own.items()}
        return autograd_checks(judge, inputs, outputs, shaped, saved)
    own_bits = judge.op.clamped and ("bitmask" not in outputs or BITMASK not in recorded.reads)
    given, fed = recorded.part(GIVEN), recorded.part(FED)
    checked: tuple[Checked, ...] = ()
    problems = _fed_problems(fed, saved)
    if given and not problems:
        columns = {name: t.reshape(-1, 1) for name, t in fed.items()}
        exact = replace(saved, rstd=columns["rstd"], mean=columns.get("mean"))
        checked = judge_gradients(judge, given, exact, given=True, own_bits=own_bits)
    checked += judge_gradients(judge, own, saved, given=False, own_bits=own_bits)
    return Gradients(checked, problems, end_to_end=own)


def _fed_problems(fed: Mapping[str, Tensor], saved: Reference) -> tuple[Problem, ...]:
    """A problem for each statistic that a backward was fed with and that is not this machine's reference.

    Both are fp64 rounded to fp32. The other machine may order its fp64 sums differently, so that a tie rounds the other
    way: they may differ by one ulp, never by more.
    """
    problems = []
    for name, expected in (("mean", saved.mean), ("rstd", saved.rstd)):
        if name in fed and expected is not None:
            near = expected.flatten()
            low, high = (torch.nextafter(near, torch.full_like(near, end)) for end in (-torch.inf, torch.inf))
            equal = (fed[name] >= low) & (fed[name] <= high) | (torch.isnan(near) & torch.isnan(fed[name]))
            if not bool(equal.all()):
                message = f"{name} that backward was fed with is not the reference's: {int((~equal).sum())} rows"
                problems.append(Problem("mismatch", name, message))
    return tuple(problems)
