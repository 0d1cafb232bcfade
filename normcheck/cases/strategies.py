"""Cases drawn from choices: an endless sequence for a sweep, and a Hypothesis strategy for shrinking.

Each list of values is simplest first, because shrinking goes towards its front. Only numbers and names are drawn, never
tensor elements: that is fast, and a failure shrinks to a small M and N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
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


@dataclass(frozen=True)
class Choices:
    """The values that the fields of a drawn case may have, simplest first."""

    op: str
    dtype: str
    shapes: tuple[tuple[int, int], ...]  # (M, N) together; if empty, they come from m and n
    m: tuple[int, ...]
    n: tuple[int, ...]
    elements: tuple[int, ...]
    rows: tuple[str, ...]
    dy: tuple[str, ...]
    parameters: tuple[tuple[str, str, bool], ...]  # weights, weight_dtype, bias
    eps: tuple[float, ...]
    clips: tuple[tuple[float, float], ...]
    layout: tuple[tuple[str, int], ...]  # name, gap
    own: tuple[tuple[Mapping[str, Any], ...], ...]  # for each input by name, values of its axes, together
    seeds: int


def choices(claims: Claims, *, seeds: int = 999) -> Choices:
    """Every value that these claims admit; seeds are 0 to ``seeds``."""
    own = claims.values("layout")
    layout = [(name, 0) for name in own if name not in (*STRIDED, HEADS)]
    layout += [(name, gap) for gap in GAPS for name in own if name in STRIDED]
    layout += [(HEADS, gap) for gap in HEAD_GAPS if HEADS in own]
    weight_dtypes, biases, weight = claims.values("weight_dtype"), claims.values("bias"), claims.values("weight")
    kinds = weight_kinds(claims.op)
    parameters = [(w, d, b) for d in weight_dtypes for w in kinds for b in biases if True in weight]
    return Choices(
        op=claims.op.name,
        dtype=claims.dtype,
        shapes=tuple(s for s in claims.shapes if claims.admits("M", s[0]) and claims.admits("N", s[1])),
        m=tuple(m for m in SIZES_M if claims.admits("M", m)),
        n=tuple(n for n in (*SIZES_N, *claims.multiples) if claims.admits("N", n)),
        elements=ELEMENTS,
        rows=ROW_KINDS,
        dy=dy_kinds(claims.op, claims.dtype),
        parameters=(*[(NO_WEIGHT, "same", b) for b in claims.lone_biases if False in weight], *parameters),
        eps=claims.epsilons or EPS,
        clips=CLIPS if claims.op.clamped else (),
        layout=(*[layout[0]] * 4, *layout, *[("rank3", 0)] * 2 * ("rank3" in own)),
        own=tuple(_of_input(claims, name) for name in (*_ALWAYS_DRAWN, *_others(claims.op))),
        seeds=seeds,
    )


def within(all_: Choices, case: Case) -> Choices:
    """The choices at most as complex as the values of ``case``, with those values ORIGINAL_WEIGHT times."""
    clips = tuple(v for _, v in case.options)
    return replace(
        all_,
        shapes=tuple(s for s in all_.shapes if s[0] <= case.M and s[1] <= case.N),
        m=(*(m for m in all_.m if m < case.M), *[case.M] * ORIGINAL_WEIGHT),
        n=(*sorted(n for n in all_.n if n < case.N), *[case.N] * ORIGINAL_WEIGHT),
        elements=(case.M * case.N,),
        rows=_up_to(all_.rows, case.rows),
        dy=_up_to(all_.dy, case.dy),
        parameters=_up_to(all_.parameters, (case.weights, case.weight_dtype, case.bias)),
        eps=_up_to(all_.eps, case.eps),
        clips=_up_to(all_.clips, (clips[0], clips[1])) if clips else (),
        layout=_up_to(all_.layout, (case.layout, case.gap)),
        own=tuple(_up_to(values, {axis: getattr(case, axis) for axis in values[0]}) for values in all_.own),
        seeds=case.seed,
    )


def _others(op: Op) -> tuple[str, ...]:
    """What else of an op has axes of its own."""
    return (*(name for name in op.by_name if name not in _ALWAYS_DRAWN), *[GROUPS] * op.grouped)


def _of_input(claims: Claims, name: str) -> tuple[Mapping[str, Any], ...]:
    """The values of the axes of an input by name, together; ({},) if the op has no such input."""
    axes = claims.op.axes_of(name)[::-1]
    return tuple(dict(zip(axes, values, strict=True)) for values in product(*(claims.own[axis] for axis in axes)))


def _up_to(values: tuple[T, ...], own: T) -> tuple[T, ...]:
    before = values[: values.index(own)] if own in values else values[:1]
    return (*before, *[own] * ORIGINAL_WEIGHT)


def cases(c: Choices) -> st.SearchStrategy[Case]:
    """A strategy for cases from ``c``; it shrinks towards the front of every list.

    It is one tuple of strategies, which draws in two thirds of the time of a composite.
    """
    shapes = st.sampled_from(c.shapes) if c.shapes else st.tuples(st.sampled_from(c.m), st.sampled_from(c.n))
    drawn = st.tuples(shapes, *(st.sampled_from(values) for values in _fields(c)), st.integers(0, c.seeds))
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
        yield _case(c, (shape, *map(one_of, _fields(c)), one_of(range(c.seeds + 1))))


def _fields(c: Choices) -> tuple[Sequence[Any], ...]:
    """The values of each field between the shape and the seed."""
    several = (c.elements, c.rows, c.dy, c.eps, c.parameters, c.layout)
    return (*several, c.clips or ((),), *c.own)


def _case(c: Choices, drawn: tuple[Any, ...]) -> Case:
    (m, n), elements, rows, dy, eps, (weights, weight_dtype, bias), (layout, gap), clips, *own, seed = drawn
    if layout == HEADS and not c.shapes:
        n = head_size_near(n)
    return Case(
        op=c.op,
        dtype=c.dtype,
        M=m if c.shapes else min(m, max(1, elements // n)),
        N=n,
        rows=rows,
        dy=dy,
        eps=eps,
        weights=weights,
        weight_dtype=weight_dtype,
        bias=bias,
        layout=layout,
        gap=gap,
        options=OPS[c.op].clips(clips),
        seed=seed,
        **{axis: value for values in own for axis, value in values.items()},
    )
