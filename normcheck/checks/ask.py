"""How a case is run and judged: one value for what every way to a case has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.oracle.compare import Expectation
from normcheck.oracle.conventions import Convention
from normcheck.oracle.tolerances import Model


@dataclass(frozen=True, slots=True)
class Ask:
    """``depth``: how far the case is probed, unless it is too large. ``floors``: output -> ratio below which details
    are not needed. ``conventions``: those that the kernel may have, None: any that the implementation leaves open.
    ``model`` replaces the one that the implementation declares. ``watch`` is called with all that is compared.
    ``other_modes``: it is also called in another mode of torch, see ``checks.other_modes``.
    ``upcoming``: a case that may come next, whose inputs are made while the kernel's process is at work. ``fused``: the
    fused judge may judge it, see ``oracle.judging``. ``patient``: a case that is late is run once more.
    """

    depth: Depth = Depth.ROWS
    floors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    conventions: tuple[Convention, ...] | None = None
    model: Model | None = None
    watch: Callable[[Expectation], None] | None = None
    other_modes: bool = False
    upcoming: Case | None = None
    fused: bool = False
    patient: bool = True


FULLY = Ask()
"""With every probe."""

UNPROBED = Ask(Depth.OFF)
"""For its values alone."""
