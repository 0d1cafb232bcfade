"""What no value comparison sees: the same call once more, in other surroundings, after other work, among other rows.

One second run, with everything that is not the implementation's own filled with another pattern, answers several
questions at once: the same bits mean that it repeats, reads nothing unwritten and nothing out of bounds. Only where
they differ, runs that change one thing each find out which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from torch import Tensor

from normcheck import memory
from normcheck.call import refusal, supports
from normcheck.case import Case
from normcheck.errors import Broken, UnsupportedCase
from normcheck.implementation import Implementation
from normcheck.inputs import Inputs
from normcheck.memory import LARGE, NAN, NEGATIVE, Pattern, Surroundings
from normcheck.observe import Begun, Seen, begin, observe, observe_in_place
from normcheck.ops.op import Op
from normcheck.outputs import Problem

_REPEATS = 4
BY_ROW = ("mean", "rstd", "y", "bitmask", "dx")
"""What belongs to one row."""

WrongValues = Callable[[Inputs, Seen], list[str]]
"""Inputs and what a run returned for them -> the outputs whose values are outside their bounds."""


class Depth(IntEnum):
    """How much of this a case is asked: nothing; only the reason of a wrong value; always; and the rows as well."""

    OFF = 0
    REASON = 1
    MEMORY = 2
    ROWS = 3


@dataclass(frozen=True, slots=True)
class Probed:
    """``repeats``, ``invariant``: output -> whether its bits stayed, again and among other rows; empty: not asked."""

    problems: tuple[Problem, ...] = ()
    repeats: Mapping[str, bool] = field(default_factory=dict)
    invariant: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked: one case of an implementation, and the first run of it. ``given``: the tensors of that run.

    ``bits``: bool (M, N), the reference's bitmask; ``begun``: the second run, in ``other_surroundings``.
    """

    implementation: Implementation
    op: Op
    case: Case
    inputs: Inputs
    given: Inputs
    first: Seen
    bits: Tensor | None
    wrong_values: WrongValues
    begun: Begun

    def again(self, surroundings: Surroundings) -> tuple[Seen, tuple[Problem, ...]]:
        """The same call in other surroundings."""
        begun = begin(self.implementation, self.case, self.inputs, surroundings)
        return observe(self.implementation, self.op, self.case, begun, self.bits)


def other_surroundings(case: Case) -> Surroundings:
    """Those of the second run: another pattern in all memory that is not the implementation's own."""
    pattern = NEGATIVE if case.seed % 2 else LARGE
    return Surroundings(pattern, pattern, pattern)


def probe(subject: Subject, *, rows: bool) -> Probed:
    """Ask once more; with ``rows`` also with the rows in another order and with one of them alone."""
    try:
        probed = _again(subject)
    except UnsupportedCase as refused:
        return Probed((_refused_again(refusal(refused)),))
    except Broken as broken:
        return _broken(subject, broken)
    try:
        return _among_other_rows(subject, probed) if rows and not probed.problems else probed
    except UnsupportedCase:  # other rows may be another shape
        return probed
    except Broken as broken:
        return _broken(subject, broken)


def _refused_again(reason: str) -> Problem:
    return Problem("not_repeatable", "", f"the same call was refused when it was run again: {reason}")


def _broken(subject: Subject, broken: Broken) -> Probed:
    if subject.inputs.x.is_cuda and "out of memory" in broken.message:
        return Probed()  # it ran once: a second run beside the first needs memory that is not there
    message = f"{broken.message} (not the first time that this case was run)"
    return Probed((Problem(broken.kind, broken.output, message, broken.frames),))


def _again(subject: Subject) -> Probed:
    """A second run with another pattern in all memory that is not the implementation's own."""
    pattern = subject.begun.surroundings.fresh
    second, problems = observe(subject.implementation, subject.op, subject.case, subject.begun, subject.bits)
    if second.refused and not subject.first.refused:
        return Probed((_refused_again(second.refused),))
    shared = _shared(subject.first, second)
    if shared:
        message = f"{shared} of two calls lies in the same memory: the second call overwrote the result of the first"
        return Probed((Problem("not_repeatable", shared, message),))
    changed = _changed(subject.first, second)
    repeats = {name: name not in changed for name in subject.first.named}
    if not changed or problems:
        return Probed(problems, repeats)
    if subject.implementation.deterministic:
        return Probed((_reason(subject, pattern, changed),), repeats)
    wrong = subject.wrong_values(subject.inputs, second)
    message = f"is right at first, and wrong when run again with {pattern.name} in memory that is not its own"
    return Probed(tuple(Problem("not_repeatable", name, f"{name} {message}") for name in wrong[:1]), repeats)


