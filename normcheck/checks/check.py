"""Check one case on one implementation: call it, judge every output, probe it, and return a ``Result``.

Each stage is judged end to end and alone: y also against the formula fed with the kernel's own saved statistics, the
gradients also from a backward fed with the reference's statistics. The probes come last, as deep as the caller wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import RESIDUAL_OUT, ROOT_FIRST, SCALE
from normcheck.checks import gpu_memory
from normcheck.checks.ask import FULLY, Ask
from normcheck.checks.contract import Problem, is_judgeable, usable_outputs
from normcheck.checks.conventions import Fitting, fitting, predicted
from normcheck.checks.gradients import Gradients, InFlight, autograd_checks, backward_checks, gradient_names
from normcheck.checks.observe import Seen, Started, by_autograd, strays, written
from normcheck.checks.other_modes import mode_of, wrong_in
from normcheck.checks.probes import probe
from normcheck.checks.refusal import refusal
from normcheck.checks.rerun import Probed, Subject
from normcheck.checks.undeclared import undeclared
from normcheck.circumstances import WRONG, InContext
from normcheck.contexts.kernel import Launched
from normcheck.errors import Broken, UnsupportedCase, loses_context
from normcheck.impls.implementation import Implementation
from normcheck.oracle.conventions import Convention, candidates, plainest, require_values, shown, with_convention
from normcheck.oracle.gated import why_no_groups
from normcheck.oracle.judge import Checked, Reference, judge_of
from normcheck.oracle.judging import Begun, anticipate, begin_forward, judge_forward, judge_gradients
from normcheck.oracle.special import is_special, judge_special, what_an_infinity_does
from normcheck.oracle.tolerances import Model, declared_model, table
from normcheck.runner import call
from normcheck.runner.arena import Surroundings
from normcheck.runner.session import session_of


@dataclass(frozen=True, slots=True)
class Result:
    """What one case showed. ``checked``: in the order in which a kernel computes; ``refused``: why it did not run.

    ``model`` judged the case; ``notes`` are for the reader of a passing case; ``probed`` is what the probes measured,
    None if none ran; ``seen`` is what the first run returned; ``staged`` are the gradients of a backward fed with the
    reference's statistics. ``joined``: if it failed, how many gradients of x autograd added in half precision.
    ``undeclared``: the checks as they are without the implementation's declarations, if these widen a bound.
    ``after``: the earlier cases of the kernel's own process, if the case failed in one. ``conventions``: those that the
    case fits, of the ones that it may, or else of all; None if the op, or what is declared, leaves none open. ``open``:
    the keys of the model that they choose. ``late``: whether it came in time only when the case was run again.
    ``contexts``: how the case did in each that it was tried in; ``launched``: what ran, if one of them looked.
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
    conventions: tuple[Convention, ...] | None = None
    open: tuple[str, ...] = ()
    late: bool = False
    contexts: Mapping[str, InContext] = field(default_factory=dict)
    launched: Launched | None = None

    @property
    def home(self) -> str:
        """The device on which the case was made and judged; "cpu" if nothing was returned."""
        return next((tensor.device.type for tensor in self.seen.named.values()), "cpu")

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """The checks that failed; a ratio of NaN fails."""
        return tuple(c for c in self.checked if not c.comparison.ratio <= 1)

    @property
    def has_graph(self) -> bool | None:
        """Whether gradients came by autograd through y, or could not, as y had no graph; None if that is not known.

        Without rows it says nothing: a kernel may well return early. Nor does a backward that was refused.
        """
        if not self.case.M or self.seen.refused:
            return None
        if "dx" in self.not_returned:
            return False
        return True if "dx" in self.seen.gradients else None

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.problems or self.wrong)


