"""One case on one implementation -> Result: call it, have every output judged, say what is wrong.

Stages are judged alone and end to end: y also against the formula fed with the kernel's own saved statistics, the
gradients also from a backward fed with the reference's statistics. Then come the probes, as deep as they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from normcheck import call, memory
from normcheck.case import Case
from normcheck.errors import Broken, UnsupportedCase
from normcheck.implementation import Implementation
from normcheck.inputs import Inputs, make
from normcheck.judge import (
    GIVEN_REFERENCE,
    Checked,
    Expectation,
    Judge,
    Reference,
    bits_of,
    judge_forward,
    judge_gradients,
    judge_of,
)
from normcheck.memory import Arena, Surroundings
from normcheck.observe import Begun, Seen, begin, strays, with_bits, written
from normcheck.ops.op import GRADIENTS, Op
from normcheck.outputs import Problem, usable_gradients, usable_outputs
from normcheck.probes import Depth, Probed, Subject, other_surroundings, probe
from normcheck.remote import RemoteRun
from normcheck.special import is_special, judge_special
from normcheck.table import Model, declared_model, table


@dataclass(frozen=True, slots=True)
class Result:
    """What a case showed. ``checked`` is in the order of the data's way; ``refused``: why the case did not run.

    ``model`` is what it was judged by; ``notes`` are for whoever reads a pass; ``probed`` is what the probes measured,
    None where they were not asked; ``seen`` is what the first run returned, ``staged`` the
    gradients of a backward that was fed with the reference's statistics.
    """

    case: Case
    model: Model
    checked: tuple[Checked, ...] = ()
    problems: tuple[Problem, ...] = ()
    not_returned: tuple[str, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()
    probed: Probed | None = None
    seen: Seen = field(default_factory=Seen)
    staged: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """The checks that did not hold; NaN does not."""
        return tuple(c for c in self.checked if not c.comparison.ratio <= 1)

    @property
    def failed(self) -> bool:
        """Whether anything at all is wrong."""
        return bool(self.problems or self.wrong)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The backward half of a result; ``end_to_end``, ``staged``: the gradients themselves."""

    checked: tuple[Checked, ...] = ()
    problems: tuple[Problem, ...] = ()
    not_returned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    end_to_end: Mapping[str, Tensor] = field(default_factory=dict)
    staged: Mapping[str, Tensor] = field(default_factory=dict)
    second: Begun | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A case on an implementation: ``pristine`` inputs, the copies of them that were ``given``, and the arena.

    Another process works while this one judges: what it will be asked next is begun before, the second run, too.
    """

    implementation: Implementation
    op: Op
    case: Case
    pristine: Inputs
    given: Inputs
    arena: Arena | RemoteRun
    model: Model
    judge: Judge
    depth: Depth

    def second(self) -> Begun:
        """The second run, begun."""
        return begin(self.implementation, self.case, self.pristine, other_surroundings(self.case))

    def second_ahead(self) -> Begun | None:
        """The same, where it is known that it will be wanted."""
        return self.second() if self.depth >= Depth.MEMORY else None


def check(
    implementation: Implementation,
    op: Op,
    case: Case,
    device: str,
    *,
    floors: Mapping[str, float] | None = None,
    model: Model | None = None,
    depth: Depth = Depth.ROWS,
    watch: Callable[[Expectation], None] | None = None,
) -> Result:
    """Run ``case`` on ``device`` ("cpu" or "cuda") and judge it.

    ``floors``: output -> ratio below which details are not wanted; ``model`` replaces the one that the implementation
    declares; ``depth``: what the probes are asked; ``watch``: told of
    everything that is compared. What an implementation does wrong is in the result; an exception is a fault of
    normcheck.
    """
    pristine = make(case, op, device)
    given = pristine.each(lambda t: memory.copy(t, memory.NAN))
    arena = call.surrounded(implementation, Surroundings())
    try:
        model = model or model_of(implementation, case, device)
        call.begin(implementation, case, given, arena)
        judge = judge_of(op, case, pristine, model, floors or {}, zeros=depth >= Depth.MEMORY, watch=watch)
        this = _Call(implementation, op, case, pristine, given, arena, model, judge, depth)
        result, saved, second = _checked(this)
    except UnsupportedCase as refused:
        return Result(case, model or table().model, refused=call.refusal(refused))
    except Broken as broken:
        first = Problem(broken.kind, broken.output, broken.message, broken.frames)
        if context_lost(first) and call.link_of(implementation) is None:  # nothing on the GPU can be looked at
            return Result(case, model or table().model, problems=(first,))
        refusal = _refusal(case, broken) or _no_memory(broken, device)
        problems = written(pristine, given) + strays(arena, {})
        if refusal and not problems:
            return Result(case, model or table().model, refused=refusal)
        return Result(case, model or table().model, problems=(*problems, first))
    done = written(pristine, given) + strays(arena, result.seen.named)
    result = replace(result, problems=(*result.problems, *done))
    if saved is None or depth < (Depth.REASON if result.failed else Depth.MEMORY):
        return result
    probed = _probed(this, result, saved, second, rows=depth >= Depth.ROWS and not result.failed)
    return replace(result, problems=tuple(dict.fromkeys((*result.problems, *probed.problems))), probed=probed)


def context_lost(problem: Problem) -> bool:
    """Whether a GPU's context is lost: every later call of this process fails, whatever it does."""
    return problem.kind == "exception" and any(words in problem.message for words in _STICKY)


_STICKY = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")


