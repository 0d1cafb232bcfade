"""The cases that every cell runs first: each kind of data, each kind of size, each layout at least once.

A detection is a property of a bound and of the inputs together. These are the inputs that the table of tolerances was
measured with, in an order that asks about the most first. The shapes of the cuDNN notebooks, of the Triton tutorial
and of PyTorch's benchmark are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

from normcheck.case import EXPANDED, Case
from normcheck.choices import CLIPS
from normcheck.data_kinds import NOT_FINITE, ROWS
from normcheck.implementation import Implementation
from normcheck.ops.op import Op

_SHAPES = ((5, 7), (8, 24), (7, 100), (3, 257), (11, 129), (6, 300), (9, 40))
_EPS = (1e-5, 1e-3, 1e-1, 1e-6)
_DY = ("normal", "correlated", "shifted", "last_row", "integers", "first_row", "ones", "small")
_WEIGHTS = ("normal", "probe", "small")

_SIZES = (
    (1, 1), (2, 1), (1, 2), (1, 3), (2, 17), (3, 127), (1, 132), (2, 513), (1, 768), (2, 1024), (3, 1000),
    (2, 1003), (2, 4096), (1, 1152), (3, 256), (2, 1025), (1, 16385), (1, 1536), (2, 2048), (1, 1600), (1, 2049),
    (3, 512), (1, 3584), (2, 4097), (1, 8192), (3, 64), (1, 20000),
)  # fmt: skip
_TALL = ((31, 5), (133, 8), (65, 9), (257, 3), (1061, 4), (600, 7), (4097, 3), (2049, 16))
_SPECIAL = ((33, 5), (4, 1025), (65, 9), (17, 2049), (300, 16), (2, 8200))
"""Several rows to a tile, several tiles to a row: where one row's NaN could reach another."""

LARGE = {
    "cpu": ((4096, 128), (4096, 768), (8192, 64), (64, 8192), (1151, 8192)),
    "cuda": (
        (4096, 128), (4096, 768), (8192, 64), (64, 8192), (1151, 8192), (8192, 2048), (32768, 256), (32768, 1024),
        (32768, 4096), (4096, 65536), (65537, 64), (8192, 8192),
    ),
}  # fmt: skip
"""Shapes of the sources, and those where long sums, many rows and wide rows live: run where time allows."""


def battery(op: Op, implementation: Implementation, dtype: str) -> Iterator[Case]:
    """The small and middling cases, most telling first."""
    shapes, case = cycle(implementation.shapes or _SHAPES), _alternating(op, implementation, dtype)
    yield case(next(shapes), "normal", dy="normal", layout="contiguous", gap=0, weight_dtype="same", eps=1e-5)
    for rows in ("blend", "tiny_variance", "offset", "shifted", "blend", "tail", "constant", "small_offset"):
        yield case(next(shapes), rows)
    if not implementation.shapes:
        yield case((2, 8200), "shifted", layout="contiguous", gap=0)  # wider than any block
    for layout in ("misaligned", *(EXPANDED if implementation.strided else ())):
        if layout != "dy_scalar" or implementation.backward is None:
            yield case(next(shapes), "normal", layout=layout, gap=0)
            yield case(next(shapes), "blend", layout=layout, gap=0)
    for special in ("nan", "inf", "largest", "signed_zero"):
        yield case(next(shapes), special)
        yield case(next(shapes), special, dy="normal")
    for special in NOT_FINITE:
        yield case(next(shapes), "shifted", dy=special)
    if not implementation.shapes:
        yield case((0, 24), "normal", layout="contiguous", gap=0)
    for rows in ROWS:
        yield case(next(shapes), rows)
    for epsilon in (1e-1, 1e-3, 1e-5, 1e-6, 0.5, 1e-8, 1e-12):
        yield case(next(shapes), "tiny_variance", eps=epsilon)
        yield case(next(shapes), "blend", eps=epsilon)
    if implementation.shapes:
        return
    for i, size in enumerate(_SIZES):
        yield case(size, ("shifted", "blend", "normal", "offset", "tail")[i % 5])
    for i, size in enumerate(_SPECIAL):
        yield case(size, ("nan", "inf", "nan")[i % 3], dy=("normal", "nan", "normal")[i % 3])
    for i, size in enumerate(_TALL):
        yield case(size, ("normal", "shifted")[i % 2], dy=("normal", "last_row", "shifted", "first_row")[i % 4])


def large(op: Op, implementation: Implementation, dtype: str, device: str, times: int = 1) -> Iterator[Case]:
    """The large cases, in order of their size, ``times`` over with other data.

    An implementation with shapes of its own has its large ones there.
    """
    if implementation.shapes:
        return
    options = (("lower_clip", 0.0), ("upper_clip", 6.0)) if op.clamped else ()
    shapes = sorted(LARGE[device], key=lambda shape: shape[0] * shape[1])
    for i, (m, n) in enumerate(shapes * times):
        yield Case(
            op=op.name,
            dtype=dtype,
            M=m,
            N=n,
            rows=("normal", "shifted")[i % 2],
            dy=("shifted", "correlated")[i % 2],
            weights=_WEIGHTS[i % 3],
            weight_dtype="fp32" if dtype != "fp32" and i % 3 == 2 else "same",
            bias=op.biases[i % len(op.biases)],
            options=options,
            seed=i,
        )


def far_apart(op: Op, implementation: Implementation, dtype: str) -> Iterator[Case]:
    """Rows so far apart that the last begins at element 2^31, for a GPU: what counts elements in 32 bits is wrong."""
    if not implementation.shapes and implementation.strided and dtype != "fp32":
        options = (("lower_clip", 0.0), ("upper_clip", 6.0)) if op.clamped else ()
        yield Case(
            op=op.name, dtype=dtype, M=65537, N=64, layout="x_strided", gap=32704, bias=op.biases[-1], options=options
        )


def _alternating(op: Op, implementation: Implementation, dtype: str) -> Callable[..., Case]:
    """(shape, rows, ...) -> a case, each with the next of every choice; what is given by name stays as it is given."""
    eps, dy, weights = cycle(_EPS), cycle(_DY), cycle(_WEIGHTS)
    clips, bias, weight_dtype = cycle(CLIPS), cycle(op.biases), cycle(("same", "same", "fp32"))
    layouts = cycle(_layouts(implementation))
    seed = iter(range(1, 10000))

    def case(shape: tuple[int, int], rows: str, **fixed: object) -> Case:
        layout, gap = next(layouts)
        values: dict[str, object] = {
            "dy": next(dy),
            "eps": next(eps),
            "weights": next(weights),
            "weight_dtype": "same" if dtype == "fp32" else next(weight_dtype),
            "bias": next(bias),
            "layout": layout,
            "gap": gap,
            "seed": next(seed),
        }
        if op.clamped:
            lower, upper = next(clips)
            values["options"] = (("lower_clip", lower), ("upper_clip", upper))
        values |= fixed
        return Case(op=op.name, dtype=dtype, M=shape[0], N=shape[1], rows=rows, **values)  # type: ignore[arg-type]

    return case


def _layouts(implementation: Implementation) -> tuple[tuple[str, int], ...]:
    layouts: list[tuple[str, int]] = [("contiguous", 0)]
    if implementation.strided:
        layouts += [("strided", 3), ("contiguous", 0), ("x_strided", 8), ("dy_strided", 1)]
    if 3 in implementation.ranks:
        layouts += [("rank3", 0)]
    return tuple(layouts)
