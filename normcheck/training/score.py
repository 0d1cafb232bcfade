"""The number of a judged file: stages that do not overlap, and within some of them the share of what is right.

docs/reward.md promises the order of the stages and their numbers; nothing else of normcheck depends on them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("right", "thin", "wrong", "cheating", "unjudged")
"""Every ``Reward.kind``."""

STAGES = {
    "cheating": (0.0, 0.0),
    "import": (0.02, 0.02),
    "signature": (0.05, 0.05),
    "first case": (0.10, 0.10),
    "nearly all": (0.15, 0.15),
    "some": (0.20, 0.80),
    "thin": (0.85, 0.95),
    "right": (1.0, 1.0),
}
"""Every stage of a judged file, the worst first -> its least and its greatest score. ``unjudged`` has no score."""

NEARLY_ALL = 0.10
"""A share of what is right up to here is that of a kernel that computes something else: zeros are right somewhere."""

LEAST_COVERED = 2 / 3
"""The share of the planned cases that a kernel must have answered to be thin; what it leaves beyond that is wrong."""

LEAST_CASES = 60
"""Fewer cases than these are thin, even if all of them are right."""

LARGEST_RATIO = 1e200
"""Stands for every larger ratio of error and bound, and for that of a NaN: JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What a training loop learns of a file: see docs/reward.md, which promises its numbers.

    ``ok``: whether ``kind`` is "right". ``score``: 0 to 1, by ``stage``; None if ``kind`` is "unjudged".
    ``worst_ratio``: the largest error / bound of any output, above 1 if a value is wrong; None if no value was
    compared. ``kind``: one of KINDS; ``stage``: one of STAGES, or "unjudged". ``why``: one line for people. ``seed``:
    drew the cases, of which ``cases`` of ``planned`` were judged. ``case``: the line of the first one that is wrong,
    ``reproduce``: the command that runs it again. ``outputs``: those that were compared; without dx among them, no
    gradient was. ``seconds``: how long it took; two rewards that differ in that alone are equal.
    """

    ok: bool
    score: float | None
    worst_ratio: float | None
    kind: str
    why: str
    stage: str
    seed: int
    cases: int = 0
    planned: int = 0
    case: str = ""
    reproduce: str = ""
    outputs: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def json(self) -> str:
        """All fields as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def told(cls, told: Mapping[str, Any]) -> Reward:
        """The reward with these fields, as JSON has them."""
        return cls(**{**told, "outputs": tuple(told["outputs"])})


def capped(ratio: float) -> float:
    """``ratio``, or what stands for one that JSON cannot say."""
    return min(ratio, LARGEST_RATIO)


def stage_of(shares: Sequence[float], planned: int, *, refused: int = 0, narrow: bool = False) -> tuple[str, float]:
    """(stage, score) of a kernel that ran. ``shares``: of each case that it answered, the share that is right, 0 to 1.

    A case that it did not answer, because it refuses it or takes too long, has no share, and counts as wrong if
    another one is wrong or if too many are left. ``refused``: how many it refuses: without any it was time that was
    missing, and who is right until then computes nothing else. ``narrow``: the cases were of too few shapes.
    """
    covered = len(shares) / planned
    if all(share == 1.0 for share in shares) and covered >= LEAST_COVERED:
        if covered < 1.0 or planned < LEAST_CASES or narrow:
            return "thin", _within("thin", covered)
        return "right", 1.0
    share = math.fsum(shares) / planned
    late = not refused and min(shares) == 1.0
    return ("some", _within("some", share)) if share > NEARLY_ALL or late else ("nearly all", STAGES["nearly all"][0])


def _within(stage: str, share: float) -> float:
    """The score of a share of 0 to 1 in its stage, to four digits."""
    least, greatest = STAGES[stage]
    return round(least + share * (greatest - least), 4)