def _refusal(case: Case, broken: Broken) -> str:
    """Why an exception counts as a clear refusal of an unusual case; "" where it does not, as a GPU that went wrong."""
    gone_wrong = "CUDA error" in broken.message or "Triton Error" in broken.message
    if not case.unusual or broken.kind != "exception" or gone_wrong:
        return ""
    what = "M=0" if case.M == 0 else f"layout={case.layout}"
    return f"{what}: {' '.join(broken.message.split())[:200]}"


def _no_memory(broken: Broken, device: str) -> str:
    """Why running out of a GPU's memory says nothing about the kernel: others use it; "" where that is not so."""
    if device != "cuda" or "out of memory" not in broken.message:
        return ""
    free, _ = torch.cuda.mem_get_info()
    return f"{NO_MEMORY}: {free / 2**30:.1f} GiB are free" if free < _PLENTY else ""


NO_MEMORY = "the GPU's memory is in use"
_PLENTY = 8 << 30  # bytes: whoever asks for more than is free then, asks for too much


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


def _checked(this: _Call) -> tuple[Result, Reference | None, Begun | None]:
    """Everything judged; what the reference would save, None where nothing is called once more; the second run."""
    implementation, op, case = this.implementation, this.op, this.case
    inputs = call.differentiable(this.given) if implementation.backward is None else this.given
    returned = call.forward(implementation, case, inputs, this.arena)
    outputs, problems = usable_outputs(op, case, this.pristine, returned)
    unknown = sorted(set(returned) - set(op.outputs))
    notes = tuple(f"forward returned {name!r}, which {op.name} does not have: ignored" for name in unknown)
    missing = tuple(name for name in op.outputs if name not in returned)
    if "y" not in outputs:
        return Result(case, this.model, (), problems, missing, notes=notes), None, None
    special: tuple[Checked, ...] = ()
    if is_special(case):  # before backward has had a chance to write to them
        special = judge_special(op, case, this.pristine, Seen(outputs).named, this.model)
    unusable = bool(problems) and implementation.backward is not None
    second = None
    if implementation.backward is None:
        own_gradients = call.autograd(returned, inputs, this.arena)
        second = this.second_ahead()
        checked, saved = judge_forward(this.judge, outputs)
        gradients = autograd_checks(this.judge, this.pristine, outputs, own_gradients, saved)
    elif unusable:  # a backward that is fed with what is wrong, or not fed, says nothing about itself
        checked, saved = judge_forward(this.judge, outputs)
        names = ", ".join(problem.output for problem in problems)
        gradients = Gradients(notes=(f"gradients not checked: {names} cannot be used as forward returned it",))
    else:
        if not op.clamped:  # there the reference's bits are wanted first
            call.begin_backward(case, this.given, outputs, this.arena)
        checked, saved = judge_forward(this.judge, outputs)
        gradients = _backward_checks(this, outputs, saved)
        second = gradients.second
    checked += gradients.checked
    seen = Seen(outputs, gradients.end_to_end)
    if is_special(case):
        checked += special + judge_special(op, case, this.pristine, gradients.end_to_end, this.model)
    result = Result(
        case,
        this.model,
        checked,
        problems + gradients.problems,
        missing + gradients.not_returned,
        notes=notes + gradients.notes,
        seen=seen,
        staged=gradients.staged,
    )
    return result, None if unusable else saved, second


def _probed(this: _Call, result: Result, saved: Reference, second: Begun | None, *, rows: bool) -> Probed:
    return probe(
        Subject(
            this.implementation,
            this.op,
            this.case,
            this.pristine,
            this.given,
            result.seen,
            saved.bits,
            lambda inputs, seen: _wrong_values(this, inputs, seen),
            second or this.second(),
        ),
        rows=rows,
    )


def _wrong_values(this: _Call, inputs: Inputs, seen: Seen) -> list[str]:
    """The outputs of another run, for other inputs of the same case, that are outside their bounds."""
    judge = judge_of(this.op, this.case, inputs, this.model, {})
    checked, saved = judge_forward(judge, seen.outputs)
    own_bits = this.implementation.backward is None
    checked += judge_gradients(judge, seen.gradients, saved, given=False, own_bits=own_bits)
    return [c.output for c in checked if not c.comparison.ratio <= 1]


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


def _backward_checks(this: _Call, outputs: Mapping[str, Tensor], saved: Reference) -> Gradients:
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
        note = f"gradients not checked: {call.refusal(refused)}"
        return Gradients(not_returned=gradient_names(given), notes=(note,))
    found = Gradients(checked, problems, end_to_end=usable, staged=stage, second=second)
    if all(c.comparison.ratio <= 1 for c in checked):
        return found
    return _reconsidered(this, own, saved, stage, found)


def _backward(this: _Call, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return call.backward(this.implementation, this.case, this.given, saved, this.arena)


def _reconsidered(
    this: _Call, own: Mapping[str, Tensor], saved: Reference, stage: Mapping[str, Tensor], found: Gradients
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
            notes += ("backward does not read the bitmask",)
    return replace(found, checked=checked, notes=notes)


def _same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(name in a and memory.same_bits(a[name].detach(), b[name].detach()) for name in b)


def with_statistics(own: Mapping[str, Tensor], saved: Reference) -> dict[str, Tensor]:
    """``own`` with the reference's statistics, in the shapes in which the kernel returned its own."""
    fed = dict(own)
    for name, values in (("mean", saved.mean), ("rstd", saved.rstd)):
        if values is not None and name in fed:
            fed[name] = values.reshape(fed[name].shape).clone()
    return fed
