"""The options of ``normcheck reward``, which are also the arguments of ``normcheck.reward``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from normcheck.gate.options import Device, Dtypes, NewSeed, ops
from normcheck.options import Option

LEAST_SECONDS, MOST_SECONDS = 0.1, 3600.0


def _seconds(value: float) -> None:
    if not LEAST_SECONDS <= value <= MOST_SECONDS:
        raise ValueError(f"{value:g}: expected seconds, {LEAST_SECONDS:g} to {MOST_SECONDS:g}")


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """The options of ``normcheck reward``, in the order of its help. ``op``: "" is refused."""

    op: Annotated[str, Option(help="The op that the file computes.", names=ops)] = ""
    seconds: Annotated[float, Option(help="Decides how many cases there are, and ends them.", check=_seconds)] = 5.0
    dtype: Dtypes = ()
    seed: NewSeed = None
    device: Device = "auto"
