"""A recorded case, judged as if it had just been run: the same reference, the same bounds, the same checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops.op import GRADIENTS, Op
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.contract import Problem
from normcheck.checks.gradients import Gradients, autograd_checks, gradient_names
from normcheck.errors import UsageError
from normcheck.golden.schema import AUTOGRAD, BITMASK, FED, GIVEN, Recorded, digests
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import Checked, Judge, Reference, judge_forward, judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.special import is_special, judge_special, what_an_infinity_does
from normcheck.oracle.tolerances import Model, declared_model, is_wider


def judged(recorded: Recorded, device: str) -> Result:
    """Every check of a case that was recorded on ``device``, with the bounds of today.

    Raises UsageError where its inputs, made anew, are not those that it was recorded with.
    """
    op, case = discovery.ops()[recorded.case.op], recorded.case
    model, base = model_of(recorded, device), undeclared_model(placeholder(recorded), device)
    if recorded.refused:
        return Result(case, model, refused=recorded.refused)
    inputs = _same_inputs(recorded, op)
    outputs = {name: recorded.tensors[name] for name in op.outputs if name in recorded.tensors}
    missing = tuple(name for name in op.outputs if name not in outputs)
    if "y" not in outputs:
        return Result(case, model, problems=recorded.problems, not_returned=missing)
    checked, gradients = _checked(recorded, judge_of(op, case, inputs, model, {}, zeros=True), inputs, outputs)
    undeclared: tuple[Checked, ...] = ()
    if is_wider(model, base):
        undeclared, _ = _checked(recorded, judge_of(op, case, inputs, base, {}), inputs, outputs)
    if is_special(case):
        checked += judge_special(op, case, inputs, {**outputs, **gradients.end_to_end}, model)
    problems = dict.fromkeys((*recorded.problems, *gradients.problems))
    absent = missing + gradients.not_returned
    notes = (*gradients.notes, *filter(None, [what_an_infinity_does(op, case, inputs, outputs)]))
    return Result(case, model, checked, tuple(problems), absent, notes=notes, undeclared=undeclared)


def _checked(
    recorded: Recorded, judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor]
) -> tuple[tuple[Checked, ...], Gradients]:
    """Every check of values by one judge; the gradients, and what else there is to say of them."""
    checked, saved = judge_forward(judge, outputs)
    gradients = _gradients(recorded, judge, inputs, outputs, saved)
    return checked + gradients.checked, gradients


def not_here(*arguments: object, **options: object) -> Any:
    """Stands where a recorded implementation's functions would. It is never called."""
    raise TypeError("this implementation is a record")


def placeholder(recorded: Recorded) -> Implementation:
    """What is known of the implementation itself."""
    backward = None if recorded.backward == AUTOGRAD else not_here
    return Implementation(name=recorded.implementation, op=recorded.case.op, forward=not_here, backward=backward)


def model_of(recorded: Recorded, device: str) -> Model:
    """The table's model, with what the implementation declared when it was recorded. Raises UsageError."""
    return declared_model(undeclared_model(placeholder(recorded), device), recorded.declared, recorded.implementation)


def _same_inputs(recorded: Recorded, op: Op) -> Inputs:
    inputs = make(recorded.case, op, "cpu")
    found = digests(inputs)
    for name in sorted(found.keys() | recorded.inputs.keys()):
        if found.get(name) != recorded.inputs.get(name):
            was, now = recorded.inputs.get(name, "none"), found.get(name, "none")
            raise UsageError(
                f"inputs.{name}={was} of case {str(recorded.case)!r}: made here it is {now}; "
                "expected the bits that were recorded with: record anew"
            )
    return inputs


def _gradients(
    recorded: Recorded, judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor], saved: Reference
) -> Gradients:
    own = {name: t for name, t in recorded.tensors.items() if name in GRADIENTS}
    if recorded.gradients_refused:
        note = f"gradients not checked: {recorded.gradients_refused}"
        return Gradients(not_returned=gradient_names(inputs), notes=(note,))
    if recorded.backward == AUTOGRAD:
        shaped = {name: t.reshape(inputs.x.shape) if name == "dx" else t for name, t in own.items()}
        return autograd_checks(judge, inputs, outputs, shaped, saved)
    own_bits = judge.op.clamped and ("bitmask" not in outputs or BITMASK not in recorded.reads)
    given, fed = recorded.part(GIVEN), recorded.part(FED)
    checked: tuple[Checked, ...] = ()
    problems = _unlike(fed, saved)
    if given and not problems:
        was = {name: t.reshape(-1, 1) for name, t in fed.items()}
        exact = replace(saved, rstd=was["rstd"], mean=was.get("mean"))
        checked = judge_gradients(judge, given, exact, given=True, own_bits=own_bits)
    checked += judge_gradients(judge, own, saved, given=False, own_bits=own_bits)
    return Gradients(checked, problems, end_to_end=own)


def _unlike(fed: Mapping[str, Tensor], saved: Reference) -> tuple[Problem, ...]:
    """What a backward was fed with, held against this machine's reference.

    Both are fp64 rounded to fp32. The fp64 sums may be of another order there, so that a tie may round the other way:
    one ulp, never more.
    """
    found = []
    for name, expected in (("mean", saved.mean), ("rstd", saved.rstd)):
        if name in fed and expected is not None:
            near = expected.flatten()
            low, high = (torch.nextafter(near, torch.full_like(near, end)) for end in (-torch.inf, torch.inf))
            equal = (fed[name] >= low) & (fed[name] <= high) | (torch.isnan(near) & torch.isnan(fed[name]))
            if not bool(equal.all()):
                message = f"{name} that backward was fed with is not the reference's: {int((~equal).sum())} rows"
                found.append(Problem("mismatch", name, message))
    return tuple(found)
