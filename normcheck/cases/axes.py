"""The axes of a case, and which of their values and pairs of values a case covers.

A kernel branches on few things: which block holds a row, whether a row is one block or several, whether a tail is left,
how many rows a program takes, which strides it gets. So sizes fall into classes. One N of every width meets every value
of every other axis; so do all N of a width and a fit together; every octave of N, with its fit, meets one row, a few
and several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE, ROWS, SPECIAL_ROWS
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import EXPANDED, OF_WEIGHTS
from normcheck.cases.op import RELU6
from normcheck.cases.ops import OPS

Value = tuple[str, Any]
"""An axis, and one of its values."""

Pair = tuple[int, Any, Any]
"""An index into PAIRS, and a value of each of its two axes."""

EPS = (1e-5, 1e-3, 1e-1, 1e-6, 1e-8, 0.5, 1e-12)
CLIPS = (RELU6, (0.0, 1.0), (-1.0, 1.0), (-0.5, 2.0))
"""Limits of a clamped op, exact in every dtype: for others, conventions differ on whether the limit is rounded."""

MODEL_SIZES = (
    *(896, 1280, 2304, 2560, 2816, 2880, 3072, 3584, 3840, 4608, 5120, 5376, 6144, 6656, 7168, 11008, 12288, 14336),
)
"""Hidden sizes of well-known models."""

MODEL_POWERS = (4096, 1024, 2048, 512, 8192, 256)
"""The N of most models, those of the most first: what fills its block may have a path of its own."""

NO_END = 1 << 62
ROUND, EVEN, RAGGED = "a power of two", "a multiple of 8", "no multiple of 8"

ROWS_OF_CLASS: Mapping[int, tuple[int, ...]] = {
    0: (0,),
    1: (1,),
    2: (2, 5, 3, 8, 4, 7, 6),
    9: (33, 20, 9, 17, 31, 24, 32, 50),
    64: (65, 129, 100, 133, 128, 64, 200),
    256: (300, 257, 1061, 600, 2049, 513, 1000),
    4097: (5000, 4097, 8193),
    65536: (70001,),
}
"""The smallest M of each class of M -> the M that a core may have of it; the first ones find the most faults."""

BANDS, BANDS_END = (1, 2, 9), 300
"""The smallest M of the classes of few rows that every class of N meets: one row, a few, several blocks of rows."""

WIDTHS = (1, 2, 64, 1024, 4097, 32769)
"""The smallest N of each width: one column, part of a block, a block, a few, many, more than many a kernel holds."""

WHOLE = (1, 7, 768, 1025, 8200, 40001)
"""The N of each of WIDTHS at which every value of the other axes is met, unless a seed or a kernel wants another."""

LONGEST_OCTAVE = 1 << 17

COMMON_ROWS = (2, 9)
"""M of every core: a few rows and several, no more, so that they may be long."""

COMMON_COLUMNS = (
    64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 7168, 8192,
    32769, 40001, 53248, 65537, 65544, 131072,
    50, 60, 250, 100, 1100, 2050, 6002, 10004,
)  # fmt: skip
"""N of every core: the sizes that people run, rows that are longer than what a kernel may hold at once, and of each way
to end a row that is even, but no multiple of 8: a vector of two or four elements may have a path of its own.
"""

_COLUMNS = (
    *(1, 2, 4, 3, 8, 7, 5, 6, 16, 9, 15, 11, 13, 24, 32, 17, 31, 19, 30, 40, 48, 56, 64, 33, 63, 50, 60),
    *(96, 120, 72, 104, 128, 65, 127, 100, 98, 192, 160, 200, 136, 256, 129, 255, 132, 250),
    *(384, 320, 264, 448, 512, 257, 511, 300, 500, 768, 640, 1000, 896, 520, 1024, 513, 1023, 1003, 601),
    *(1536, 1152, 1280, 1600, 2040, 2048, 1025, 2047, 1500, 1100),
    *(2560, 3072, 2304, 2520, 2816, 3000, 3584, 4096, 2049, 4095, 3001, 2050),
    *(5120, 7168, 6144, 5000, 8184, 8192, 4097, 8191, 5001, 6002),
    *(8200, 12288, 10000, 11008, 14336, 16384, 8193, 16383, 10007, 12345, 10004),
    *(20000, 24576, 16392, 30000, 32768, 16385, 32767, 20001, 30003),
    *(53248, 40960, 32776, 50000, 65536, 32769, 65535, 40001, 53250),
    *(65544, 100000, 98304, 131072, 65537, 131071, 100001, 70002),
)
"""The N that a core may have; of each class those that find the most faults come first."""


@lru_cache(maxsize=1024)
def row_class(rows: int) -> int:
    """The class of an M: its smallest M."""
    return max(low for low in ROWS_OF_CLASS if low <= rows)


@lru_cache(maxsize=1024)
def band_of(rows: int) -> int:
    """The one of BANDS to which an M belongs, 0 for no rows and for more than BANDS_END."""
    return max((low for low in BANDS if low <= rows <= BANDS_END), default=0)


def fit_of(columns: int) -> str:
    """The fit of rows of this length: how they fill blocks and vectors."""
    if columns > 1 and columns & (columns - 1) == 0:
        return ROUND
    return RAGGED if columns % 8 else EVEN


def width_of(columns: int) -> int:
    """The one of WIDTHS to which an N belongs."""
    return max(low for low in WIDTHS if low <= columns)


@lru_cache(maxsize=1024)
def key_of(columns: int) -> tuple[int, str]:
    """The width of an N and its fit: what is paired with every other axis."""
    return width_of(columns), fit_of(columns)


@lru_cache(maxsize=1024)
def octave_of(columns: int) -> tuple[int, str]:
    """The class of an N: the block that holds such a row, 2^k for N from 2^(k-1) + 1 to 2^k, and the fit.

    N above LONGEST_OCTAVE belong to that octave.
    """
    return min(1 << (columns - 1).bit_length(), LONGEST_OCTAVE), fit_of(columns)


def is_edge(columns: int) -> bool:
    """Whether an N is one below or one above a power of two."""
    return columns > 4 and ROUND in (fit_of(columns - 1), fit_of(columns + 1))


OCTAVES: Mapping[tuple[int, str], tuple[int, ...]] = {
    octave: tuple(n for n in _COLUMNS if octave_of(n) == octave) for octave in map(octave_of, _COLUMNS)
}
"""Each class of N -> the N that a core may have of it."""


ORDINARY = tuple(ROWS)
"""Kinds of rows whose outputs are judged by value. The kind "blend" mixes them all."""

SPECIAL = tuple(SPECIAL_ROWS)
"""Kinds of rows with NaN, infinities, the largest number or signed zeros."""

PAIRS = (
    ("n", "layout"), ("n", "dy"), ("n", "rows"), ("n", "bias"), ("n", "weight_dtype"), ("n", "probe"),
    ("m", "n"), ("m", "layout"), ("m", "bias"), ("m", "weight_dtype"), ("m", "dy"), ("m", "probe"),
    ("whole", "layout"), ("whole", "dy"), ("whole", "rows"), ("whole", "bias"), ("whole", "weight_dtype"),
    ("whole", "probe"), ("whole", "eps"), ("whole", "weights"), ("whole", "clips"), ("whole", "special"),
    ("fit", "layout"), ("fit", "special"),
    ("layout", "bias"), ("layout", "weight_dtype"), ("layout", "dy"), ("layout", "rows"), ("layout", "probe"),
    ("bias", "weight_dtype"), ("bias", "weights"), ("bias", "dy"), ("bias", "probe"), ("bias", "rows"),
    ("weight_dtype", "weights"), ("weight_dtype", "dy"), ("weight_dtype", "probe"), ("weight_dtype", "rows"),
    ("eps", "rows"), ("eps", "layout"), ("clips", "weights"), ("clips", "bias"), ("dy", "rows"),
    ("m", "special"),
    ("n", "residual"), ("m", "residual"), ("layout", "residual"), ("residual", "rows"), ("residual", "probe"),
    ("n", "residual_dtype"), ("layout", "residual_dtype"), ("residual_dtype", "residual"),
    ("weight_dtype", "residual_dtype"), ("n", "scale"), ("m", "scale"), ("scale", "rows"), ("scale", "weights"),
    ("scale", "layout"), ("scale", "probe"), ("scale", "eps"),
    ("n", "weight"), ("m", "weight"), ("layout", "weight"), ("weight", "dy"), ("weight", "probe"), ("weight", "rows"),
    ("clips", "weight"), ("band", "octave"),
    ("n", "gate"), ("m", "gate"), ("layout", "gate"), ("gate", "rows"), ("gate", "dy"), ("gate", "eps"),
    ("gate", "probe"), ("weight_dtype", "gate"), ("weight", "gate"),
    ("n", "samples"), ("m", "samples"), ("layout", "samples"), ("samples", "rows"), ("samples", "dy"),
    ("samples", "probe"), ("samples", "weights"), ("weight_dtype", "samples"),
    ("n", "channels"), ("layout", "channels"), ("channels", "groups"), ("channels", "dy"), ("channels", "probe"),
    ("n", "groups"), ("m", "groups"), ("layout", "groups"), ("groups", "rows"), ("groups", "dy"), ("groups", "probe"),
    ("groups", "weights"), ("weight_dtype", "groups"),
    ("n", "head"), ("layout", "head"), ("head", "kv_heads"), ("head", "rotary"), ("m", "head"), ("m", "kv_heads"),
    ("layout", "rotary"), ("rotary", "angles"), ("kv_heads", "rotary"), ("layout", "angles"), ("m", "angles"),
    ("weight_dtype", "angles"), ("weight_dtype", "rotary"), ("angles", "rows"), ("angles", "dy"), ("head", "probe"),
    ("head", "angles"), ("weight_dtype", "head"),
)  # fmt: skip
"""The axes whose values must meet in some case. "m" is a class of M, "band" one of BANDS; "whole" is one N of each
width, as in WHOLE, "n" a width and a fit, "octave" a class of OCTAVES; "special" is one of SPECIAL, or a
kind of dy that is not finite."""

FINE = (("n", "layout"), ("n", "dy"))
"""Pairs that a core leaves out if each new N costs a compilation, as on a GPU."""

WITHOUT_ROWS = ("n", "layout", "weight", "bias", "weight_dtype")
"""The axes that cases with M=0 vary: a value of the axis "empty" is one of these axes with one of its values."""


def covered(case: Case, probe: Depth) -> Mapping[str, tuple[Any, ...]]:
    """Axis -> the values that ``case`` covers, if it is probed as far as ``probe``.

    A case without rows, or with special values, covers few axes: such a case shows little about the others. One without
    a weight covers no value of the axes that say more of a weight.
    """
    m, (width, fit), op = row_class(case.M), key_of(case.N), OPS[case.op]
    parameters = {axis: (value,) * case.weight for axis, value in of_weight(case)}
    if not case.M:
        values = {"n": ((width, fit),), "layout": (case.layout,), "weight": (case.weight,), **parameters}
        return {"M": (0,), "m": (0,), "empty": tuple((axis, v) for axis in WITHOUT_ROWS for v in values[axis])}
    classes = {"m": (m,), "n": ((width, fit),), "width": (width,), "fit": (fit,), "whole": (case.N,)}
    special = tuple(dict.fromkeys([case.rows] * (case.rows in SPECIAL) + [f"dy {case.dy}"] * (case.dy in NOT_FINITE)))
    if special:
        return {**classes, "special": special}
    return {
        **classes,
        "M": (case.M,),
        "N": (case.N,),
        "several": (case.N,) * (case.M > 1),
        "band": (band_of(case.M),) if band_of(case.M) else (),
        "octave": (octave_of(case.N),),
        "shape": ((case.M, case.N),),
        "layout": (case.layout,) if case.weight or case.layout not in OF_WEIGHTS else (),
        "rows": ORDINARY[: case.M] if case.rows == "blend" else (case.rows,),
        "dy": () if case.layout in EXPANDED or op.quantises else (case.dy,),
        "weight": (case.weight,),
        **parameters,
        "eps": (case.eps,),
        "clips": (tuple(value for _, value in case.options),) if case.options else (),
        **{axis: (getattr(case, axis),) for axis in op.axes},
        "probe": (probe,),
    }


OF_WEIGHT = ("bias", "weight_dtype", "weights")
"""The axes that only cases with a weight have."""


def of_weight(case: Case) -> Iterator[Value]:
    """Each axis of OF_WEIGHT with the value of ``case``."""
    for axis in OF_WEIGHT:
        yield axis, getattr(case, axis)


def values_of(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[Value]:
    """Every value in ``axes``, as ``covered`` returns them."""
    for axis, values in axes.items():
        for value in values:
            yield axis, value


def pairs_of(axes: Mapping[str, tuple[Any, ...]]) -> list[Pair]:
    """Every pair of PAIRS in ``axes``, as ``covered`` returns them."""
    return [(i, a, b) for i, one, other in _pairs_among(tuple(axes)) for a in axes[one] for b in axes[other]]


@cache
def _pairs_among(axes: tuple[str, ...]) -> tuple[tuple[int, str, str], ...]:
    """The number of each pair of PAIRS whose two axes are among these, and the two."""
    return tuple((i, one, other) for i, (one, other) in enumerate(PAIRS) if one in axes and other in axes)


def parts_of(goal: Value | Pair) -> tuple[Value, ...]:
    """The values of a goal: itself, or the two of a pair."""
    if len(goal) == 2:
        return (goal,)
    number, *values = goal
    return tuple(zip(PAIRS[number], values, strict=True))
