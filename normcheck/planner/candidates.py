"""The cases that the priced order chooses from: one thing new beside what has run."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from normcheck.cases.axes import ORDINARY
from normcheck.cases.case import Case
from normcheck.cases.claims import Claims
from normcheck.cases.depth import Depth
from normcheck.cases.design import Design
from normcheck.cases.parameters import PARAMETERS
from normcheck.cases.planned import Planned, Size
from normcheck.planner.must import block_of, facets_of, weight
from normcheck.planner.prices import Prices
from normcheck.planner.record import Record

_SIZES = 6  # new sizes that are considered

_BY_KIND = ("rows", "dy", "weights", "special", "probe", "residual", "scale", "gate", "angles")
"""The axes that a case at any place may cover."""


class Candidates:
    """Makes cases at places that were paid for, at new sizes, and with one other parameter, layout or number."""

    def __init__(self, claims: Claims, design: Design, prices: Prices, record: Record) -> None:
        self._claims, self._design, self._prices, self._record = claims, design, prices, record

    def of(self, wanted: Set[Any]) -> Iterator[Planned]:
        """Cases at new sizes that tell most, and beside the latest places: one thing new."""
        known = [case for case in reversed(self._record.places.values()) if case.M]
        if not known:
            return
        base, sizes = known[0], {(size.M, size.N): size for size in self._design.candidates}
        for size in self._new_sizes(wanted):
            yield self.at(base, size, **self._plain)
            yield self.at(base, size, **self._plain, **self._other_parameters())
        yield from self._beside(max(known, key=lambda case: (case.N > 1, min(case.M, 20))), wanted)
        for m, heights in self._design.sizes.sizes.heights.items():
            shape = heights[0], base.N
            if shape in sizes and (("m", m) in wanted or (m and shape not in self._record.shapes)):
                yield self.at(base, sizes[shape], **self._plain)
        for axis, value in sorted((goal for goal in wanted if goal[0] in _BY_KIND), key=repr):
            fixed = of_special(value) if axis == "special" else {axis: value}
            usual = {"layout": self._plain["layout"]} if "dy" in fixed else {}
            for case in [one for one in known if one.M > 1 or axis != "probe"][:3]:
                yield self.at(case, **{"probe": Depth.MEMORY, **usual, **fixed})

    def _beside(self, case: Case, wanted: Set[Any]) -> Iterator[Planned]:
        """Cases with one other parameter, layout or number."""
        for axis in (*PARAMETERS, "layout", "eps", "clips"):
            for value in self._design.axes.get(axis, ()):
                if (axis, value) in wanted or axis == "bias":
                    yield self.at(case, **{axis: value, "probe": Depth.MEMORY})

    @property
    def _plain(self) -> dict[str, Any]:
        return {"layout": self._claims.values("layout")[0], "probe": Depth.MEMORY}

    def _other_parameters(self) -> dict[str, Any]:
        """Parameters one of which no case had, else the simplest."""
        every = [dict(zip(PARAMETERS, own, strict=True)) for own in self._claims.parameters]
        new = (own for own in every if any(goal not in self._record.reached for goal in own.items()))
        return next(new, every[0])

    def _new_sizes(self, wanted: Set[Any]) -> list[Size]:
        """The new sizes that have most of what is wanted, the smaller ones first."""

        def told(size: Size) -> float:
            own = facets_of(size.M, size.N) | {(axis, size.axes[axis]) for axis in ("m", "n", "several")}
            return sum(map(weight, (own | {block_of(size.N)} if size.M > 1 < size.N else own) & wanted))

        new = (size for size in self._design.candidates if size.M and (size.M, size.N) not in self._record.shapes)
        return sorted(new, key=lambda size: (-told(size), size.M * size.N))[:_SIZES]

    def at(self, like: Case, size: Size | None = None, **fixed: Any) -> Planned:
        """A case at the place of another: its parameters, layout and size, if no other is given, and its numbers if
        these may be dear. No row runs alone if that may be dear, unless it is asked for.
        """
        held: dict[str, Any] = {axis: getattr(like, axis) for axis in (*PARAMETERS, "layout")}
        if self._prices.of("numbers") > self._prices.little:
            held |= {"eps": like.eps, "clips": tuple(value for _, value in like.options)}
        size = size or self._design.sizes.size(like.M, like.N)
        if len(ORDINARY) < size.M and "rows" not in fixed and "probe" in fixed:
            held["rows"] = "blend"  # what is new meets every kind of rows
        planned = self._design.filled(size, {**held, **fixed})
        dear = "probe" not in fixed and self._prices.building_of(planned) > self._prices.little
        return replace(planned, probe=Depth.MEMORY) if dear and planned.probe == Depth.ROWS else planned

    def special(self, first: Case) -> Iterator[Planned]:
        """Cases at the place of this one with the special values that are left there."""
        size = self._design.sizes.size(first.M, first.N)
        for value in self._design.axes["special"]:
            if self._design.lacks(size, value):
                yield self.at(first, None, **of_special(value), probe=Depth.MEMORY)


def of_special(value: str) -> dict[str, str]:
    """The kinds of rows and dy of a case with this value of the axis "special"."""
    if value.startswith("dy "):
        return {"dy": value.removeprefix("dy "), "rows": "shifted"}
    return {"rows": value, "dy": "normal"}
