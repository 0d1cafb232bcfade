"""The cases that open a core: they find the most faults for their cost, and show early what a kernel refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from normcheck.cases.claims import Claims
from normcheck.cases.data_kinds import CODE_WEIGHTS
from normcheck.cases.depth import Depth
from normcheck.cases.dtypes import CODES
from normcheck.cases.layouts import HEADS, OF_ROW_GROUPS, SAMPLES_STRIDED

BATCHES = ((1, 1024), (255, 1024), (256, 1024), (257, 1024), (1024, 256), (4096, 64))
"""M and N of cases for a kernel that declares batch invariance: many choose another block from 256 rows on."""

LONG_ROWS = (2, 53248)
"""M and N of rows that are longer than many a kernel holds at once, yet cost a CPU little."""

_PACKED: Mapping[str, Any] = {"layout": "contiguous", "eps": 1e-5}
NEUTRAL: Mapping[str, Any] = {**_PACKED, "weight_dtype": "same", "dy": "normal", "weights": "normal"}

_OF_HEADS = ((20, 128, 0), (5, 64, 0), (3, 256, 0), (1, 128, 8), (24, 64, 64), (6, 512, 8), (14, 128, 0))
"""M, N and gap of the first cases of heads: tokens of several heads, of one, a single token, a single head, gaps."""


def opening(claims: Claims) -> Iterator[tuple[int, int, str, Mapping[str, Any]]]:
    """M, N, rows and other fixed values of the cases that open a core: they find the most faults for their cost."""
    plain = {**_PACKED, "probe": Depth.MEMORY}  # what these build, a new size builds
    yield 5, 7, "normal", {**NEUTRAL, **plain}
    yield 20, 24, "blend", plain
    yield 2, 1536, "tail", plain
    yield 65, 64, "shifted", {}
    yield 20, 129, "blend", {}
    yield 2, 768, "tail", {}
    yield 3, 1024, "shifted", {}
    yield 2, 1025, "tail", {}
    yield 5, 3, "offset", {}
    yield 2, 8200, "shifted", {"layout": "contiguous"}
    yield 1, 4097, "blend", {}
    yield 1, 1, "normal", {}
    yield 2, 129, "tail", {}
    yield 300, 16, "blend", {}
    yield from _often_refused(claims)
    for m, n, rows, dy in ((5, 40, "nan", "normal"), (5, 24, "inf", "normal"), (5, 7, "shifted", "nan")):
        if dy == "normal" or not claims.op.quantises:
            yield m, n, rows, {**NEUTRAL, "dy": dy}
    yield 0, 24, "normal", NEUTRAL


def _often_refused(claims: Claims) -> Iterator[tuple[int, int, str, Mapping[str, Any]]]:
    """A small case for each value that implementations often refuse, with nothing else unusual in it."""
    for weight in claims.weights[1:]:
        yield 5, 24, "shifted", {**NEUTRAL, "weight": weight}
    for lone in claims.lone_biases if claims.lone_bias and False in claims.weights else ():
        yield 5, 24, "shifted", {**NEUTRAL, "weight": False, "bias": lone}
    for bias in claims.biases[1:]:
        yield 5, 24, "shifted", {**NEUTRAL, "bias": bias}
    for weight_dtype in claims.weight_dtypes[1:]:
        yield 5, 24, "normal", {**NEUTRAL, "weight_dtype": weight_dtype}
    for layout in claims.layouts[1:]:
        if layout != HEADS:
            rows = 20 if layout in (*OF_ROW_GROUPS, SAMPLES_STRIDED) else 5  # several rows in each of several groups
            several = {"samples": "few"} if layout == SAMPLES_STRIDED and claims.op.modulated else {}
            yield rows, 24, "shifted", {**NEUTRAL, "layout": layout, **several}
    if HEADS in claims.layouts:
        for m, n, gap in _OF_HEADS:
            yield m, n, "shifted", {**NEUTRAL, "layout": HEADS, "gap": gap}
    for residual_dtype in claims.residual_dtypes[1:]:
        yield 5, 24, "normal", {**NEUTRAL, "residual_dtype": residual_dtype}
    yield from _of_codes(claims)


def _of_codes(claims: Claims) -> Iterator[tuple[int, int, str, Mapping[str, Any]]]:
    """Cases whose y lie in the middle of two codes, for each format; a limited scale, as it is often refused."""
    if not claims.op.quantises:
        return
    halved = {"residual": "half"} if claims.op.adds_residual else {}  # the sums have one magnitude as well
    given = tuple(scale for scale in claims.scales if scale in ("ties", "power"))
    exact = given or claims.scales[:1] * len(CODES)
    for scale in exact:
        yield 5, 129, "alternating", {**NEUTRAL, **halved, "weights": CODE_WEIGHTS, "scale": scale}
    for other in claims.scales[1:]:
        yield 5, 129, "scaled", {**NEUTRAL, "scale": other}
