"""One case on one implementation -> Result: call it, have every output judged, say what is wrong.

Stages are judged alone and end to end: y also against the formula fed with the kernel's own saved statistics, the
gradients also from a backward fed with the reference's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck import bitmask, call
from normcheck.case import Case
from normcheck.errors import UnsupportedCase
from normcheck.implementation import Implementation
from normcheck.inputs import Inputs, make
from normcheck.judge import (
    GIVEN_REFERENCE,
    Checked,
    Judge,
    Reference,
    bits_of,
    judge_forward,
    judge_gradients,
    judge_of,
)
from normcheck.ops.op import GRADIENTS, Op
from normcheck.outputs import Problem, usable_gradients, usable_outputs
from normcheck.table import Model, declared_model, table


@dataclass(frozen=True, slots=True)
class Result:
    """What a case showed. ``checked`` is in the order of the data's way; ``refused``: why the case did not run.

    ``model`` is what it was judged by; ``notes`` are for whoever reads a pass.
    """

    case: Case
    model: Model
    checked: tuple[Checked, ...] = ()
    problems: tuple[Problem, ...] = ()
    not_returned: tuple[str, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """The checks that did not hold; NaN does not."""
        return tuple(c for c in self.checked if not c.comparison.ratio <= 1)

    @property
    def failed(self) -> bool:
        """Whether anything at all is wrong."""
        return bool(self.problems or self.wrong)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The backward half of a result."""

    checked: tuple[Checked, ...] = ()
    problems: tuple[Problem, ...] = ()
    not_returned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check(
    implementation: Implementation,
    op: Op,
    case: Case,
    device: str,
    *,
    floors: Mapping[str, float] | None = None,
    model: Model | None = None,
) -> Result:
    """Run ``case`` on ``device`` ("cpu" or "cuda") and judge it.

    ``floors``: output -> ratio below which details are not wanted; ``model`` replaces the one that the implementation
    declares. What an implementation does wrong is in the result; an exception is a fault of normcheck.
    """
    pristine = make(case, op, device)
    given = _copies(pristine)
    try:
        model = model or model_of(implementation, case, device)
        result = _checked(implementation, op, case, pristine, given, model, floors or {})
    except UnsupportedCase as refusal:
        return Result(case, model or table().model, refused=str(refusal) or "its library gave no reason")
    except call.Broken as broken:
        problem = Problem(broken.kind, broken.output, broken.message, broken.frames)
        result = Result(case, model or table().model, problems=(problem,))
    return replace(result, problems=result.problems + _modified(pristine, given))


def undeclared_model(implementation: Implementation, device: str) -> Model:
    """The table's model, with what holds for torch autograd on a CPU."""
    if implementation.backward is None and device == "cpu":
        return replace(table().model, **table().autograd_cpu)
    return table().model


def model_of(implementation: Implementation, case: Case, device: str) -> Model:
    """The undeclared model, with what the implementation declares about its arithmetic in this case."""
    declared = call.model(implementation, case)
    base = undeclared_model(implementation, device)
    return declared_model(base, declared, implementation.name) if declared else base


def _checked(
    implementation: Implementation,
    op: Op,
    case: Case,
    pristine: Inputs,
    given: Inputs,
    model: Model,
    floors: Mapping[str, float],
) -> Result:
    inputs = call.differentiable(given) if implementation.backward is None else given
    returned = call.forward(implementation, case, inputs)
    outputs, problems = usable_outputs(op, case, pristine, returned)
    unknown = sorted(set(returned) - set(op.outputs))
    notes = tuple(f"forward returned {name!r}, which {op.name} does not have: ignored" for name in unknown)
    missing = tuple(name for name in op.outputs if name not in returned)
    if "y" not in outputs:
        return Result(case, model, (), problems, missing, notes=notes)
    own_gradients = call.autograd(returned, inputs) if implementation.backward is None else {}
    judge = judge_of(op, case, pristine, model, floors)
    checked, saved = judge_forward(judge, outputs)
    if implementation.backward is None:
        gradients = _autograd_checks(judge, pristine, outputs, own_gradients, saved)
    else:
        gradients = _backward_checks(implementation, judge, given, outputs, saved)
    return Result(
        case,
        model,
        checked + gradients.checked,
        problems + gradients.problems,
        missing + gradients.not_returned,
        notes=notes + gradients.notes,
    )


def _copies(inputs: Inputs) -> Inputs:
    """The tensors that the implementation gets: wherever it writes, the judge keeps the originals."""

    def copy(t: Tensor) -> Tensor:
        if t.dim() == 2 and t.stride(0) > t.shape[1]:
            return t.as_strided((t.shape[0], t.stride(0)), t.stride()).clone()[:, : t.shape[1]]
        return t.clone()

    bias = None if inputs.bias is None else copy(inputs.bias)
    return Inputs(copy(inputs.x), copy(inputs.weight), bias, copy(inputs.dy))


def _modified(pristine: Inputs, given: Inputs) -> tuple[Problem, ...]:
    """Inputs whose bits are not what they were."""
    found = []
    for name in ("x", "weight", "bias", "dy"):
        before, after = getattr(pristine, name), getattr(given, name)
        if before is None:
            continue
        bits = torch.int16 if before.element_size() == 2 else torch.int32
        if after.shape != before.shape or after.stride() != before.stride():
            message = f"{name} was modified: its shape or strides; inputs belong to the caller"
            found.append(Problem("input_modified", name, message))
            continue
        before, after = before.view(bits), after.view(bits)
        if not torch.equal(before, after):
            share = f"{int((before != after).sum())} of {before.numel()} elements"
            found.append(Problem("input_modified", name, f"{name} was modified: {share}; inputs belong to the caller"))
    return tuple(found)