def check(
    implementation: Implementation,
    op: Op,
    case: Case,
    device: str,
    ask: Ask = FULLY,
) -> Result:
    """Run ``case`` on ``device`` ("cpu" or "cuda") and judge it.

    Faults of the implementation are in the result; an exception is a fault of normcheck.
    """
    model, depth, upcoming = ask.model, ask.depth, ask.upcoming
    base = model or undeclared_model(implementation, device)
    session = session_of(implementation)
    home = session.home(case, device)
    pristine = _small_inputs(case, op.name) if case.small and home == "cpu" else make(case, op, home)
    given = session.copies(pristine)
    run = session.run(Surroundings())
    try:
        model = model or model_of(implementation, case, device)
        ungrouped = why_no_groups(case, model)
        if ungrouped:
            return Result(case, model, refused=ungrouped)
        forward = run.forward(case, given)
        zeros = depth.reaches(Depth.MEMORY) and (home == "cpu" or case.M * case.N <= _WEIGHED_ELEMENTS)
        by = predicted(op, case, model, ask.conventions)
        judge = judge_of(op, case, pristine, by, ask.floors, zeros=zeros, watch=ask.watch, fused=ask.fused)
        if session.isolated and home == "cpu":  # while the kernel's process is at work
            anticipate(judge)
            if upcoming is not None and upcoming.small:
                _small_inputs(upcoming, op.name)
        running = InFlight(implementation, op, case, pristine, given, run, forward, model, base, judge, depth)
        result, saved, second = _checked(running, ask.conventions)
    except UnsupportedCase as unsupported:
        return Result(case, model or table().model, refused=call.refusal(unsupported))
    except Broken as broken:
        first = Problem(broken.kind, broken.output, broken.message, broken.frames)
        if context_lost(first) and not session.isolated:  # no tensor on the GPU can be read
            return Result(case, model or table().model, problems=(first,))
        refused = refusal(case, first) or gpu_memory.others_have_it(broken, case, device)
        problems = written(implementation, pristine, given) + strays(run, {})
        if refused and not problems:
            return Result(case, model or table().model, refused=refused)
        return Result(case, model or table().model, problems=(*problems, first))
    done = written(implementation, pristine, given) + strays(run, result.seen.named)
    if done:
        result = replace(result, problems=(*result.problems, *done))
    if saved is None or not depth.reaches(Depth.REASON if result.failed else Depth.MEMORY):
        return result
    subject = _subject(running, result, saved, second)
    probed = probe(subject, rows=depth == Depth.ROWS and not result.failed)
    notes = tuple(note for note in result.notes if not (probed.problems and note.startswith(FITS_NONE)))
    result = replace(
        result, problems=tuple(dict.fromkeys((*result.problems, *probed.problems))), probed=probed, notes=notes
    )  # what read the memory of others fits no convention, whichever it has
    mode = mode_of(implementation, op, case, device) if ask.other_modes and not result.failed else ""
    problem = wrong_in(mode, subject) if mode else None
    if problem is None:
        return result
    how = InContext(status=WRONG, cases=1, why=problem.message)
    return replace(result, problems=(problem,), contexts={problem.check: how})


def _only(name: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: named[name]} if name in named else {}


def _is_given(name: str, inputs: Inputs) -> bool:
    """Whether a kernel gets what others return: the scale of an op that quantises."""
    return name == SCALE and inputs.scale is not None


@lru_cache(maxsize=2)
def _small_inputs(case: Case, op: str) -> Inputs:
    """The inputs of a small case on the CPU. Those of the present one and of the next are kept: no call gets them."""
    return make(case, OPS[op], "cpu")


FITS_NONE = "fits no known convention"

_WEIGHED_ELEMENTS = 1 << 20
"""On a GPU, the elements of the largest case in which those that a 0 would pass are counted: it doubles the work."""


def context_lost(problem: Problem) -> bool:
    """Whether the GPU's context is lost, so that every later call in this process fails."""
    return problem.kind == "exception" and loses_context(problem.message)


def undeclared_model(implementation: Implementation, device: str) -> Model:
    """The table's model; for gradients by torch autograd on a CPU, or norms of groups, with what holds for those."""
    if OPS[implementation.op].grouped:
        return replace(table().model, **table().grouped)
    return _autograd_on_cpu() if implementation.backward is None and device == "cpu" else table().model


@cache
def _autograd_on_cpu() -> Model:
    return replace(table().model, **table().autograd_cpu)


def model_of(implementation: Implementation, case: Case, device: str) -> Model:
    """The undeclared model, with what the implementation declares about its arithmetic in this case."""
    declared = call.model(implementation, case)
    base = undeclared_model(implementation, device)
    model = declared_model(base, declared, implementation.name) if declared else base
    require_values(OPS[implementation.op], declared or {}, implementation.name)
    return model


def _checked(
    running: InFlight, may_be: tuple[Convention, ...] | None
) -> tuple[Result, Reference | None, Started | None]:
    """Judge every output -> the result; what the reference saves, None if no probe can run; the second run, or None."""
    implementation, op, case = running.implementation, running.op, running.case
    forward = running.forward.result()
    returned = forward.outputs
    outputs, problems = usable_outputs(op, case, running.pristine, returned, running.model)
    unknown = sorted(set(returned) - set(op.outputs))
    notes = tuple(f"forward returned {name!r}, which {op.name} does not have: ignored" for name in unknown)
    if implementation.overwrites:
        notes += (f"declares that it may overwrite {' and '.join(implementation.overwrites)}",)
    missing = tuple(name for name in op.outputs if name not in returned and not _is_given(name, running.pristine))
    if not is_judgeable(op, running.pristine, outputs):
        return Result(case, running.model, (), problems, missing, notes=notes), None, None
    kept = {name: t.clone() for name, t in Seen(outputs).named.items()} if is_special(case) else {}
    if kept and not (op.by_name or op.grouped):  # copies, since backward can write to them
        notes += tuple(filter(None, [what_an_infinity_does(op, case, running.pristine, kept)]))
    unusable = bool(problems) and implementation.backward is not None
    by_graph = by_autograd(case, forward, running.given) if implementation.backward is None else None
    conventions: tuple[Convention, ...] | None = None
    nearest: Convention = ()
    second, undecided = running.second_if_probed() if by_graph else None, candidates(op, running.model)
    for fit in fitting(running, outputs, may_be):
        running, conventions, nearest = fit.running, fit.conventions, fit.nearest
        begun, saved, gradients = _judged(fit, outputs, problems, by_graph)
        second = gradients.second or second
        special = _special(running, kept, gradients, saved)
        checked = begun() + gradients.checked + special
        if all(c.comparison.ratio <= 1 for c in gradients.checked + special):
            break
    if nearest and not conventions:
        notes += (f"{FITS_NONE} of {op.name}: judged by the nearest, model={shown(nearest)}",)
    seen = Seen(outputs, gradients.end_to_end, gradients.refused)
    result = Result(
        case,
        running.model,
        checked,
        problems + gradients.problems,
        missing + gradients.not_returned,
        notes=notes + gradients.notes,
        seen=seen,
        staged=gradients.staged,
        joined=forward.joined() if any(not c.comparison.ratio <= 1 for c in checked) else 0,
        undeclared=undeclared(running, outputs, gradients),
        conventions=conventions,
        open=tuple(dict.fromkeys(key for convention in undecided for key, _ in convention)),
    )
    return result, None if unusable else saved, second


