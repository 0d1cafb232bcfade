"""Observe one run of an implementation: what it returned, and which memory of others it wrote to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.guard_bands import NAN, Pattern
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import ROOT_FIRST, STATISTICS
from normcheck.checks.contract import Problem, usable_gradients, usable_outputs
from normcheck.checks.refusal import refused_clearly
from normcheck.errors import Broken, UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.oracle import bitmask
from normcheck.runner.arena import Surroundings
from normcheck.runner.call import refusal
from normcheck.runner.run import Forward, Pending, Run
from normcheck.runner.session import session_of

MOVED = "its shape, strides or storage"
"""What a call changed of an input, in the message on one whose elements may not even lie where they did."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The outputs of a run that can be judged, by name; ``gradients`` are end to end.

    ``refused``: why the implementation's library refused its backward, "" if it did not.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    refused: str = ""

    @property
    def named(self) -> dict[str, Tensor]:
        """Outputs and gradients together, in the order in which a kernel computes them."""
        both = {**self.outputs, **self.gradients}
        return {name: both[name] for name in ROOT_FIRST if name in both}


@dataclass(frozen=True, slots=True)
class Started:
    """A run whose forward was started on the inputs ``given``. ``before``: the same inputs before the call.

    ``surroundings``: the patterns around these and all else.
    """

    surroundings: Surroundings
    before: Inputs
    given: Inputs
    run: Run
    forward: Pending[Forward]


def start(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    surroundings: Surroundings,
    *,
    others_first: bool = False,
    mode: str = "",
) -> Started:
    """Start a run on copies of ``inputs``; ``others_first``, ``mode`` as for ``runner.run.Run.forward``."""
    around = surroundings.inputs
    before = inputs if around is NAN else inputs.each(lambda t: guard_bands.copy(t, around))
    given = before.each(lambda t: guard_bands.copy(t, NAN))
    run = session_of(implementation).run(surroundings)
    forward = run.forward(case, given, others_first=others_first, mode=mode)
    return Started(surroundings, before, given, run, forward)


def observe(
    implementation: Implementation,
    op: Op,
    case: Case,
    started: Started,
    bits: Tensor | None,
    between: Sequence[tuple[Case, Inputs]] = (),
) -> tuple[Seen, tuple[Problem, ...]]:
    """Call forward and backward -> what they returned, and the problems of writes to memory that is not theirs.

    ``bits``: bool (M, N), the reference's bitmask, which the backward of a clamped op gets. ``between``: cases, and
    their inputs, for which forward is called before backward. Raises what the calls raise, except a backward's refusal.
    """
    seen, problems = _call_both(implementation, op, case, started, bits, between)
    done = written(implementation, started.before, started.given)
    return seen, (*problems, *done, *strays(started.run, seen.named))


def observe_in_place(
    implementation: Implementation, op: Op, case: Case, given: Inputs, bits: Tensor | None
) -> tuple[Seen, tuple[Problem, ...]]:
    """Like ``observe``, on ``given`` itself instead of a copy, and without a look for writes to the inputs."""
    run = session_of(implementation).run(Surroundings())
    started = Started(Surroundings(), given, given, run, run.forward(case, given))
    return _call_both(implementation, op, case, started, bits)


def _call_both(
    implementation: Implementation,
    op: Op,
    case: Case,
    started: Started,
    bits: Tensor | None,
    between: Sequence[tuple[Case, Inputs]] = (),
) -> tuple[Seen, tuple[Problem, ...]]:
    given, run, forward = started.given, started.run, started.forward.result()
    outputs, _ = usable_outputs(op, case, given, forward.outputs)
    if op.main_output not in outputs:
        return Seen(outputs), ()
    for other, inputs in between:
        if replace(other, seed=case.seed) == case:
            run.forward(other, inputs).result()
        else:
            _call_between(run, other, inputs)
    if op.quantises:
        return Seen(outputs), ()
    if implementation.backward is None:
        gradients, why_refused = by_autograd(case, forward, given)
        return Seen(outputs, {} if why_refused else usable_gradients(given, gradients)[0], why_refused), ()
    saved = set_apart(case, with_bits(outputs, bits), started.surroundings.saved)
    before = {name: guard_bands.copy(t, NAN) for name, t in saved.items()}
    try:
        with refused_clearly(case):
            gradients = usable_gradients(given, run.backward(case, given, saved).result())[0]
    except UnsupportedCase as refused:
        return Seen(outputs, refused=refusal(refused)), ()
    problems = tuple(p for name, t in before.items() for p in _changes(f"saved {name}", name, t, saved[name]))
    if problems or not implementation.deterministic:
        return Seen(outputs, gradients), problems
    # The first run calls backward twice, with other statistics each time: bits that alternate show only here.
    again = usable_gradients(given, run.backward(case, given, saved).result())[0]
    same = {name for name, t in gradients.items() if name in again and guard_bands.same_bits(t, again[name])}
    for name in [name for name in gradients if name not in same]:
        message = f"{name} is not the same when backward is called twice in a row with the same arguments"
        return Seen(outputs, gradients), (Problem("not_repeatable", name, message),)
    return Seen(outputs, gradients), ()


