"""The sizes of a core: how far it extends, which M and N it chooses among, and which stands in place of another."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from normcheck.cases.axes import (
    COMMON_COLUMNS,
    COMMON_ROWS,
    LONGEST_OCTAVE,
    OCTAVES,
    PAIRS,
    ROWS_OF_CLASS,
    WHOLE,
    band_of,
    is_edge,
    key_of,
    octave_of,
    row_class,
)
from normcheck.cases.claims import Claims
from normcheck.cases.layouts import HEAD_SIZES, HEADS
from normcheck.cases.planned import Size

_FEW_HEADS = 6
"""Rows that are several tokens of several heads. If there are only heads, small cases have so many."""

_HEADS_IN_TURN = (64, 128, 256)

_OF_SIZES = tuple((PAIRS.index((one, other)), one, other) for one, other in (("m", "n"), ("band", "octave")))
_CASE_COST_ROWS = 12
"""The fixed cost of a case, in rows of an interpreted kernel."""

_DEAR_COLUMNS = 20000
"""The largest N of a kernel whose columns take long."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The extent of a core.

    ``rows``: the largest M; ``paired_rows``: the largest M that is paired with every value of every other axis;
    ``dear_rows``, ``dear_paired``: the same two for a kernel whose rows take long, such as an interpreted one;
    ``elements``: the largest M * N; ``columns``: the largest N; ``heights``, ``widths``: how many sizes of each class
    of M and of each octave of N, or as many as are common ones; ``fine``: whether another N costs little, so that the
    core covers ``axes.FINE``.
    """

    rows: int
    paired_rows: int
    elements: int
    heights: int
    widths: int
    dear_rows: int
    dear_paired: int = 255
    columns: int = LONGEST_OCTAVE
    fine: bool = True

    def on(self, device: str) -> Extent:
        """The extent on ``cpu`` or ``cuda``.

        On a GPU rows cost little, a grid has sides of at most 65535, and each new row length costs a compilation.
        """
        if device == "cpu":
            return self
        return replace(self, rows=max(self.rows, 70001), paired_rows=4096, widths=max(self.widths // 2, 1), fine=False)

    @property
    def with_costly_rows(self) -> Extent:
        """The extent for a kernel whose rows cost some time: few cases have the largest M."""
        return replace(self, paired_rows=min(self.paired_rows, 4096))

    @property
    def with_dear_rows(self) -> Extent:
        """The extent for a kernel whose rows take long."""
        return replace(self, rows=self.dear_rows, paired_rows=self.dear_paired)

    @property
    def with_dear_columns(self) -> Extent:
        """The extent for a kernel whose columns take long."""
        return replace(self, columns=min(self.columns, _DEAR_COLUMNS), fine=False)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a core for these ``claims``: M by class, N by ``key_of``; ``elements``: of a case, at most;
    ``shapes``: declared (M, N), or (). ``seed``: of the run.
    """

    claims: Claims
    heights: Mapping[int, tuple[int, ...]]
    widths: Mapping[tuple[int, str], tuple[int, ...]]
    elements: int
    seed: int
    shapes: tuple[tuple[int, int], ...] = ()

    def every(self) -> Sequence[tuple[int, int]]:
        """Each (M, N) that a case of the core may have."""
        heights = [m for own in self.heights.values() for m in own]
        every = ((m, n) for m in heights for own in self.widths.values() for n in own)
        return self.shapes or [(m, n) for m, n in every if m * n <= self.elements]

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The N of each width at which every value of the other axes is met."""
        return tuple(self._whole(width) for width in dict.fromkeys(width for width, _ in self.widths))

    def _whole(self, width: int) -> int:
        own = [n for (low, _), columns in self.widths.items() for n in columns if low == width]
        usual = [n for n in WHOLE if n in own]
        return random.Random(f"{self.seed} {width}").choice(own) if self.seed or not usual else usual[0]

    @cached_property
    def meeting(self) -> Mapping[tuple[str, str], Set[tuple[Any, Any]]]:
        """Two axes, of M and of N -> the pairs of their values that a case of the core may have."""
        every = self.every()
        return {
            ("m", "n"): {(row_class(m), key_of(n)) for m, n in every},
            ("band", "octave"): {(band_of(m), octave_of(n)) for m, n in every},
        }

    @cached_property
    def candidates(self) -> Sequence[Size]:
        """Every size, in an order of the seed."""
        pairs = list(self.every())
        if self.seed:
            random.Random(f"{self.seed} sizes").shuffle(pairs)
        return [self.size(m, n) for m, n in pairs]

    def size(self, m: int, n: int) -> Size:
        """The size of so many rows and columns."""
        width, fit = key_of(n)
        axes: dict[str, Any] = {"M": m, "N": n, "m": row_class(m), "n": (width, fit), "width": width, "fit": fit}
        axes |= {"whole": n, "band": band_of(m), "octave": octave_of(n), "several": n if m > 1 else 0, "shape": (m, n)}
        cost = _CASE_COST_ROWS + (m + m * (n == 1)) + m * n / 4000  # one column shows few faults, so it counts twice
        pairs = [(number, axes[one], axes[other]) for number, one, other in _OF_SIZES]
        together = (*pairs, ("shape", (m, n)), ("several", axes["several"]))
        return Size(M=m, N=n, axes=axes, cost=cost, together=together)

    def known(self, m: int, n: int) -> bool:
        """Whether this core has sizes of the classes of m and n."""
        return row_class(m) in self.heights and key_of(n) in self.widths

    def exactly(self, m: int, n: int, number: int) -> Size | None:
        """The size (m, n), or one like it if this core has declared sizes, or no others of its classes."""
        allowed = self.claims.admits("M", m) and self.claims.admits("N", n)
        if self.claims.shapes or not (self.known(m, n) and allowed and self.claims.fits(HEADS, n)):
            return self.like(m, n, number)
        return self.size(m, n)

    def like(self, m: int, n: int, number: int) -> Size | None:
        """The size in place of (m, n) in the case of this ``number``; None if all sizes of its class were refused."""
        if self.claims.shapes:
            return self.candidates[number % len(self.candidates)] if m and self.candidates else None
        if self.claims.columns > 1:  # no N but its multiples
            n = min((own for widths in self.widths.values() for own in widths), key=lambda own: abs(own - n))
        rows, columns = self.heights.get(row_class(m), ()), self.widths.get(key_of(n), ())
        if not rows or not columns:
            return None
        alike = [own for own in columns if octave_of(own) == octave_of(n)] or columns
        height = self._in_place_of(m, rows, ROWS_OF_CLASS[row_class(m)])
        return self.size(height, self._in_place_of(n, alike, OCTAVES[octave_of(n)]))

    def _in_place_of(self, size: int, own: Sequence[int], every: Sequence[int]) -> int:
        """The one of its ``own`` sizes at the place that ``size`` has among ``every`` of its class.

        Without a seed of the run it is ``size`` itself, if this core has it.
        """
        return (
            size if size in own and not self.seed else own[min(every.index(size) if size in every else 0, len(own) - 1)]
        )

    def in_turn(self, size: Size, number: int) -> Size:
        """``size``; if there are only heads, its M with another N at each turn."""
        n = _HEADS_IN_TURN[number % len(_HEADS_IN_TURN)]
        known = (size.M, n) in {(s.M, s.N) for s in self.candidates} if self.claims.only_heads else False
        return self.size(size.M, n) if known else size


@lru_cache(maxsize=8)
def sizes_of(claims: Claims, extent: Extent, seed: int) -> Sizes:
    """The sizes of a core: the first ones of each class if ``seed`` is 0, else random ones of it.

    Each common one is always there, and of each octave the row that is one element shorter or longer than a block.
    """
    if claims.shapes:
        shapes = tuple(own for own in claims.shapes if claims.admits("M", own[0]) and claims.admits("N", own[1]))
        rows, columns = [m for m, _ in shapes], [n for _, n in shapes]
        heights = {low: tuple(dict.fromkeys(m for m in rows if row_class(m) == low)) for low in map(row_class, rows)}
        widths = {key: tuple(dict.fromkeys(n for n in columns if key_of(n) == key)) for key in map(key_of, columns)}
        return Sizes(claims, heights, widths, extent.elements, seed, shapes)

    def some(axis: str, own: Sequence[int], most: int, limit: int, common: Sequence[int]) -> tuple[int, ...]:
        sizes = [size for size in own if size <= limit and claims.admits(axis, size)]
        if seed:
            random.Random(f"{seed} {axis} {own}").shuffle(sizes)
        first = [size for size in sizes if size in common or size == next(filter(is_edge, sizes), 0)]
        chosen = [*first, *(size for size in sizes if size not in first)][: max(most, len(first))]
        return tuple(size for size in sizes if size in chosen)

    longest = min(extent.columns, extent.elements)
    of_groups = {n: octave_of(n) for n in claims.multiples}
    every = (
        (*own, *(n for n in of_groups if of_groups[n] == octave and n not in own)) for octave, own in OCTAVES.items()
    )
    octaves = [some("N", own, extent.widths, longest, COMMON_COLUMNS) for own in every]
    columns = [n for own in octaves for n in own]
    narrowest = min(HEAD_SIZES) if claims.only_heads else min(columns, default=claims.columns)  # that is not refused
    tallest = min(extent.rows, extent.elements // max(narrowest, claims.columns))
    heights = {low: some("M", own, extent.heights, tallest, COMMON_ROWS) for low, own in ROWS_OF_CLASS.items()}
    if claims.only_heads:
        few = row_class(_FEW_HEADS)
        heights[few] = (_FEW_HEADS,) if claims.admits("M", _FEW_HEADS) else heights[few]
        columns = [n for n in HEAD_SIZES if claims.admits("N", n)]
    widths = {key: tuple(n for n in columns if key_of(n) == key) for key in map(key_of, columns)}
    return Sizes(claims, {k: v for k, v in heights.items() if v}, widths, extent.elements, seed)