def _special(running: InFlight, kept: dict[str, Tensor], gradients: Gradients, saved: Reference) -> tuple[Checked, ...]:
    """Which elements of what was returned are finite, if the case is special; ``kept``: what its forward returned."""
    op = running.op
    if not kept or (op.quantises and not op.adds_residual):  # of codes nobody agrees what becomes of a NaN
        return ()
    returned = {**kept, **gradients.end_to_end} if not op.quantises else _only(RESIDUAL_OUT, kept)
    summed = replace(running.pristine, x=running.judge.x) if running.judge.sums else running.pristine
    return judge_special(op, running.case, summed, returned, running.model, saved.doubt)


def _judged(
    fit: Fitting,
    outputs: Mapping[str, Tensor],
    problems: tuple[Problem, ...],
    by_graph: tuple[dict[str, Tensor], str] | None,
) -> tuple[Begun, Reference, Gradients]:
    """Begin to judge what forward returned -> that, what the reference saves, and the gradients judged.

    ``problems``: of what forward returned; ``by_graph``: gradients by autograd, and why they were refused; None if the
    implementation has a backward, which is called.
    """
    running = fit.running

    def begin() -> tuple[Begun, Reference]:
        if fit.forward is None:
            return begin_forward(running.judge, outputs)
        checked, saved = fit.forward
        return lambda: checked, saved

    if running.op.quantises:
        begun, saved = begin()
        return begun, saved, Gradients()
    if by_graph is not None:
        own_gradients, refused = by_graph
        begun, saved = begin()
        if refused:
            return begun, saved, Gradients(not_returned=gradient_names(running.given), refused=refused)
        return begun, saved, autograd_checks(running.judge, running.pristine, outputs, own_gradients, saved)
    if problems:  # the gradients of a backward with wrong or missing inputs say nothing about it
        begun, saved = begin()
        names = ", ".join(problem.output for problem in problems)
        note = f"gradients not checked: {names} cannot be used as forward returned it"
        return begun, saved, Gradients(notes=(note,))
    pending = None if running.op.clamped else running.backward(outputs)  # a clamped op waits for the reference's bits
    begun, saved = begin()
    running.settled(begun)
    return begun, saved, backward_checks(running, outputs, saved, pending)


def _subject(running: InFlight, result: Result, saved: Reference, second: Started | None) -> Subject:
    fits = dict.fromkeys(plainest(each, running.case) for each in result.conventions or ())
    models = [with_convention(running.model, each) for each in fits] or [result.model]

    def wrong_values(inputs: Inputs, seen: Seen) -> list[str]:
        was_right = seen is result.seen and inputs is running.pristine and not result.failed
        return [] if was_right else _wrong_values(running, models, inputs, seen)

    return Subject(
        running.implementation,
        running.op,
        running.case,
        running.pristine,
        running.given,
        result.seen,
        saved.bits,
        wrong_values,
        second or running.second(),
    )


def _wrong_values(running: InFlight, models: Sequence[Model], inputs: Inputs, seen: Seen) -> list[str]:
    """Names of the outputs outside their bounds, in a run for other ``inputs`` of the same case.

    By the one of ``models``, those of the conventions that the case fits, by which the fewest are.
    """
    return min((_wrong_by(model, running, inputs, seen) for model in models), key=len)


def _wrong_by(model: Model, running: InFlight, inputs: Inputs, seen: Seen) -> list[str]:
    floors = dict.fromkeys(ROOT_FIRST, 1.0)  # no details
    judge = judge_of(running.op, running.case, inputs, model, floors, fused=running.judge.fused)
    checked, saved = judge_forward(judge, seen.outputs)
    own_bits = running.implementation.backward is None
    checked += judge_gradients(judge, seen.gradients, saved, given=False, own_bits=own_bits)
    return [c.output for c in checked if not c.comparison.ratio <= 1]
