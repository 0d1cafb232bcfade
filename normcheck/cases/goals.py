"""The goals of a core: the values of every axis, and the pairs of values, that it must cover for a kernel's claims."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from normcheck.cases.axes import (
    BANDS,
    CLIPS,
    COMMON_COLUMNS,
    COMMON_ROWS,
    EPS,
    FINE,
    LONGEST_OCTAVE,
    OCTAVES,
    OF_WEIGHT,
    ORDINARY,
    PAIRS,
    ROWS_OF_CLASS,
    SPECIAL,
    WHOLE,
    WIDTHS,
    WITHOUT_ROWS,
    Pair,
    Value,
    band_of,
    is_edge,
    key_of,
    octave_of,
    row_class,
)
from normcheck.cases.claims import Claims
from normcheck.cases.data_kinds import NOT_FINITE, dy_kinds, weight_kinds
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import EXPANDED, HEAD_SIZES, HEADS, OF_WEIGHTS

_FEW_HEADS = 6
"""Rows that are several tokens of several heads. If there are only heads, small cases have so many."""

Goals = frozenset[Value | Pair]
"""Values, and pairs of values, that a core must cover."""

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


@lru_cache(maxsize=8)
def goals(claims: Claims, extent: Extent, seed: int = 0) -> Goals:
    """The goals of a core; ``seed`` of the run."""
    sizes = sizes_of(claims, extent, seed)
    axes = axes_of(claims, sizes)
    values = {(axis, value) for axis, every in axes.items() for value in every}
    pairs = {
        (number, a, b)
        for number, (one, other) in enumerate(PAIRS)
        for a in axes.get(one, ())
        for b in axes.get(other, ())
        if _belongs(one, a, other, b, sizes, extent)
    }
    return frozenset(values | pairs)


def axes_of(claims: Claims, sizes: Sizes) -> Mapping[str, tuple[Any, ...]]:
    """Axis -> the values that a core must have."""
    heights = [m for own in sizes.heights.values() for m in own]
    widths = [n for own in sizes.widths.values() for n in own]
    columns = tuple(dict.fromkeys(map(key_of, widths)))
    axes: dict[str, tuple[Any, ...]] = {
        "M": tuple(heights),
        "N": tuple(widths),
        "m": tuple(dict.fromkeys(map(row_class, heights))),
        "n": columns,
        "width": tuple(dict.fromkeys(width for width, _ in columns)),
        "fit": tuple(dict.fromkeys(fit for _, fit in columns)),
        "whole": sizes.whole,
        "band": tuple(band for band in BANDS if band in map(band_of, heights)),
        "octave": tuple(dict.fromkeys(map(octave_of, widths))),
        "several": tuple(dict.fromkeys(n for m, n in sizes.every() if m > 1)),
        "layout": claims.values("layout"),
        "bias": claims.values("bias"),
        "weight_dtype": claims.values("weight_dtype"),
        "weights": weight_kinds(claims.op),
        "eps": claims.epsilons or EPS,
        "rows": ORDINARY,
        "dy": tuple(kind for kind in dy_kinds(claims.op, claims.dtype) if kind not in NOT_FINITE),
        "special": (*SPECIAL, *(f"dy {kind}" for kind in NOT_FINITE)),
        "probe": (Depth.MEMORY, Depth.ROWS),
    }
    if claims.op.quantises or not set(claims.values("layout")).difference(EXPANDED):  # then dy has no kind of its own
        axes |= {"dy": (), "special": SPECIAL}
    weight = claims.values("weight")
    if False in weight:
        axes["weight"] = weight
    if True not in weight:
        axes = {axis: values for axis, values in axes.items() if axis not in OF_WEIGHT}
    if claims.op.clamped:
        axes["clips"] = CLIPS
    axes |= claims.own
    if 0 in sizes.heights:
        axes["empty"] = tuple((axis, value) for axis in WITHOUT_ROWS for value in _without_rows(axis, claims, columns))
    if claims.shapes:
        axes["shape"] = sizes.shapes
    return axes


def _without_rows(axis: str, claims: Claims, columns: Sequence[tuple[int, str]]) -> Iterable[Any]:
    """The values that cases with M=0 must have of ``axis``, one of ``WITHOUT_ROWS``."""
    weight = claims.values("weight")
    if (axis == "weight" and False not in weight) or (axis in OF_WEIGHT and True not in weight):
        return ()
    return columns if axis == "n" else claims.values(axis)


def _belongs(one: str, a: Any, other: str, b: Any, sizes: Sizes, extent: Extent) -> bool:
    """Whether a pair of values is a goal: one case can have both, and the pair is worth a case."""
    pair = {one: a, other: b}
    if (one, other) in FINE and not extent.fine:
        return False
    if one == "n" and a[0] == WIDTHS[-1]:
        return False  # so long a row costs much: one N is enough
    rows = pair.get("m")
    if rows is not None and (not rows or rows > extent.paired_rows):
        return False
    if pair.get("probe") == Depth.ROWS and rows == 1:
        return False  # there are no other rows
    if "special" in pair:
        own = ("nan",) if "m" not in pair else ("nan", "inf", "dy nan")
        return pair["special"] in own and rows in (None, 2, 9, 64)
    if pair.get("layout") in EXPANDED and "dy" in pair:
        return False  # such a dy has no kind of its own
    if pair.get("layout") in OF_WEIGHTS and not pair.get("weight", True):
        return False  # without a weight there is nothing that could lie so
    if pair.get("layout") == HEADS and not sizes.shapes and not _of_heads(pair, sizes, extent):
        return False
    return (one, other) not in sizes.meeting or (a, b) in sizes.meeting[one, other]


def _of_heads(pair: Mapping[str, Any], sizes: Sizes, extent: Extent) -> bool:
    """Whether the size in a pair, if there is one, is one that heads have, or the class of one."""
    own = [n for widths in sizes.widths.values() for n in widths if n in HEAD_SIZES]
    keys = {key_of(n) for n in own}
    allowed: dict[str, set[Any]] = {"whole": set(own), "n": keys, "fit": {fit for _, fit in keys}}
    if not own or not all(pair[axis] in values for axis, values in allowed.items() if axis in pair):
        return False
    return "m" not in pair or min(sizes.heights[pair["m"]]) * min(own) <= extent.elements


def _shapes(claims: Claims) -> tuple[tuple[int, int], ...]:
    return tuple(shape for shape in claims.shapes if claims.admits("M", shape[0]) and claims.admits("N", shape[1]))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a core: M by class, N by ``key_of``; ``elements``: of a case, at most; ``shapes``: declared (M, N),
    or (). ``seed``: of the run.
    """

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


@lru_cache(maxsize=8)
def sizes_of(claims: Claims, extent: Extent, seed: int) -> Sizes:
    """The sizes of a core: the first ones of each class if ``seed`` is 0, else random ones of it.

    Each common one is always there, and of each octave the row that is one element shorter or longer than a block.
    """
    if claims.shapes:
        shapes = _shapes(claims)
        rows, columns = [m for m, _ in shapes], [n for _, n in shapes]
        heights = {low: tuple(dict.fromkeys(m for m in rows if row_class(m) == low)) for low in map(row_class, rows)}
        widths = {key: tuple(dict.fromkeys(n for n in columns if key_of(n) == key)) for key in map(key_of, columns)}
        return Sizes(heights, widths, extent.elements, seed, shapes)

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
    return Sizes({k: v for k, v in heights.items() if v}, widths, extent.elements, seed)