def _reason(subject: Subject, pattern: Pattern, changed: list[str]) -> Problem:
    """Why the bits of the ``changed`` outputs are not those of the first run: one thing is changed at a time."""
    unsteady = _unsteady(subject, Surroundings(), _REPEATS)
    if unsteady is not None:
        return unsteady
    for kind, surroundings, what in (
        ("unwritten", Surroundings(fresh=pattern), "memory that was never written, such as what torch.empty returns"),
        ("out_of_bounds_read", Surroundings(allocated=pattern), "what lies around memory that it allocated"),
        ("out_of_bounds_read", Surroundings(inputs=pattern), "what lies around an input, or in the gaps of its rows"),
    ):
        found = _differ(subject.first, subject.again(surroundings)[0])
        if found:
            name, how_many = found
            unsteady = _unsteady(subject, surroundings, 1) or _unsteady(subject, Surroundings(), _REPEATS)
            return unsteady or Problem(kind, name, f"{name} depends on {what}: {how_many}")
    message = f"{changed[0]} depends on memory that is not the implementation's own"
    return Problem("out_of_bounds_read", changed[0], message)


def _shared(first: Seen, second: Seen) -> str:
    """The first output that a later call returned in the very memory of an earlier one, which is still in use."""
    one, other = first.named, second.named
    places = {name: t.untyped_storage().data_ptr() for name, t in one.items() if t.numel()}
    return next((n for n, at in places.items() if n in other and other[n].untyped_storage().data_ptr() == at), "")


def _unsteady(subject: Subject, surroundings: Surroundings, repeats: int) -> Problem | None:
    """Whether runs in the very same surroundings differ: then no difference says anything about memory."""
    first = subject.first if surroundings == Surroundings() else subject.again(surroundings)[0]
    for _ in range(repeats):
        found = _differ(first, subject.again(surroundings)[0])
        if found:
            name, how_many = found
            advice = "if that is meant, declare deterministic=False"
            return Problem("not_repeatable", name, f"{name} is not the same when run again: {how_many}; {advice}")
    return None


def _differ(one: Seen, other: Seen) -> tuple[str, str] | None:
    """The first output whose bits differ in two runs, and how many of its elements."""
    for name in _changed(one, other)[:1]:
        return name, _count(one.named[name], other.named.get(name))
    return None


def _among_other_rows(subject: Subject, probed: Probed) -> Probed:
    """The rows rolled by one, in the very memory of the first run, and one row alone."""
    if subject.case.M < 2:
        return probed
    rolled = _rolled(subject.inputs)
    latest = _of_the_latest_forward(subject, rolled)
    if latest is not None:
        return replace(probed, problems=(latest,))
    for (_, place), (_, values) in zip(subject.given.named(), rolled.named(), strict=True):
        if 0 not in place.stride():
            place.copy_(values)
    bits = None if subject.bits is None else subject.bits.roll(1, 0)
    case, op, implementation = subject.case, subject.op, subject.implementation
    moved, problems = observe_in_place(implementation, op, case, subject.given, bits)
    invariant = {
        name: memory.same_bits(_by_row(t, case.M).roll(1, 0), _by_row(moved.named[name], case.M))
        for name, t in subject.first.named.items()
        if name in BY_ROW and name in moved.named
    }
    if not all(invariant.values()):
        wrong = subject.wrong_values(rolled, moved)
        if wrong:
            message = f"{wrong[0]} is wrong for new values in memory that was used before: it depends on earlier calls"
            return replace(probed, problems=(Problem("not_repeatable", wrong[0], message),))
    stale = _with_other_weights(subject)
    if stale is not None:
        return replace(probed, problems=(stale,))
    for name, same in _alone(subject).items():
        invariant[name] = same and invariant.get(name, True)
    broken = [name for name, same in invariant.items() if not same]
    if broken and implementation.batch_invariant:
        message = f"{broken[0]}: a row has other bits among other rows, and batch_invariant=True is declared"
        problems = (*problems, Problem("not_repeatable", broken[0], message))
    return replace(probed, problems=problems, invariant=invariant)


