"""Input and result of the probes: a case with its first run, what further runs showed, how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Seen, Started, observe, start
from normcheck.impls.implementation import Implementation
from normcheck.runner.arena import Surroundings

WrongValues = Callable[[Inputs, Seen], list[str]]
"""Inputs, and what a run returned for them -> names of the outputs that are outside their bounds."""


@dataclass(frozen=True, slots=True)
class Probed:
    """``repeats``, ``invariant``: output -> whether it keeps its bits, again and among other rows; empty: not tried."""

    problems: tuple[Problem, ...] = ()
    repeats: Mapping[str, bool] = field(default_factory=dict)
    invariant: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """A case of an implementation and its first run, for the probes to repeat. ``given``: the tensors of that run.

    ``bits``: bool (M, N), the reference's bitmask; ``second``: the second run, in ``repeatability.other_surroundings``.
    """

    implementation: Implementation
    op: Op
    case: Case
    inputs: Inputs
    given: Inputs
    first: Seen
    bits: Tensor | None
    wrong_values: WrongValues
    second: Started

    def again(self, surroundings: Surroundings) -> tuple[Seen, tuple[Problem, ...]]:
        """Make the same call in other surroundings."""
        started = start(self.implementation, self.case, self.inputs, surroundings)
        return observe(self.implementation, self.op, self.case, started, self.bits)

    def refill(self, values: Inputs) -> None:
        """Copy ``values`` into the memory of the first run."""
        for (_, old), (_, new) in zip(self.given.named(), values.named(), strict=True):
            elements = guard_bands.elements(old)
            elements.copy_(new[tuple(slice(n) for n in elements.shape)])


def changed(first: Seen, second: Seen) -> list[str]:
    """Names of the outputs whose bits differ, in the order of ``Seen.named``; a missing output differs.

    The gradients of a second backward that was refused do not count: other rows may have another shape.
    """
    one, other = first.named, second.named
    compared = [name for name in one if not (second.refused and name in first.gradients)]
    return [name for name in compared if name not in other or not guard_bands.same_bits(one[name], other[name])]


def first_difference(one: Seen, other: Seen) -> tuple[str, str] | None:
    """The first output whose bits differ in two runs, and how many of its elements differ; None if none does."""
    for name in changed(one, other)[:1]:
        return name, _count(one.named[name], other.named.get(name))
    return None


def _count(one: Tensor, other: Tensor | None) -> str:
    if other is None:
        return "it is missing"
    if other.shape != one.shape:
        return "another shape"
    return f"{guard_bands.how_many_differ(one, other)} of {one.numel()} elements differ"


def sharing_memory(first: Seen, second: Seen) -> str:
    """The first output that a later call returned in the memory of an earlier result, which is still in use; or ""."""
    one, other = first.named, second.named
    places = {name: t.untyped_storage().data_ptr() for name, t in one.items() if t.numel()}
    return next((n for n, at in places.items() if n in other and other[n].untyped_storage().data_ptr() == at), "")


def refused_again(reason: str) -> Problem:
    """The problem of a second run that was refused, though the first was not."""
    return Problem("not_repeatable", "", f"the same call was refused when it was run again: {reason}")
