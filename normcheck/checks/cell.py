"""What a case is run on, and what it is run under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from normcheck.cases.ops.op import Op
from normcheck.impls.implementation import Implementation


@dataclass(frozen=True)
class Cell:
    """Op x implementation x dtype. ``spec`` is how the command line names the implementation."""

    op: Op
    implementation: Implementation
    dtype: str
    spec: str


class Setting(Protocol):
    """What a case is run under; the plan of a run is one. ``device``: cpu or cuda; ``timeout``: seconds a case."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    @property
    def timeout(self) -> float:
        """Seconds after which a case is ended."""
