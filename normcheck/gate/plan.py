"""What a run was asked to do, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from normcheck.cases.case import Case
from normcheck.cases.goals import Extent
from normcheck.checks.cell import Cell


@dataclass(frozen=True)
class Profile:
    """How much a cell may cost, and what it must have run.

    ``extent``: of its core, which may take ``core_seconds``, compiling and the like apart. After it come other cases:
    ``max_examples`` in all, ``seconds`` of searching, and the same again for shrinking.

    ``large_share``: the share of the seconds that a single large case may be expected to take. On a GPU each large case
    is run ``large_times``, with other data: races show in some runs only. ``sanitizer``: whether a
    cell that passes on a GPU is also run under compute-sanitizer. ``shrink_seconds``: what the search for a simpler
    failing case may take, and never more than ``seconds``.
    """

    name: str
    max_examples: int
    seconds: float
    extent: Extent
    core_seconds: float
    large_share: float = 0.4
    large_times: int = 1
    sanitizer: bool = False
    shrink_seconds: float = 45.0


_QUICK = Extent(rows=5000, paired_rows=5000, elements=320_000, heights=3, widths=2, dear_rows=300)
_CI = Extent(rows=8193, paired_rows=8193, elements=1_200_000, heights=7, widths=8, dear_rows=4097)

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 400, 4.0, _QUICK, 60.0),
        Profile("ci", 1500, 45.0, _CI, 300.0, large_times=4),
        Profile("deep", 20000, 900.0, _CI, 1800.0, large_times=25, sanitizer=True),
    )
}


@dataclass(frozen=True)
class Replay:
    """Cases of a cell that failed in earlier runs, and notes on those that could not be read."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that a sweep needs to know. ``device`` is "cpu" or "cuda"; ``timeout`` is per case, in seconds.

    ``shard``: (K, N) runs of each cell's cases only every N-th, from the K-th on. ``replays``: op, implementation and
    dtype -> what is run before all others, by the first shard.
    """

    cells: tuple[Cell, ...]
    profile: Profile
    seed: int
    device: str
    timeout: float
    shard: tuple[int, int] = (1, 1)
    replays: Mapping[tuple[str, str, str], Replay] = field(default_factory=dict)
