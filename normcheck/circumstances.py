"""How a cell did otherwise than in eager mode with the configuration that won: contexts, configurations, what ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from normcheck.json_types import Count, one_of

NOT_TRIED, HELD, TOLD, WRONG = "not tried", "held", "told", "wrong"


@dataclass(frozen=True, kw_only=True)
class InContext:
    """How a cell did in a context, in so many ``cases``.

    ``status``: held; not tried; told (something is wrong in a context that nobody asked for, and that is not held
    against a kernel); or wrong. ``why``: what was told, or why the context, or a part of it, could not be tried.
    """

    status: Annotated[str, one_of(NOT_TRIED, HELD, TOLD, WRONG)]
    cases: Count = 0
    why: str = ""

    def joined(self, other: InContext) -> InContext:
        """How a cell did that did so in some cases, and as ``other`` in more: what says most holds."""
        order = (NOT_TRIED, HELD, TOLD, WRONG)
        said = max(self, other, key=lambda how: order.index(how.status))
        return InContext(status=said.status, cases=self.cases + other.cases, why=said.why)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The kernels that a case with these ``M`` and ``N`` launched on a GPU, forward and backward, in their order.

    Names of more than 60 characters are cut. ``built``: for an ``M`` that no call had before, how many kernels were
    compiled or tuned for it; else None.
    """

    M: Count
    N: Count
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    built: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Configured:
    """How many configurations of a kernel's autotuners were judged, each on every case that was chosen for it.

    ``judged`` of ``allowed``: of those that the kernel does not rule out itself. ``cannot``: configuration -> why it
    cannot be launched, which is no fault. ``why``: why the others were not judged, "" if there are none.
    """

    judged: Count
    allowed: Count
    cannot: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