def _of_the_latest_forward(subject: Subject, other: Inputs) -> Problem | None:
    """Two forwards, then the backward of the first, as a network with two such layers does it."""
    i, case = subject.implementation, subject.case
    if not i.deterministic:
        return None
    between = other.each(lambda t: memory.in_bands(t, NAN))
    begun = begin(i, case, subject.inputs, Surroundings(), deferred=True)
    seen, _ = observe(i, subject.op, case, begun, subject.bits, between)
    found = _differ(subject.first, seen)
    if found is None:
        return None
    name, how_many = found
    message = f"{name} is not the same when forward is called for other inputs before backward: {how_many}"
    return Problem("not_repeatable", name, message)


def _with_other_weights(subject: Subject) -> Problem | None:
    """The weights changed in place: what was made of the old ones, and kept, is wrong now."""
    if subject.op.clamped or subject.case.weights != "normal":
        return None  # the bits that backward is fed with would be others, too; and ties would be lost
    new = subject.inputs.each(lambda t: t)
    new = replace(new, weight=new.weight.roll(1), bias=None if new.bias is None else new.bias.roll(1))
    for (_, place), (_, values) in zip(subject.given.named(), new.named(), strict=True):
        if 0 not in place.stride():
            place.copy_(values)
    seen, _ = observe_in_place(subject.implementation, subject.op, subject.case, subject.given, None)
    for name in subject.wrong_values(new, seen)[:1]:
        message = f"{name} is wrong once the weights were changed in place: it depends on earlier calls"
        return Problem("not_repeatable", name, message)
    return None


def _alone(subject: Subject) -> dict[str, bool]:
    """Whether a row on its own has the bits that it has among the others; empty where it cannot be asked."""
    case, shapes = subject.case, subject.implementation.shapes
    row = case.seed % case.M
    alone = replace(case, M=1, layout="rank3" if case.rank == 3 else "contiguous", gap=0)
    if (shapes is not None and (1, case.N) not in shapes) or supports(subject.implementation, alone) is not None:
        return {}

    def one(rows: Tensor) -> Tensor:
        shape = (1, 1, case.N) if case.rank == 3 else (1, case.N)
        return memory.in_bands(rows.reshape(case.M, case.N)[row].reshape(shape), NAN)

    i = subject.inputs
    inputs = Inputs(one(i.x), i.weight, i.bias, one(i.dy))
    bits = None if subject.bits is None else subject.bits[row : row + 1]
    begun = begin(subject.implementation, alone, inputs, Surroundings())
    seen, _ = observe(subject.implementation, subject.op, alone, begun, bits)
    return {
        name: memory.same_bits(_by_row(t, case.M)[row], _by_row(seen.named[name], 1)[0])
        for name, t in subject.first.named.items()
        if name in BY_ROW and name in seen.named
    }


def _rolled(inputs: Inputs) -> Inputs:
    """The inputs with the last row of x and dy first."""

    def roll(t: Tensor) -> Tensor:
        return t.reshape(-1, t.shape[-1]).roll(1, 0).reshape(t.shape)

    return Inputs(roll(inputs.x), inputs.weight, inputs.bias, roll(inputs.dy))


def _by_row(t: Tensor, rows: int) -> Tensor:
    return t.detach().reshape(rows, -1)


def _changed(first: Seen, second: Seen) -> list[str]:
    """The outputs whose bits differ, in the order of the data's way; one that is missing differs.

    Gradients of a backward that was refused among other rows do not: that may be another shape.
    """
    one, other = first.named, second.named
    asked = [name for name in one if not (second.refused and name in first.gradients)]
    return [name for name in asked if name not in other or not memory.same_bits(one[name], other[name])]


def _count(one: Tensor, other: Tensor | None) -> str:
    if other is None:
        return "it is missing"
    if other.shape != one.shape:
        return "another shape"
    wrong = memory.differing(one, other)
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ"


def not_as_before(first: Seen, last: Seen) -> Iterable[Problem]:
    """The outputs of a case that was run first and, after all others, last: their bits are the same."""
    if last.refused and not first.refused:
        yield _refused_again(last.refused)
    found = _differ(first, last)
    if found:
        name, how_many = found
        yield Problem("not_repeatable", name, f"{name} is not the same after other work: {how_many}")
