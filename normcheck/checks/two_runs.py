"""Two runs of the same call: what differs in the bits of their outputs, and what should not be shared or refused."""

from __future__ import annotations

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Seen


def changed(first: Seen, second: Seen) -> list[str]:
    """The outputs whose bits differ, in the order of the data's way; one that is missing differs.

    Gradients of a backward that was refused among other rows do not: that may be another shape.
    """
    one, other = first.named, second.named
    asked = [name for name in one if not (second.refused and name in first.gradients)]
    return [name for name in asked if name not in other or not guard_bands.same_bits(one[name], other[name])]


def first_difference(one: Seen, other: Seen) -> tuple[str, str] | None:
    """The first output whose bits differ in two runs, and how many of its elements."""
    for name in changed(one, other)[:1]:
        return name, _count(one.named[name], other.named.get(name))
    return None


def _count(one: Tensor, other: Tensor | None) -> str:
    if other is None:
        return "it is missing"
    if other.shape != one.shape:
        return "another shape"
    wrong = guard_bands.differing(one, other)
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ"


def sharing_memory(first: Seen, second: Seen) -> str:
    """The first output that a later call returned in the very memory of an earlier one, which is still in use."""
    one, other = first.named, second.named
    places = {name: t.untyped_storage().data_ptr() for name, t in one.items() if t.numel()}
    return next((n for n, at in places.items() if n in other and other[n].untyped_storage().data_ptr() == at), "")


def refused_again(reason: str) -> Problem:
    """What it means that the second run was refused, though the first was not."""
    return Problem("not_repeatable", "", f"the same call was refused when it was run again: {reason}")
