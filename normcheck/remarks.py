"""What the counts of a cell mean to its reader, in words: of one run, and of the shards of one together."""

from __future__ import annotations

from collections.abc import Mapping

from normcheck.result import Uncheckable, Vacuity
from normcheck.table import table


def derived(uncheckable: Mapping[str, Uncheckable], vacuity: Mapping[str, Vacuity]) -> list[str]:
    """Notes on outputs of which too little, or nothing, was checked."""
    limit = table().max_uncheckable
    notes = []
    for name, u in uncheckable.items():
        if u.share > limit and name != "bitmask":  # a bit in doubt is what the definition of the op leaves open
            notes.append(f"{u.share:.1%} of {name} could not be checked: its bound is not finite there")
    for name, v in vacuity.items():
        if v.empty == v.checks:
            notes.append(f"{name} was not checked: zeros in its place would have passed")
    return notes


def refusals(refused: Mapping[str, int]) -> str:
    """Why cases were refused, with how many; "" where none was."""
    return "; ".join(f"{reason} ({count} cases)" for reason, count in refused.items())
