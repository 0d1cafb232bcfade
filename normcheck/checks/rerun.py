"""What the probes ask about, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.ops.op import Op
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Begun, Seen, begin, observe
from normcheck.impls.implementation import Implementation
from normcheck.runner.arena import Surroundings

WrongValues = Callable[[Inputs, Seen], list[str]]
"""Inputs and what a run returned for them -> the outputs whose values are outside their bounds."""


@dataclass(frozen=True, slots=True)
class Probed:
    """``repeats``, ``invariant``: output -> whether its bits stayed, again and among other rows; empty: not asked."""

    problems: tuple[Problem, ...] = ()
    repeats: Mapping[str, bool] = field(default_factory=dict)
    invariant: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked: one case of an implementation, and the first run of it. ``given``: the tensors of that run.

    ``bits``: bool (M, N), the reference's bitmask; ``begun``: the second run, in ``repeatability.other_surroundings``.
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

    def refill(self, values: Inputs) -> None:
        """Lay ``values`` into the very memory of the first run."""
        for (_, place), (_, new) in zip(self.given.named(), values.named(), strict=True):
            own = guard_bands.elements(place)
            own.copy_(new[tuple(slice(n) for n in own.shape)])