def _autograd_checks(
    judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor], saved: Reference
) -> _Gradients:
    """Gradients through y are end to end, and pass where the kernel's own bits are set, which cannot be replaced.

    A bit in doubt is taken from the bitmask that the kernel returned, if autograd agrees with it; otherwise, and at an
    exact tie with a limit, whatever hangs on the bit is in doubt.
    """
    if not gradients:
        note = "no backward, and y does not carry autograd's graph: gradients not checked"
        return _Gradients(not_returned=_gradient_names(inputs), notes=(note,))
    usable, problems = usable_gradients(inputs, gradients)
    if saved.doubt is None or saved.bits is None or saved.ties is None or "bitmask" not in outputs:
        return _Gradients(judge_gradients(judge, usable, saved, given=False, own_bits=True), problems)
    returned = bits_of(outputs["bitmask"], judge.case)
    settled = replace(saved, bits=torch.where(saved.doubt, returned, saved.bits), doubt=saved.ties)
    checked = judge_gradients(judge, usable, settled, given=False, own_bits=True)
    if any(not c.comparison.ratio <= 1 for c in checked):
        checked = judge_gradients(judge, usable, saved, given=False, own_bits=True)
    return _Gradients(checked, problems)


def _gradient_names(inputs: Inputs) -> tuple[str, ...]:
    return GRADIENTS if inputs.bias is not None else GRADIENTS[:2]


def _backward_checks(
    implementation: Implementation, judge: Judge, given: Inputs, outputs: Mapping[str, Tensor], saved: Reference
) -> _Gradients:
    """The implementation's own backward: fed with the reference's statistics (where it saves any), then with its own.

    The bitmask is the reference's both times, so that one bit in doubt does not spoil a gradient.
    """
    own = _with_bits(outputs, saved)
    staged = all(name in outputs for name in judge.op.statistics)
    try:
        end_to_end = call.backward(implementation, judge.case, given, own)
        stage = call.backward(implementation, judge.case, given, _with_statistics(own, saved)) if staged else {}
    except UnsupportedCase as refusal:
        note = f"gradients not checked: {refusal}"
        return _Gradients(not_returned=_gradient_names(given), notes=(note,))
    usable, problems = usable_gradients(given, end_to_end)
    checked: tuple[Checked, ...] = ()
    own_bits = "bitmask" in judge.op.outputs and "bitmask" not in outputs
    if staged:
        checked = judge_gradients(judge, usable_gradients(given, stage)[0], saved, given=True, own_bits=own_bits)
    checked += judge_gradients(judge, usable, saved, given=False, own_bits=own_bits)
    if all(c.comparison.ratio <= 1 for c in checked):
        return _Gradients(checked, problems)
    found = _Gradients(checked, problems)
    return _reconsidered(implementation, judge, given, own, saved, usable, usable_gradients(given, stage)[0], found)


def _reconsidered(
    implementation: Implementation,
    judge: Judge,
    given: Inputs,
    own: Mapping[str, Tensor],
    saved: Reference,
    end_to_end: Mapping[str, Tensor],
    stage: Mapping[str, Tensor],
    found: _Gradients,
) -> _Gradients:
    """A backward that does not read what it was given cannot be judged by it: then only end to end counts.

    Whether it reads is found by giving it something else: the same bits out mean that it does not.
    """
    notes: tuple[str, ...] = ()
    checked = found.checked
    if any(c.check == GIVEN_REFERENCE for c in checked):
        shifted = {n: t * 1.5 + 0.25 for n, t in own.items() if n in judge.op.statistics}
        if _same_bits(call.backward(implementation, judge.case, given, {**own, **shifted}), end_to_end):
            checked = tuple(c for c in checked if c.check != GIVEN_REFERENCE)
            notes += ("backward does not read the saved statistics: its gradients are judged end to end only",)
    doubtful = saved.doubt is not None and bool(saved.doubt.any())
    if doubtful and "bitmask" in own and any(not c.comparison.ratio <= 1 for c in checked):
        flipped = {**own, "bitmask": ~own["bitmask"]}
        if _same_bits(call.backward(implementation, judge.case, given, flipped), end_to_end):
            staged = any(c.check == GIVEN_REFERENCE for c in checked)
            checked = judge_gradients(judge, stage, saved, given=True, own_bits=True) if staged else ()
            checked += judge_gradients(judge, end_to_end, saved, given=False, own_bits=True)
            notes += ("backward does not read the bitmask",)
    return replace(found, checked=checked, notes=notes)


def _same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(name in a and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in b)


def _with_bits(outputs: Mapping[str, Tensor], saved: Reference) -> dict[str, Tensor]:
    """``outputs`` with the reference's bits in the form in which the kernel returned its own."""
    own = dict(outputs)
    if saved.bits is not None and "bitmask" in own:
        form = own["bitmask"]
        bits = saved.bits if form.dtype == torch.bool else bitmask.pack(saved.bits)
        own["bitmask"] = bits.reshape(form.shape)
    return own


def _with_statistics(own: Mapping[str, Tensor], saved: Reference) -> dict[str, Tensor]:
    """``own`` with the reference's statistics, in the shapes in which the kernel returned its own."""
    fed = dict(own)
    for name, values in (("mean", saved.mean), ("rstd", saved.rstd)):
        if values is not None and name in fed:
            fed[name] = values.reshape(fed[name].shape).clone()
    return fed
