"""The backward half of a case: gradients through y, or of a backward of the implementation's own, judged twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.ops.op import GRADIENTS, Op
from normcheck.checks.contract import Problem, usable_gradients
from normcheck.checks.observe import Begun, begin, with_bits
from normcheck.checks.probes import Depth
from normcheck.checks.refusal import refused_clearly
from normcheck.checks.repeatability import other_surroundings
from normcheck.errors import UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.isolation.remote_run import RemoteRun
from normcheck.oracle.judge import GIVEN_REFERENCE, Checked, Judge, Reference, bits_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.tolerances import Model
from normcheck.runner import call
from normcheck.runner.arena import Arena

UNREAD = "backward does not read the bitmask"
"""The note on a backward that makes its own bits."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The backward half of a result; ``end_to_end``, ``staged``: the gradients themselves.

    ``refused``: why the implementation's library refused its backward, "" where it did not.
    """

    checked: tuple[Checked, ...] = ()
    problems: tuple[Problem, ...] = ()
    not_returned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    end_to_end: Mapping[str, Tensor] = field(default_factory=dict)
    staged: Mapping[str, Tensor] = field(default_factory=dict)
    second: Begun | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A case on an implementation: ``pristine`` inputs, the copies of them that were ``given``, and the arena.

    ``model`` is what it is judged by, ``base`` what it would be if the implementation declared nothing.

    Another process works while this one judges: what it will be asked next is begun before, the second run, too.
    """

    implementation: Implementation
    op: Op
    case: Case
    pristine: Inputs
    given: Inputs
    arena: Arena | RemoteRun
    model: Model
    base: Model
    judge: Judge
    depth: Depth

    def second(self) -> Begun:
        """The second run, begun."""
        return begin(self.implementation, self.case, self.pristine, other_surroundings(self.case))

    def second_ahead(self) -> Begun | None:
        """The same, where it is known that it will be wanted."""
        return self.second() if self.depth >= Depth.MEMORY else None


def autograd_checks(
    judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor], saved: Reference
) -> Gradients:
    """Gradients through y are end to end, and pass where the kernel's own bits are set, which cannot be replaced.

    A bit in doubt is taken from the bitmask that the kernel returned, if autograd agrees with it; otherwise, and at an
    exact tie with a limit, whatever hangs on the bit is in doubt.
    """
    if not gradients:
        note = "no backward, and y does not carry autograd's graph: gradients not checked"
        return Gradients(not_returned=gradient_names(inputs), notes=(note,))
    usable, problems = usable_gradients(inputs, gradients)
    if saved.doubt is None or saved.bits is None or saved.ties is None or "bitmask" not in outputs:
        checked = judge_gradients(judge, usable, saved, given=False, own_bits=True)
        return Gradients(checked, problems, end_to_end=usable)
    returned = bits_of(outputs["bitmask"], judge.case)
    settled = replace(saved, bits=torch.where(saved.doubt, returned, saved.bits), doubt=saved.ties)
    checked = judge_gradients(judge, usable, settled, given=False, own_bits=True)
    if any(not c.comparison.ratio <= 1 for c in checked):
        checked = judge_gradients(judge, usable, saved, given=False, own_bits=True)
    return Gradients(checked, problems, end_to_end=usable)


def gradient_names(inputs: Inputs) -> tuple[str, ...]:
    """The gradients that a backward owes: db only where there is a bias."""
    return GRADIENTS if inputs.bias is not None else GRADIENTS[:2]


def backward_checks(this: Call, outputs: Mapping[str, Tensor], saved: Reference) -> Gradients:
    """The implementation's own backward: fed with the reference's statistics (where it saves any), then with its own.

    The bitmask is the reference's both times, so that one bit in doubt does not spoil a gradient.
    """
    judge, given = this.judge, this.given
    own = with_bits(outputs, saved.bits)
    staged = all(name in outputs for name in judge.op.statistics)
    own_bits = "bitmask" in judge.op.outputs and "bitmask" not in outputs
    try:
        end_to_end = _backward(this, own)
        usable, problems = usable_gradients(given, end_to_end)
        fed = with_statistics(own, saved) if staged else {}
        if staged:
            call.begin_backward(judge.case, given, fed, this.arena)
        checked = judge_gradients(judge, usable, saved, given=False, own_bits=own_bits)
        stage = usable_gradients(given, _backward(this, fed))[0] if staged else {}
        second = this.second_ahead()
        if staged:
            checked = judge_gradients(judge, stage, saved, given=True, own_bits=own_bits) + checked
    except UnsupportedCase as refused:
        return Gradients(not_returned=gradient_names(given), refused=call.refusal(refused))
    found = Gradients(checked, problems, end_to_end=usable, staged=stage, second=second)
    if all(c.comparison.ratio <= 1 for c in checked):
        return found
    return _reconsidered(this, own, saved, stage, found)


def _backward(this: Call, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with refused_clearly(this.case):
        return call.backward(this.implementation, this.case, this.given, saved, this.arena)


def _reconsidered(
    this: Call, own: Mapping[str, Tensor], saved: Reference, stage: Mapping[str, Tensor], found: Gradients
) -> Gradients:
    """A backward that does not read what it was given cannot be judged by it: then only end to end counts.

    Whether it reads is found by giving it something else: the same bits out mean that it does not.
    """
    judge = this.judge
    notes: tuple[str, ...] = ()
    checked = found.checked
    if any(c.check == GIVEN_REFERENCE for c in checked):
        shifted = {n: t * 1.5 + 0.25 for n, t in own.items() if n in judge.op.statistics}
        if _same_bits(_backward(this, {**own, **shifted}), found.end_to_end):
            checked = tuple(c for c in checked if c.check != GIVEN_REFERENCE)
            notes += ("backward does not read the saved statistics: its gradients are judged end to end only",)
    doubtful = saved.doubt is not None and bool(saved.doubt.any())
    if doubtful and "bitmask" in own and any(not c.comparison.ratio <= 1 for c in checked):
        flipped = {**own, "bitmask": ~own["bitmask"]}
        if _same_bits(_backward(this, flipped), found.end_to_end):
            staged = any(c.check == GIVEN_REFERENCE for c in checked)
            checked = judge_gradients(judge, stage, saved, given=True, own_bits=True) if staged else ()
            checked += judge_gradients(judge, found.end_to_end, saved, given=False, own_bits=True)
            notes += (UNREAD,)
    return replace(found, checked=checked, notes=notes)


def _same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(name in a and guard_bands.same_bits(a[name].detach(), b[name].detach()) for name in b)


def with_statistics(own: Mapping[str, Tensor], saved: Reference) -> dict[str, Tensor]:
    """``own`` with the reference's statistics, in the shapes in which the kernel returned its own."""
    fed = dict(own)
    for name, values in (("mean", saved.mean), ("rstd", saved.rstd)):
        if values is not None and name in fed:
            fed[name] = values.reshape(fed[name].shape).clone()
    return fed
