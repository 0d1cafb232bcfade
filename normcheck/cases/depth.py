"""How far a case is probed, beyond what its outputs are."""

from __future__ import annotations

from enum import StrEnum


class Depth(StrEnum):
    """OFF: not at all. REASON: for the cause of a wrong value. MEMORY: by a second run in other memory too. ROWS: also
    by runs with the rows in another order. A value of the axis "probe" is one of the last three.
    """

    OFF = "off"
    REASON = "reason"
    MEMORY = "memory"
    ROWS = "rows"

    def reaches(self, other: Depth) -> bool:
        """Whether it goes as far as another, or farther."""
        every = list(Depth)
        return every.index(self) >= every.index(other)
