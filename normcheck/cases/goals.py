"""The goals of a core: the values of every axis, and the pairs of values, that it must cover for a kernel's claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from normcheck.cases.axes import (
    BANDS,
    CLIPS,
    EPS,
    FINE,
    OF_WEIGHT,
    ORDINARY,
    PAIRS,
    SPECIAL,
    WIDTHS,
    WITHOUT_ROWS,
    Pair,
    Value,
    band_of,
    key_of,
    octave_of,
    row_class,
)
from normcheck.cases.claims import Claims
from normcheck.cases.data_kinds import NOT_FINITE, dy_kinds, weight_kinds
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import EXPANDED, HEAD_SIZES, HEADS, OF_WEIGHTS
from normcheck.cases.sizes import Extent, Sizes, sizes_of

Goals = frozenset[Value | Pair]
"""Values, and pairs of values, that a core must cover."""


@lru_cache(maxsize=8)
def goals(claims: Claims, extent: Extent, seed: int = 0) -> Goals:
    """The goals of a core; ``seed`` of the run."""
    sizes = sizes_of(claims, extent, seed)
    axes = axes_of(sizes)
    values = {(axis, value) for axis, every in axes.items() for value in every}
    pairs = {
        (number, a, b)
        for number, (one, other) in enumerate(PAIRS)
        for a in axes.get(one, ())
        for b in axes.get(other, ())
        if _belongs(one, a, other, b, sizes, extent)
    }
    return frozenset(values | pairs)


def axes_of(sizes: Sizes) -> Mapping[str, tuple[Any, ...]]:
    """Axis -> the values that a core must have."""
    claims = sizes.claims
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
