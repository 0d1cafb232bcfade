"""The time and the cases of one cell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``core``: seconds for the runs of a core, without what they build.

    If building is dear, a cell has ``usual`` seconds of wall time, of which ``used`` were over before it began,
    ``telling`` for sizes that tell most, and up to ``most`` for what a pass needs: so many cases on so many shapes,
    ``least``. ``cases``: how many there are at most. ``at_once``: how many run at a key that was paid for before the
    next is.
    """

    usual: float
    telling: float
    most: float
    core: float
    least: tuple[int, int]
    cases: int
    at_once: int = 20
    used: float = 0.0