def _call_between(run: Run, case: Case, inputs: Inputs) -> None:
    """Call forward for a case that ran before; what it raises, as it may have then, is no matter here."""
    try:
        run.forward(case, inputs).result()
    except UnsupportedCase:
        pass
    except Broken as broken:
        if broken.kind != "exception":  # then the process is gone, and with it the graph of the first call
            raise


def by_autograd(case: Case, forward: Forward, inputs: Inputs) -> tuple[dict[str, Tensor], str]:
    """Gradients through the y of ``forward``, by name; and why they were refused, "" if they were not."""
    try:
        with refused_clearly(case):
            return forward.by_autograd(inputs.cotangents), ""
    except UnsupportedCase as refused:
        return {}, refusal(refused)


def with_bits(outputs: Mapping[str, Tensor], bits: Tensor | None) -> dict[str, Tensor]:
    """``outputs`` with the reference's ``bits``, bool (M, N), in the form in which the kernel returned its own."""
    own = dict(outputs)
    if bits is not None and "bitmask" in own:
        form = own["bitmask"]
        own["bitmask"] = (bits if form.dtype == bits.dtype else bitmask.pack(bits)).reshape(form.shape)
    return own


def set_apart(case: Case, saved: Mapping[str, Tensor], around: Pattern = NAN) -> dict[str, Tensor]:
    """Copies of what a backward gets as ``saved``, each between bands of ``around`` that a whole row of x fits into.

    Of a huge case only the statistics: there is no memory for a second y.
    """
    return {
        name: t if case.huge and name not in STATISTICS else guard_bands.in_bands(t, around, case.N)
        for name, t in saved.items()
    }


def written(implementation: Implementation, before: Inputs, after: Inputs) -> tuple[Problem, ...]:
    """Problems of writes to the inputs and around them. ``after`` began as a copy of ``before``.

    A write into an input that the implementation declares to overwrite is no problem; a write around it is.
    """
    named, overwritten = list(zip(before.named(), after.named(), strict=True)), implementation.overwrites
    if guard_bands.all_untouched([(old, new) for (_, old), (_, new) in named]):
        return ()
    return tuple(p for (name, old), (_, new) in named for p in _changes(name, name, old, new, free=name in overwritten))


def _changes(what: str, output: str, before: Tensor, after: Tensor, *, free: bool = False) -> list[Problem]:
    if guard_bands.moved(before, after):
        message = f"{what} was modified: {MOVED}; inputs belong to the caller"
        return [Problem("input_modified", output, message)]
    if guard_bands.untouched(before, after):
        return []
    found = []
    changed = 0 if free else guard_bands.how_many_differ(before, after)
    if changed:
        message = f"{what} was modified: {changed} of {before.numel()} elements; inputs belong to the caller"
        found.append(Problem("input_modified", output, message))
    count, where = guard_bands.trespass(before, after)
    if count:
        message = f"{what}: {_elements(count)} outside it written to, the first {where}"
        found.append(Problem("out_of_bounds_write", output, message))
    return found


def strays(run: Run, named: Mapping[str, Tensor]) -> tuple[Problem, ...]:
    """Problems of writes around memory that the implementation allocated. ``named``: the tensors that it returned.

    If none of them is around a returned tensor, the first other buffer is reported, however many calls did the same.
    """
    found: dict[str, Problem] = {}
    for name, elements, count, where in run.strays(named):
        what = name or f"a buffer of {_elements(elements)} that it allocated"
        message = f"{what}: {_elements(count)} outside it written to, the first {where}"
        if not elements:
            message = f"{count} bytes written to {where}"
        found.setdefault(name, Problem("out_of_bounds_write", name, message))
    return tuple(problem for name, problem in found.items() if name or len(found) == 1)


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"
