"""Cases drawn from choices: an endless sequence for a sweep, and a Hypothesis strategy for shrinking.

Each list of values is simplest first, because shrinking goes towards its front. Only numbers and names are drawn, never
tensor elements: that is fast, and a failure shrinks to a small M and N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from typing import Any, TypeVar

from hypothesis import strategies as st

from normcheck.cases.axes import CLIPS, EPS, MODEL_SIZES
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import Claims
from normcheck.cases.data_kinds import ROW_KINDS, dy_kinds, weight_kinds
from normcheck.cases.layouts import HEADS, STRIDED, head_size_near
from normcheck.cases.tensor_names import GROUPS, RESIDUAL, SCALE

T = TypeVar("T")

SIZES_M = (*range(1, 10), 15, 16, 17, 31, 32, 33, 64, 65, 100, 133, 257, 600, 1000, 1061, 2049, 4097)
_LONG = (600, 768, 1000, 1003, 1025, 1024, 1152, 1536, 1600, 2049, 2520, 3584, 4097, 4096, 8191, 8200, 16385, 16384)
SIZES_N = (
    *(*range(1, 20), 24, 31, 32, 33, 40, 63, 64, 65, 96, 100, 127, 129, 128, 132, 160, 255, 257, 256, 300, 513),
    *(*_LONG, 20000, *MODEL_SIZES),
)
GAPS = (1, 3, 8, 64)
HEAD_GAPS = (0, 0, 8, 0, 64)
ELEMENTS = (4096, 4096, 4096, 32768)
"""The largest M * N of a drawn case, to which M is cut."""
_ALWAYS_DRAWN = (RESIDUAL, SCALE)
"""Inputs of which something is drawn for every op, so that a seed gives the cases that it always gave."""

ORIGINAL_WEIGHT = 3
"""How often a failing case's own value is listed among simpler ones when a smaller case is searched."""

Values = tuple[Mapping[str, Any], ...]
"""What one field of a case, or several together, may be, simplest first."""


@dataclass(frozen=True)
class Choices:
    """The values that the fields of a drawn case may have. ``shapes``: M and N together; if there are none, they come
    from ``m`` and ``n``, and M is cut to one of ``elements``. ``kinds``: those of all other fields but the seed, which
    is 0 to ``seeds``.
    """

    op: str
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    elements: tuple[int, ...]
    kinds: tuple[Values, ...]
    seeds: int


def choices(claims: Claims, *, seeds: int = 999) -> Choices:
    """Every value that these claims admit; seeds are 0 to ``seeds``."""
    op, own, weight = claims.op, claims.values("layout"), claims.values("weight")
    layouts = [(name, 0) for name in own if name not in (*STRIDED, HEADS)]
    layouts += [(name, gap) for gap in GAPS for name in own if name in STRIDED]
    layouts += [(HEADS, gap) for gap in HEAD_GAPS if HEADS in own]
    layouts = [*[layouts[0]] * 4, *layouts, *[("rank3", 0)] * 2 * ("rank3" in own)]
    of_weights = product(claims.values("weight_dtype"), weight_kinds(op), claims.values("bias"))
    parameters = [(NO_WEIGHT, "same", bias) for bias in claims.lone_biases if False in weight]
    parameters += [(kind, dtype, bias) for dtype, kind, bias in of_weights if True in weight]
    by_name = (*_ALWAYS_DRAWN, *(name for name in op.by_name if name not in _ALWAYS_DRAWN), *[GROUPS] * op.grouped)
    of_inputs = [op.axes_of(name)[::-1] for name in by_name]
    return Choices(
        op=op.name,
        dtype=claims.dtype,
        shapes=tuple(s for s in claims.shapes if claims.admits("M", s[0]) and claims.admits("N", s[1])),
        m=tuple(m for m in SIZES_M if claims.admits("M", m)),
        n=tuple(n for n in (*SIZES_N, *claims.multiples) if claims.admits("N", n)),
        elements=ELEMENTS,
        kinds=(
            _together(("rows",), zip(ROW_KINDS)),
            _together(("dy",), zip(dy_kinds(op, claims.dtype))),
            _together(("eps",), zip(claims.epsilons or EPS)),
            _together(("weights", "weight_dtype", "bias"), parameters),
            _together(("layout", "gap"), layouts),
            _together(("options",), zip(map(op.clips, CLIPS if op.clamped else ((),)))),
            *(_together(axes, product(*(claims.own[axis] for axis in axes))) for axes in of_inputs),
        ),
        seeds=seeds,
    )


def _together(axes: Sequence[str], values: Iterable[tuple[Any, ...]]) -> Values:
    return tuple(dict(zip(axes, own, strict=True)) for own in values)


def within(every: Choices, case: Case) -> Choices:
    """The choices at most as complex as the values of ``case``, with those values ORIGINAL_WEIGHT times."""
    return replace(
        every,
        shapes=tuple(s for s in every.shapes if s[0] <= case.M and s[1] <= case.N),
        m=(*(m for m in every.m if m < case.M), *[case.M] * ORIGINAL_WEIGHT),
        n=(*sorted(n for n in every.n if n < case.N), *[case.N] * ORIGINAL_WEIGHT),
        elements=(case.M * case.N,),
        kinds=tuple(_up_to(values, own_of(case, values)) for values in every.kinds),
        seeds=case.seed,
    )


def own_of(case: Case, values: Values) -> Mapping[str, Any]:
    """What a case has of the fields of which these are values."""
    return {axis: getattr(case, axis) for axis in values[0]}


def _up_to(values: Values, own: Mapping[str, Any]) -> Values:
    before = values[: values.index(own)] if own in values else values[:1]
    return (*before, *[own] * ORIGINAL_WEIGHT)


def cases(c: Choices) -> st.SearchStrategy[Case]:
    """A strategy for cases from ``c``; it shrinks towards the front of every list.

    It is one tuple of strategies, which draws in two thirds of the time of a composite.
    """
    shapes = st.sampled_from(c.shapes) if c.shapes else st.tuples(st.sampled_from(c.m), st.sampled_from(c.n))
    drawn = st.tuples(shapes, *map(st.sampled_from, (c.elements, *c.kinds)), st.integers(0, c.seeds))
    return drawn.map(partial(_case, c))


def endless(c: Choices, seed: int) -> Iterator[Case]:
    """Cases from ``c``, every value of a field as likely as any other: one sequence for a seed, wherever it is drawn.

    Hypothesis, asked for cases only to run them, draws most of them again and again: of 1,200 for a plain rmsnorm 345
    were distinct. It takes 0.8 ms for each, and mixes the numbers in the program's source files into what it draws, so
    that an edit, or another place of installation, gives other cases for the same seed.
    """
    random = Random(seed).random  # of all that this class does, every Python gives the same numbers for it alone

    def one_of(values: Sequence[T]) -> T:
        return values[int(random() * len(values))]

    while True:
        shape = one_of(c.shapes) if c.shapes else (one_of(c.m), one_of(c.n))
        yield _case(c, (shape, *map(one_of, (c.elements, *c.kinds)), one_of(range(c.seeds + 1))))


def _case(c: Choices, drawn: tuple[Any, ...]) -> Case:
    (m, n), elements, *kinds, seed = drawn
    values = {axis: value for own in kinds for axis, value in own.items()}
    if values["layout"] == HEADS and not c.shapes:
        n = head_size_near(n)
    rows = m if c.shapes else min(m, max(1, elements // n))
    return Case(op=c.op, dtype=c.dtype, M=rows, N=n, seed=seed, **values)
