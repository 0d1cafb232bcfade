"""The goals of a core: the values of every axis, and the pairs of values, that it must cover for a kernel's claims."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from normcheck.cases.axes import (
    CLIPS,
    COLUMN_CLASSES,
    EPS,
    FINE,
    OF_WEIGHT,
    ORDINARY,
    PAIRS,
    PROBES,
    ROW_CLASSES,
    SPECIAL,
    WITHOUT_ROWS,
    Pair,
    SizeClass,
    Value,
    column_class,
    row_class,
)
from normcheck.cases.case import EXPANDED, HEAD_SIZES, HEADS
from normcheck.cases.claims import Claims
from normcheck.cases.data_kinds import DY_KINDS, NOT_FINITE, RESIDUAL_KINDS, weight_kinds

_FEW_HEADS = 6
"""Rows that are several tokens of several heads. If there are only heads, most small cases have so many."""

Goals = frozenset[Value | Pair]
"""Values, and pairs of values, that a core must cover."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The extent of a core.

    ``rows``: the largest M; ``paired_rows``: the largest M that is paired with every value of every other axis;
    ``dear_rows``, ``dear_paired``: the same two for a kernel whose rows take long, such as an interpreted one;
    ``elements``: the largest M * N; ``heights``, ``widths``: how many sizes of each class of M and of N; ``fine``:
    whether it covers ``axes.FINE``.
    """

    rows: int
    paired_rows: int
    elements: int
    heights: int
    widths: int
    dear_rows: int
    dear_paired: int = 255
    fine: bool = True

    def on(self, device: str) -> Extent:
        """The extent on ``cpu`` or ``cuda``.

        On a GPU rows cost little, a grid has sides of at most 65535, and each new row length costs a compilation.
        """
        if device == "cpu":
            return self
        return replace(self, rows=max(self.rows, 65537), paired_rows=4096, widths=max(self.widths // 2, 1), fine=False)

    @property
    def with_costly_rows(self) -> Extent:
        """The extent for a kernel whose rows cost some time: few cases have the largest M."""
        return replace(self, paired_rows=min(self.paired_rows, 4096))

    @property
    def with_dear_rows(self) -> Extent:
        """The extent for a kernel whose rows take long."""
        return replace(self, rows=self.dear_rows, paired_rows=self.dear_paired)


@lru_cache(maxsize=64)
def goals(claims: Claims, extent: Extent, seed: int = 0, model_size: int = 0) -> Goals:
    """The goals of a core; ``seed`` of the run, ``model_size``: one N of ``axes.MODEL_SIZES``, 0 for none."""
    sizes = sizes_of(claims, extent, seed, model_size)
    axes = axes_of(claims, sizes)
    values = {(axis, value) for axis, every in axes.items() for value in every}
    pairs = {
        (number, a, b)
        for number, (one, other) in enumerate(PAIRS)
        for a in axes.get(one, ())
        for b in axes.get(other, ())
        if _belongs(one, a, other, b, sizes, extent)
        and not (claims.only_heads and one == "N")  # their N are of one class, and take turns
    }
    return frozenset(values | pairs)


def axes_of(claims: Claims, sizes: Sizes) -> Mapping[str, tuple[Any, ...]]:
    """Axis -> the values that a core must have."""
    heights = [m for own in sizes.heights.values() for m in own]
    widths = [n for own in sizes.widths.values() for n in own]
    columns = [column_class(n) for n in widths]
    axes: dict[str, tuple[Any, ...]] = {
        "M": tuple(heights),
        "N": tuple(widths),
        "m": tuple(dict.fromkeys(map(low_of, heights))),
        "n": tuple(dict.fromkeys((c.low, c.fit) for c in columns)),
        "width": tuple(dict.fromkeys(c.low for c in columns)),
        "fit": tuple(dict.fromkeys(c.fit for c in columns)),
        "layout": claims.values("layout"),
        "bias": claims.values("bias"),
        "weight_dtype": claims.values("weight_dtype"),
        "weights": weight_kinds(claims.op),
        "eps": claims.epsilons or EPS,
        "rows": ORDINARY,
        "dy": tuple(kind for kind in DY_KINDS if kind not in NOT_FINITE),
        "special": (*SPECIAL, *(f"dy {kind}" for kind in NOT_FINITE)),
        "probe": PROBES[1:],
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
    if claims.op.adds_residual:
        axes |= {"residual": RESIDUAL_KINDS, "residual_dtype": claims.values("residual_dtype")}
    if claims.op.quantises:
        axes["scale"] = claims.scales
    if 0 in sizes.heights:
        axes["empty"] = tuple((axis, value) for axis in WITHOUT_ROWS for value in _without_rows(axis, claims, columns))
    if claims.shapes:
        axes["shape"] = sizes.shapes
    return axes


def _without_rows(axis: str, claims: Claims, columns: Sequence[SizeClass]) -> Iterable[Any]:
    """The values that cases with M=0 must have of ``axis``, one of ``WITHOUT_ROWS``."""
    weight = claims.values("weight")
    if (axis == "weight" and False not in weight) or (axis in OF_WEIGHT and True not in weight):
        return ()
    return dict.fromkeys((c.low, c.fit) for c in columns) if axis == "n" else claims.values(axis)


def _belongs(one: str, a: Any, other: str, b: Any, sizes: Sizes, extent: Extent) -> bool:
    """Whether a pair of values is a goal: one case can have both, and the pair is worth a case."""
    pair = {one: a, other: b}
    if (one, other) in FINE and not extent.fine:
        return False
    if "N" in pair and pair["N"] != sizes.widths[key_of(pair["N"])][0]:
        return False
    rows = pair.get("m")
    if rows is not None and (not rows or rows > extent.paired_rows):
        return False
    if pair.get("probe") == "rows" and rows == 1:
        return False  # there are no other rows
    if "special" in pair:
        own = ("nan",) if "n" in pair else ("nan", "inf", "dy nan")
        return pair["special"] in own and rows in (None, 2, 9, 64)
    if pair.get("layout") in EXPANDED and "dy" in pair:
        return False  # such a dy has no kind of its own
    if pair.get("layout") == HEADS and not sizes.shapes and not _of_heads(pair, sizes, extent):
        return False
    if (one, other) == ("m", "n"):
        return _fit_together(a, b, sizes, extent)
    return True


def _of_heads(pair: Mapping[str, Any], sizes: Sizes, extent: Extent) -> bool:
    """Whether the size in a pair, if there is one, is one that heads have, or the class of one."""
    own = [n for widths in sizes.widths.values() for n in widths if n in HEAD_SIZES]
    keys = {key_of(n) for n in own}
    allowed: dict[str, set[Any]] = {"N": set(own), "width": {low for low, _ in keys}, "fit": {fit for _, fit in keys}}
    if not own or not all(pair[axis] in values for axis, values in allowed.items() if axis in pair):
        return False
    return "m" not in pair or min(sizes.heights[pair["m"]]) * min(own) <= extent.elements


def _fit_together(low: int, column: tuple[int, str], sizes: Sizes, extent: Extent) -> bool:
    """Whether a core has a size of this class of rows and this class of columns."""
    if sizes.shapes:
        return any((low_of(m), key_of(n)) == (low, column) for m, n in sizes.shapes)
    return min(sizes.heights[low]) * min(sizes.widths[column]) <= extent.elements


def _shapes(claims: Claims) -> tuple[tuple[int, int], ...]:
    return tuple(shape for shape in claims.shapes if claims.admits("M", shape[0]) and claims.admits("N", shape[1]))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a core: M by ``low_of`` its class, N by ``key_of`` its class; ``shapes``: declared (M, N), or ()."""

    heights: Mapping[int, tuple[int, ...]]
    widths: Mapping[tuple[int, str], tuple[int, ...]]
    shapes: tuple[tuple[int, int], ...] = ()

    def every(self) -> Sequence[tuple[int, int]]:
        """Each (M, N) that a case of the core may have."""
        heights = [m for own in self.heights.values() for m in own]
        return self.shapes or [(m, n) for m in heights for own in self.widths.values() for n in own]


