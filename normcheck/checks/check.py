"""One case on one implementation -> Result: call it, have every output judged, say what is wrong.

Stages are judged alone and end to end: y also against the formula fed with the kernel's own saved statistics, the
gradients also from a backward fed with the reference's statistics. Then come the probes, as deep as they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops.op import Op
from normcheck.checks.contract import Problem, usable_outputs
from normcheck.checks.gradients import Call, Gradients, autograd_checks, backward_checks, gradient_names
from normcheck.checks.observe import Begun, Seen, by_autograd, strays, written
from normcheck.checks.probes import Depth, probe
from normcheck.checks.refusal import refusal
from normcheck.checks.rerun import Probed, Subject
from normcheck.checks.undeclared import undeclared
from normcheck.errors import Broken, UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import Checked, Expectation, Reference, judge_forward, judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.special import is_special, judge_special, what_an_infinity_does
from normcheck.oracle.tolerances import Model, declared_model, table
from normcheck.runner import call
from normcheck.runner.arena import Surroundings


@dataclass(frozen=True, slots=True)
class Result:
    """What a case showed. ``checked`` is in the order of the data's way; ``refused``: why the case did not run.

    ``model`` is what it was judged by; ``notes`` are for whoever reads a pass; ``probed`` is what the probes measured,
    None where they were not asked; ``seen`` is what the first run returned, ``staged`` the gradients
    of a backward that was fed with the reference's statistics. ``joined``: how many gradients of x autograd added up in
    half precision. ``undeclared``: the checks without what the implementation declares, if that widens a bound.
    ``after``: if it failed in a process of its own, the cases which that process ran before.
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
    joined: int = 0
    undeclared: tuple[Checked, ...] = ()
    after: tuple[Case, ...] = ()

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """The checks that did not hold; NaN does not."""
        return tuple(c for c in self.checked if not c.comparison.ratio <= 1)

    @property
    def failed(self) -> bool:
        """Whether anything at all is wrong."""
        return bool(self.problems or self.wrong)


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
    base = model or undeclared_model(implementation, device)
    given = pristine.each(lambda t: guard_bands.copy(t, guard_bands.NAN))
    arena = call.surrounded(implementation, Surroundings())
    try:
        model = model or model_of(implementation, case, device)
        call.begin(implementation, case, given, arena)
        judge = judge_of(op, case, pristine, model, floors or {}, zeros=depth >= Depth.MEMORY, watch=watch)
        this = Call(implementation, op, case, pristine, given, arena, model, base, judge, depth)
        result, saved, second = _checked(this)
    except UnsupportedCase as unsupported:
        return Result(case, model or table().model, refused=call.refusal(unsupported))
    except Broken as broken:
        first = Problem(broken.kind, broken.output, broken.message, broken.frames)
        if context_lost(first) and call.link_of(implementation) is None:  # nothing on the GPU can be looked at
            return Result(case, model or table().model, problems=(first,))
        refused = refusal(case, first) or _no_memory(broken, device)
        problems = written(implementation, pristine, given) + strays(arena, {})
        if refused and not problems:
            return Result(case, model or table().model, refused=refused)
        return Result(case, model or table().model, problems=(*problems, first))
    done = written(implementation, pristine, given) + strays(arena, result.seen.named)
    result = replace(result, problems=(*result.problems, *done))
    if saved is None or depth < (Depth.REASON if result.failed else Depth.MEMORY):
        return result
    probed = _probed(this, result, saved, second, rows=depth >= Depth.ROWS and not result.failed)
    return replace(result, problems=tuple(dict.fromkeys((*result.problems, *probed.problems))), probed=probed)


def context_lost(problem: Problem) -> bool:
    """Whether a GPU's context is lost: every later call of this process fails, whatever it does."""
    return problem.kind == "exception" and any(words in problem.message for words in _STICKY)


_STICKY = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")


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


def _checked(this: Call) -> tuple[Result, Reference | None, Begun | None]:
    """Everything judged; what the reference would save, None where nothing is called once more; the second run."""
    implementation, op, case = this.implementation, this.op, this.case
    inputs = call.differentiable(this.given) if implementation.backward is None else this.given
    returned = call.forward(implementation, case, inputs, this.arena)
    joined = call.joined(returned, inputs) if implementation.backward is None and case.dtype != "fp32" else 0
    outputs, problems = usable_outputs(op, case, this.pristine, returned)
    unknown = sorted(set(returned) - set(op.outputs))
    notes = tuple(f"forward returned {name!r}, which {op.name} does not have: ignored" for name in unknown)
    if implementation.overwrites:
        notes += (f"declares that it may overwrite {' and '.join(implementation.overwrites)}",)
    missing = tuple(name for name in op.outputs if name not in returned)
    if "y" not in outputs:
        return Result(case, this.model, (), problems, missing, notes=notes), None, None
    special: tuple[Checked, ...] = ()
    if is_special(case):  # before backward has had a chance to write to them
        special = judge_special(op, case, this.pristine, Seen(outputs).named, this.model)
        notes += tuple(filter(None, [what_an_infinity_does(op, case, this.pristine, outputs)]))
    unusable = bool(problems) and implementation.backward is not None
    second = None
    if implementation.backward is None:
        own_gradients, refused = by_autograd(this.case, returned, inputs, this.arena)
        second = this.second_ahead()
        checked, saved = judge_forward(this.judge, outputs)
        gradients = Gradients(not_returned=gradient_names(inputs), refused=refused)
        if not refused:
            gradients = autograd_checks(this.judge, this.pristine, outputs, own_gradients, saved)
    elif unusable:  # a backward that is fed with what is wrong, or not fed, says nothing about itself
        checked, saved = judge_forward(this.judge, outputs)
        names = ", ".join(problem.output for problem in problems)
        gradients = Gradients(notes=(f"gradients not checked: {names} cannot be used as forward returned it",))
    else:
        if not op.clamped:  # there the reference's bits are wanted first
            call.begin_backward(case, this.given, outputs, this.arena)
        checked, saved = judge_forward(this.judge, outputs)
        gradients = backward_checks(this, outputs, saved)
        second = gradients.second
    checked += gradients.checked
    seen = Seen(outputs, gradients.end_to_end, gradients.refused)
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
        joined=joined,
        undeclared=undeclared(this, outputs, gradients),
    )
    return result, None if unusable else saved, second


def _probed(this: Call, result: Result, saved: Reference, second: Begun | None, *, rows: bool) -> Probed:
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


def _wrong_values(this: Call, inputs: Inputs, seen: Seen) -> list[str]:
    """The outputs of another run, for other inputs of the same case, that are outside their bounds."""
    judge = judge_of(this.op, this.case, inputs, this.model, {})
    checked, saved = judge_forward(judge, seen.outputs)
    own_bits = this.implementation.backward is None
    checked += judge_gradients(judge, seen.gradients, saved, given=False, own_bits=own_bits)
    return [c.output for c in checked if not c.comparison.ratio <= 1]
