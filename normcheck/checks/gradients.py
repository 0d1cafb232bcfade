"""The backward half of a case: gradients by autograd through y, or by the implementation's own backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.checks.contract import Problem, usable_gradients
from normcheck.checks.observe import Started, set_apart, start, with_bits
from normcheck.checks.refusal import refused_clearly, told_as_missing
from normcheck.checks.repeatability import other_surroundings
from normcheck.errors import UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import GIVEN_REFERENCE, Checked, Judge, Reference
from normcheck.oracle.judge_forward import bits_of
from normcheck.oracle.judging import Begun, begin_gradients, judge_gradients
from normcheck.oracle.tolerances import Model
from normcheck.runner.call import refusal
from normcheck.runner.run import Forward, Pending, Run
from normcheck.runner.session import session_of

UNREAD = "backward does not read the bitmask"
"""The note on a backward that computes the bits itself."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The backward half of a result. ``end_to_end``: the gradients; ``staged``: those from the reference's statistics.

    ``second``: the second run, if it was started; ``refused``: why the library refused its backward, "" if it did not.
    """

    checked: tuple[Checked, ...] = ()
    problems: tuple[Problem, ...] = ()
    not_returned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    end_to_end: Mapping[str, Tensor] = field(default_factory=dict)
    staged: Mapping[str, Tensor] = field(default_factory=dict)
    second: Started | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A case that is being run: its ``pristine`` inputs, the copies ``given`` to the calls, the run that makes them.

    ``forward`` has been started. ``model`` judges the case; ``base`` would, if the implementation declared nothing.

    A kernel in another process works while this one judges, so each call starts before the last outputs are judged.
    """

    implementation: Implementation
    op: Op
    case: Case
    pristine: Inputs
    given: Inputs
    run: Run
    forward: Pending[Forward]
    model: Model
    base: Model
    judge: Judge
    depth: Depth

    def backward(self, saved: Mapping[str, Tensor]) -> Pending[dict[str, Tensor]]:
        """Start the implementation's own backward on copies of ``saved``, whose surroundings are those of later runs.

        ``result()`` raises UnsupportedCase if its library refuses.
        """
        pending = self.run.backward(self.case, self.given, set_apart(self.case, saved))

        def collect() -> dict[str, Tensor]:
            with refused_clearly(self.case), told_as_missing(self.op, saved):
                return pending.result()

        return Pending(collect)

    def second(self) -> Started:
        """Start the second run, in other surroundings."""
        return start(self.implementation, self.case, self.pristine, other_surroundings(self.case))

    def settled(self, begun: Begun) -> Begun:
        """``begun``, waited for if the kernel's later calls are in this process: they may write to what it returned."""
        if not session_of(self.implementation).isolated:
            begun()
        return begun

    def second_if_probed(self) -> Started | None:
        """Start the second run, if the probes of a passing case need it."""
        return self.second() if self.depth.reaches(Depth.MEMORY) else None


def autograd_checks(
    judge: Judge, inputs: Inputs, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor], saved: Reference
) -> Gradients:
    """Judge gradients by autograd through y: end to end only, with the kernel's own bits, which cannot be replaced.

    A bit in doubt is taken from the bitmask that the kernel returned, if the gradients agree with it. Otherwise, and at
    an exact tie with a limit, every gradient that depends on the bit is in doubt.
    """
    if not gradients and not judge.case.M:
        return Gradients()  # without rows, what a kernel returns early may well have no graph
    if not gradients:
        note = "no backward, and y does not carry autograd's graph: gradients not checked"
        return Gradients(not_returned=gradient_names(inputs), notes=(note,))
    usable, problems = usable_gradients(inputs, gradients, by_graph=True)
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
    """Names of the gradients that a backward must return: those of the inputs that there are."""
    return tuple(inputs.leaves)


def backward_checks(
    running: InFlight, outputs: Mapping[str, Tensor], saved: Reference, pending: Pending[dict[str, Tensor]] | None
) -> Gradients:
    """Judge the implementation's own backward, fed with the reference's statistics (if it saves any) and with its own.

    The bitmask is the reference's both times, so that one bit in doubt does not spoil a gradient. ``pending``: the
    backward fed with ``outputs``, if it was started already, because there are no bits to replace.
    """
    judge, given = running.judge, running.given
    own = with_bits(outputs, saved.bits)
    staged = all(name in outputs for name in judge.op.statistics)
    own_bits = "bitmask" in judge.op.outputs and "bitmask" not in outputs
    try:
        usable, problems = usable_gradients(given, (pending or running.backward(own)).result())
        fed = running.backward(with_statistics(own, saved)) if staged else None
        whole = running.settled(begin_gradients(judge, usable, saved, given=False, own_bits=own_bits))
        stage = usable_gradients(given, fed.result())[0] if fed else {}
        second = running.second_if_probed()
        alone = begin_gradients(judge, stage, saved, given=True, own_bits=own_bits) if staged else tuple
        checked = alone() + whole()
    except UnsupportedCase as refused:
        return Gradients(not_returned=gradient_names(given), refused=refusal(refused))
    left = tuple({*given.leaves} - {*usable} - {problem.output for problem in problems})
    found = Gradients(checked, problems, left, end_to_end=usable, staged=stage, second=second)
    if all(c.comparison.ratio <= 1 for c in checked):
        return found
    return _reconsidered(running, own, saved, stage, found)


def _reconsidered(
    running: InFlight, own: Mapping[str, Tensor], saved: Reference, stage: Mapping[str, Tensor], found: Gradients
) -> Gradients:
    """Judge failed checks again: a backward that does not read an input cannot be judged by it, only end to end.

    To find out, it gets other values for that input: if it returns the same bits, it does not read the input.
    """
    judge = running.judge
    notes: tuple[str, ...] = ()
    checked = found.checked
    if any(c.check == GIVEN_REFERENCE for c in checked):
        shifted = {n: t * 1.5 + 0.25 for n, t in own.items() if n in judge.op.statistics}
        if _same_bits(running.backward({**own, **shifted}).result(), found.end_to_end):
            checked = tuple(c for c in checked if c.check != GIVEN_REFERENCE)
            notes += ("backward does not read the saved statistics: its gradients are judged end to end only",)
    doubtful = saved.doubt is not None and bool(saved.doubt.any())
    if doubtful and "bitmask" in own and any(not c.comparison.ratio <= 1 for c in checked):
        flipped = {**own, "bitmask": ~own["bitmask"]}
        if _same_bits(running.backward(flipped).result(), found.end_to_end):
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
