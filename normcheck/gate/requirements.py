"""What ``--require`` asks of an implementation: that it runs, so many cases, or a size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from normcheck.errors import one_line

EVERY_CELL = "*"
"""The name in ``--require '*:CASES'`` and ``'*:N=SIZE'``: each cell that ran."""

MOST_REQUIRED = 10**9


class Requirement(NamedTuple):
    """What ``--require`` asks of an implementation ``name``: that it runs, and at ``least`` so many ``cases``, or a
    case whose ``M`` or ``N``, its ``axis``, is ``least``. Without either the axis is "".
    """

    name: str
    axis: str = ""
    least: int = 0


def requirement(text: str) -> Requirement:
    """What ``--require`` asks: NAME, NAME:CASES, NAME:N=SIZE or NAME:M=SIZE. Raises ValueError("VALUE: expected ...").

    A name may have colons of its own, as in ``mine.py:rmsnorm``; only what follows the last one is no part of it.
    """
    name, colon, asked = text.rpartition(":")
    match = re.fullmatch("(?:([MN])=)?([0-9]+)", asked) if colon else None
    if match is None:
        name = text
    if not name or (match is None and (name == EVERY_CELL or re.search(":[A-Za-z]*=[^:]*$", text))):
        forms = f"NAME, NAME:CASES, NAME:N=SIZE, NAME:M=SIZE, or '{EVERY_CELL}' for NAME with one of the last three"
        raise ValueError(f"{one_line(text, 60)}: expected {forms}")
    if match is None:
        return Requirement(name)
    axis, digits = match[1] or "cases", match[2]
    if not (len(digits) <= 10 and 1 <= int(digits) <= MOST_REQUIRED):
        what = "cases after the colon" if axis == "cases" else f"as {axis}"
        raise ValueError(f"{one_line(text, 60)}: expected 1 to {MOST_REQUIRED} {what}")
    return Requirement(name, axis, int(digits))


def sizes_required(texts: Iterable[str], name: str) -> tuple[tuple[str, int], ...]:
    """(axis, size) of each size that ``texts`` require of the implementation ``name``, or of every cell."""
    found = (each for each in map(requirement, texts) if each.name in (name, EVERY_CELL))
    return tuple(dict.fromkeys((each.axis, each.least) for each in found if each.axis in ("M", "N")))