@lru_cache(maxsize=8)
def sizes_of(claims: Claims, extent: Extent, seed: int, model_size: int) -> Sizes:
    """The sizes of a core: the first ones of each class if ``seed`` is 0, else random ones of it."""
    if claims.shapes:
        shapes = _shapes(claims)
        rows, columns = [m for m, _ in shapes], [n for _, n in shapes]
        heights = {low: tuple(dict.fromkeys(m for m in rows if row_class(m).low == low)) for low in map(low_of, rows)}
        widths = {key: tuple(dict.fromkeys(n for n in columns if key_of(n) == key)) for key in map(key_of, columns)}
        return Sizes(heights, widths, shapes)

    def some(every: SizeClass, axis: str, most: int, limit: int) -> tuple[int, ...]:
        sizes = list(every.sizes)
        if seed:
            random.Random(f"{seed} {axis} {every}").shuffle(sizes)
        return tuple([size for size in sizes if size <= limit and claims.admits(axis, size)][:most])

    tallest = min(extent.rows, extent.elements // min(HEAD_SIZES)) if claims.only_heads else extent.rows
    heights = {c.low: some(c, "M", extent.heights, tallest) for c in ROW_CLASSES}
    most = len(HEAD_SIZES) if claims.only_heads else extent.widths
    widths = {(c.low, c.fit): some(c, "N", most, extent.elements) for c in COLUMN_CLASSES}
    if claims.only_heads:
        few = low_of(_FEW_HEADS)
        heights[few] = (_FEW_HEADS, *heights[few]) if claims.admits("M", _FEW_HEADS) else heights[few]
        widths = {key: tuple(n for n in own if n in HEAD_SIZES) for key, own in widths.items()}
    elif model_size and claims.admits("N", model_size):
        widths[key_of(model_size)] = (*widths[key_of(model_size)], model_size)
    return Sizes({k: v for k, v in heights.items() if v}, {k: v for k, v in widths.items() if v})


def low_of(rows: int) -> int:
    """The class of an M as a value of an axis: its smallest M."""
    return row_class(rows).low


def key_of(columns: int) -> tuple[int, str]:
    """The class of an N as a value of an axis: its smallest N, and its fit."""
    size_class = column_class(columns)
    return size_class.low, size_class.fit
