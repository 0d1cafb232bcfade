"""One run of an implementation in given surroundings: what it returned, and what it did to memory on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.guard_bands import NAN, Pattern
from normcheck.cases.inputs import Inputs
from normcheck.cases.ops.op import GRADIENTS, Op
from normcheck.checks.contract import Problem, usable_gradients, usable_outputs
from normcheck.checks.refusal import refused_clearly
from normcheck.errors import UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.isolation.remote_run import RemoteRun
from normcheck.oracle import bitmask
from normcheck.runner import call
from normcheck.runner.arena import Arena, Surroundings


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run returned, as far as it can be judged, by name; ``gradients`` are end to end.

    ``refused``: why the implementation's library refused its backward, "" where it did not.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    refused: str = ""

    @property
    def named(self) -> dict[str, Tensor]:
        """Everything, in the order of the data's way."""
        both = {**self.outputs, **self.gradients}
        return {name: both[name] for name in ("mean", "rstd", "y", "bitmask", *GRADIENTS) if name in both}


@dataclass(frozen=True, slots=True)
class Begun:
    """A run whose forward another process has begun with: its inputs as they were, and as they are ``given``."""

    surroundings: Surroundings
    before: Inputs
    given: Inputs
    arena: Arena | RemoteRun


def begin(
    implementation: Implementation, case: Case, inputs: Inputs, surroundings: Surroundings, *, deferred: bool = False
) -> Begun:
    """Begin a run on copies of ``inputs``; ``deferred`` as for ``call.forward``."""
    before = inputs if surroundings.inputs is NAN else inputs.each(lambda t: guard_bands.copy(t, surroundings.inputs))
    given = before.each(lambda t: guard_bands.copy(t, NAN))
    arena = call.surrounded(implementation, surroundings)
    call.begin(implementation, case, given, arena, deferred=deferred)
    return Begun(surroundings, before, given, arena)


def observe(
    implementation: Implementation,
    op: Op,
    case: Case,
    begun: Begun,
    bits: Tensor | None,
    between: Inputs | None = None,
) -> tuple[Seen, tuple[Problem, ...]]:
    """Call forward and backward; also what was written to that belongs to someone else.

    ``bits``: bool (M, N), the reference's bitmask, which the backward of a clamped op is fed with; ``between``: other
    inputs, which forward is called with before backward is. Raises what the calls raise, but for a backward's refusal.
    """
    before, given, arena = begun.before, begun.given, begun.arena
    seen, problems = _called(implementation, op, case, given, arena, bits, begun.surroundings.inputs, between)
    return seen, (*problems, *written(implementation, before, given), *strays(arena, seen.named))


def observe_in_place(
    implementation: Implementation, op: Op, case: Case, given: Inputs, bits: Tensor | None
) -> tuple[Seen, tuple[Problem, ...]]:
    """Call forward and backward on ``given`` itself."""
    arena = call.surrounded(implementation, Surroundings())
    return _called(implementation, op, case, given, arena, bits, NAN)


