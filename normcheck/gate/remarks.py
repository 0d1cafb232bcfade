"""What the counts of a cell mean to its reader, in words: of one run, and of the shards of one together."""

from __future__ import annotations

from collections.abc import Mapping

from normcheck.oracle.tolerances import table
from normcheck.result import Uncheckable, Vacuity

NO_BACKWARD = "no backward ran, so no gradient was checked"


def derived(
    uncheckable: Mapping[str, Uncheckable], vacuity: Mapping[str, Vacuity], refused: Mapping[str, int], cases: int
) -> list[str]:
    """Notes on outputs of which too little, or nothing, was checked; ``refused``: of how many of the ``cases`` backward
    was refused, by reason.
    """
    limit = table().max_uncheckable
    notes = []
    if refused:
        none = sum(refused.values()) == cases
        notes.append(f"{NO_BACKWARD if none else 'gradients not checked where it was refused'}: {refusals(refused)}")
    for name, u in uncheckable.items():
        if u.share > limit and name != "bitmask":  # a bit in doubt is what the definition of the op leaves open
            notes.append(f"{u.share:.1%} of {name} could not be checked: its bound is not finite there")
    notes += [f"{name} was not checked: zeros in its place would have passed" for name in empty_outputs(vacuity)]
    return notes


def empty_outputs(vacuity: Mapping[str, Vacuity]) -> list[str]:
    """The outputs that zeros would have passed for in every check: nothing is known of them."""
    return [name for name, v in vacuity.items() if v.empty == v.checks]


def refusals(refused: Mapping[str, int]) -> str:
    """Why cases were refused, with how many; "" where none was."""
    return "; ".join(f"{reason} ({count} cases)" for reason, count in refused.items())