def _called(
    implementation: Implementation,
    op: Op,
    case: Case,
    given: Inputs,
    arena: Arena | RemoteRun,
    bits: Tensor | None,
    around: Pattern,
    between: Inputs | None = None,
) -> tuple[Seen, tuple[Problem, ...]]:
    if implementation.backward is None:
        leaves = call.differentiable(given)
        returned = call.forward(implementation, case, leaves, arena, deferred=between is not None)
        outputs, _ = usable_outputs(op, case, given, returned)
        if "y" not in outputs:
            return Seen(outputs), ()
        if between is not None:
            call.forward(implementation, case, call.differentiable(between), arena)
        gradients, refused = by_autograd(case, returned, leaves, arena)
        return Seen(outputs, {} if refused else usable_gradients(given, gradients)[0], refused), ()
    outputs, _ = usable_outputs(op, case, given, call.forward(implementation, case, given, arena))
    if "y" not in outputs:
        return Seen(outputs), ()
    if between is not None:
        call.forward(implementation, case, between, arena)
    saved = {name: guard_bands.in_bands(t, around) for name, t in with_bits(outputs, bits).items()}
    before = {name: guard_bands.copy(t, NAN) for name, t in saved.items()}
    try:
        with refused_clearly(case):
            gradients = usable_gradients(given, call.backward(implementation, case, given, saved, arena))[0]
    except UnsupportedCase as refused:
        return Seen(outputs, refused=call.refusal(refused)), ()
    problems = tuple(p for name, t in before.items() for p in _written(f"saved {name}", name, t, saved[name]))
    if problems or not implementation.deterministic:
        return Seen(outputs, gradients), problems
    # The first run calls backward twice, with other statistics; so what alternates from call to call shows only here.
    again = usable_gradients(given, call.backward(implementation, case, given, saved, arena))[0]
    same = {name for name, t in gradients.items() if name in again and guard_bands.same_bits(t, again[name])}
    for name in [name for name in gradients if name not in same]:
        message = f"{name} is not the same when backward is called twice in a row with the same arguments"
        return Seen(outputs, gradients), (Problem("not_repeatable", name, message),)
    return Seen(outputs, gradients), ()


def by_autograd(
    case: Case, returned: Mapping[str, Tensor], leaves: Inputs, arena: Arena | RemoteRun
) -> tuple[dict[str, Tensor], str]:
    """Gradients through the y of ``returned``, by name; and why they were refused, "" where they were not."""
    try:
        with refused_clearly(case):
            return call.autograd(returned, leaves, arena), ""
    except UnsupportedCase as refused:
        return {}, call.refusal(refused)


def with_bits(outputs: Mapping[str, Tensor], bits: Tensor | None) -> dict[str, Tensor]:
    """``outputs`` with the reference's ``bits``, bool (M, N), in the form in which the kernel returned its own."""
    own = dict(outputs)
    if bits is not None and "bitmask" in own:
        form = own["bitmask"]
        own["bitmask"] = (bits if form.dtype == bits.dtype else bitmask.pack(bits)).reshape(form.shape)
    return own


def written(implementation: Implementation, before: Inputs, after: Inputs) -> tuple[Problem, ...]:
    """What was written to the inputs and around them: ``after`` began as a copy of ``before``.

    Writing into what the implementation declares to overwrite is no problem, writing around it is.
    """
    pairs, free = zip(before.named(), after.named(), strict=True), implementation.overwrites
    return tuple(p for (name, old), (_, new) in pairs for p in _written(name, name, old, new, free=name in free))


def _written(what: str, output: str, before: Tensor, after: Tensor, *, free: bool = False) -> list[Problem]:
    if guard_bands.moved(before, after):
        message = f"{what} was modified: its shape, strides or storage; inputs belong to the caller"
        return [Problem("input_modified", output, message)]
    if guard_bands.untouched(before, after):
        return []
    found = []
    changed = 0 if free else int(guard_bands.differing(before, after).sum())
    if changed:
        message = f"{what} was modified: {changed} of {before.numel()} elements; inputs belong to the caller"
        found.append(Problem("input_modified", output, message))
    count, where = guard_bands.trespass(before, after)
    if count:
        message = f"{what}: {_elements(count)} outside it written to, the first {where}"
        found.append(Problem("out_of_bounds_write", output, message))
    return found


def strays(arena: Arena | RemoteRun, named: Mapping[str, Tensor]) -> tuple[Problem, ...]:
    """What was written around the memory that the implementation allocated; ``named``: what it returned of that.

    Where it is not around something returned, the first such buffer is told, however many calls did the same.
    """
    found: dict[str, Problem] = {}
    for name, elements, count, where in arena.strays(named):
        what = name or f"a buffer of {_elements(elements)} that it allocated"
        message = f"{what}: {_elements(count)} outside it written to, the first {where}"
        found.setdefault(name, Problem("out_of_bounds_write", name, message))
    return tuple(problem for name, problem in found.items() if name or len(found) == 1)


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"
