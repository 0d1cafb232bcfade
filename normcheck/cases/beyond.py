"""Cases beside the core: large ones, rows far apart, the sizes of well-known models; and small ones that show a fault.

A cell runs all but the last after its core, while there is time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from normcheck.cases.axes import CLIPS, EPS, MODEL_POWERS, MODEL_SIZES
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import Claims
from normcheck.cases.core import drawn
from normcheck.cases.data_kinds import NOT_FINITE, weight_kinds
from normcheck.cases.layouts import CHANNELS_LAST, HEADS, ROWS_APART, STRIDED
from normcheck.cases.sizes import Extent
from normcheck.cases.split import GROUP_COUNTS, HEAD_COLUMNS, KV_HEADS, least_prime
from normcheck.cases.strides import misaligned_alone

LARGE = {
    "cpu": (
        (4096, 128), (517, 1033), (4096, 768), (16391, 64), (65537, 8), (260, 9224), (1151, 8192),
    ),
    "cuda": (
        (4096, 128), (517, 1033), (4096, 768), (8192, 64), (64, 8192), (131, 8200), (1151, 8192), (8192, 2048),
        (32768, 256), (32768, 1024), (32768, 4096), (4096, 65536), (131073, 64), (8192, 8192),
    ),
}  # fmt: skip
"""Shapes (M, N) that the sources name, and shapes with long sums, many rows or wide rows, by device."""

EXTREME = (
    (65535, 72), (65536, 72), (65537, 72), (2**20 + 1, 24), (5, 2**17 + 8), (3, 2**18 + 1), (2, 2**20),
)  # fmt: skip
"""Shapes for a GPU at the ends of what a grid, or a block of columns, can have; few N, each of which may compile."""

_GRID_ROWS, _ALONE = 65535, "last_row"
"""Rows that the second dimension of a grid has at most; behind them only the last row has a gradient: among so many
others, whether it is in dw does not show."""

MANY, MANY_OF_SAMPLES = (2112, 4160), (2120, 1160)
"""Many rows of many columns, as in training and in a prompt, in full blocks of both; and four samples of many rows.
Packed, and each tensor at a distance of its own."""

HUGE_N = 4096
"""N of huge cases: most kernels take it, and have compiled it by then."""

_FULL_BLOCKS = 64
"""A multiple of the rows that a program takes at a time, in most kernels; the M of a core are seldom even."""

_ROWS_BETWEEN = (
    (41, 47, 55, 61), (82, 94, 110, 122), (166, 183, 194), (611, 755, 903), (2491, 3001, 3117), (4099, 4111, 4129),
)  # fmt: skip
"""M of octaves of which a core has few cases, one of each is taken. In fp32 m * (1 / m) is less than 1 for m = 41, 47,
55, 61, 83 or 97, which are samples of these."""

_BETWEEN_N = 64  # most kernels have compiled it by then

_OF_SAMPLES = ((4128, "4"), (576, "8"))
"""Rows, and how many samples they are: those of a core are a prime number, or have a prime number of rows each."""

HEADS_OF_MODELS = (
    *((32, 64, 30, 3, "all"), (128, 256, 12, 2, "quarter"), (64, 128, 36, 4, "all"), (32, 64, 36, 2, "half")),
    *((40, 80, 24, 4, "half"), (128, 256, 12, 2, "all"), (32, 64, 30, 5, "all"), (256, 512, 6, 1, "all")),
    *((130, 128, 48, 8, "all"),),
)
"""Tokens, columns of a head, heads, those of k, and which part is rotated, as models have them: 8, 7, 16 or 4 heads of
q share one of k. Two differ in the heads of k alone. As many tokens as pairs: no shape tells cos from its transpose.
The last are more tokens than a head has columns."""

SPLITS = (
    (64, 32, 1024),
    (32, 8, 1369),
    (320, 32, 16),
    (128, 32, 64),
    (512, 16, 9),
    (64, 8, 49),
    (256, 4, 25),
    (96, 6, 16),
    (48, 16, 21),
    (512, 32, 256),
    (4, 1, 65536),
)
"""Channels, groups and elements of a channel, as models have them: several groups of several channels, at last many of
all three. Then a group of 2^18, as of a picture of 256 x 256."""

_WITHOUT_WEIGHT = 0.25
"""The share of cases without a weight, of an implementation that takes both."""

_SMALL = Extent(rows=20, paired_rows=20, elements=3000, heights=2, widths=1, dear_rows=20)
_TELLING_CASES = 24


def telling(claims: Claims, seed: int) -> tuple[Case, ...]:
    """Small cases with every kind of rows, gradient and layout, which show best what is wrong with a kernel."""
    return tuple(planned.case for planned in islice(drawn(claims, _SMALL, seed), _TELLING_CASES))


def splits_of_models(claims: Claims, seed: int) -> Iterator[Case]:
    """The SPLITS or HEADS_OF_MODELS of an op with groups or heads; none if the implementation declares its shapes."""
    order = random.Random(seed)
    split_anew = claims.op.grouped and claims.groups == GROUP_COUNTS and not claims.shapes
    layouts = [own for own in (claims.layouts[0], CHANNELS_LAST) if own in claims.values("layout")]
    for (channels, groups, length), layout in product(SPLITS, dict.fromkeys(layouts)) if split_anew else ():
        if _admitted(claims, 3, channels * length):
            split: dict[str, Any] = {"channels": str(channels), "groups": str(groups), "layout": layout}
            split["seed"] = 4 * order.randrange(250)  # x and dy lie alike, see ``strides.in_channels_last``
            is_one_pass = layout == CHANNELS_LAST and channels // groups % 4 == 0 == length % 16
            rows = "mean10000" if is_one_pass else "shifted"  # of E[x^2] - mean^2 nothing is left, if it is so computed
            yield _drawn(claims, order, 3, channels * length, rows=rows, **_plain(claims) | split)
    own_heads = claims.op.rotary and claims.own["head"] == HEAD_COLUMNS and claims.own["kv_heads"] == KV_HEADS
    for tokens, head, count, of_k, rotary in HEADS_OF_MODELS if own_heads and not claims.shapes else ():
        if _admitted(claims, tokens, head * count):
            part = rotary if rotary in claims.own["rotary"] else claims.own["rotary"][0]
            split = {"head": str(head), "kv_heads": str(of_k), "rotary": part, "weight_dtype": "same"}
            yield _drawn(claims, order, tokens, head * count, rows="shifted", **_plain(claims) | split)


def model_sizes(claims: Claims, seed: int) -> Iterator[Case]:
    """Two rows of each N of models, in an order by ``seed``, and so many of each of MODEL_POWERS that every block of
    rows is full; none if the implementation declares its shapes.
    """
    order = random.Random(seed)
    for m, every in () if claims.shapes else ((2, (*MODEL_SIZES, *MODEL_POWERS)), (_FULL_BLOCKS, MODEL_POWERS)):
        sizes = [n for n in every if _admitted(claims, m, n)]
        for n in order.sample(sizes, len(sizes)):
            yield _drawn(claims, order, m, n, rows=order.choice(("tail", "shifted", "normal")))


def rows_between(claims: Claims, seed: int) -> Iterator[Case]:
    """A case of each of _ROWS_BETWEEN: a block of 32 rows may have a path of its own, which a core hardly meets. Of a
    modulated op also _OF_SAMPLES. Then thousands of rows that lie apart, of x, of dy and of both: so many may be
    summed in another way, which has strides of its own.
    """
    order, packed = random.Random(seed + 4), claims.layouts[0]
    sizes = [(order.choice(several), "few", packed) for several in _ROWS_BETWEEN]
    sizes += [(m, samples, packed) for m, samples in _OF_SAMPLES if claims.op.modulated]
    sizes += [(order.choice(_ROWS_BETWEEN[-2]), "few", own) for own in ROWS_APART if own in claims.values("layout")]
    for m, samples, layout in () if claims.shapes else sizes:
        if _admitted(claims, m, _BETWEEN_N):
            plain = _plain(claims) | ({"samples": samples} if claims.op.modulated else {})
            plain |= {"layout": layout, "gap": _BETWEEN_N} if layout in ROWS_APART else {}
            yield _drawn(claims, order, m, _BETWEEN_N, rows="shifted", dy="normal", **plain)


def many(claims: Claims, seed: int, layout: str) -> Iterator[Case]:
    """The case of MANY rows and columns, with plain data, in a layout; none if the implementation has not that, or
    declares its shapes.
    """
    m, n = MANY_OF_SAMPLES if claims.op.modulated else MANY
    if layout in claims.values("layout") and not claims.shapes and _admitted(claims, m, n):
        order = random.Random(seed + 5)
        kinds = _plain(claims) | _lying(order, layout) | ({"samples": "4"} if claims.op.modulated else {})
        yield _drawn(claims, order, m, n, rows="shifted", dy="correlated", **kinds)


def full_blocks(claims: Claims, seed: int) -> Iterator[Case]:
    """Full blocks of rows of every kind in each layout: what has no tail may have a path of its own, and strides taken
    for others there. Of misaligned ones so many N that each tensor alone is. None if the implementation declares its
    shapes.
    """
    order, alone = random.Random(seed + 6), set[str]()
    sizes = [(layout, _BETWEEN_N) for layout in claims.values("layout")]
    if "misaligned" in claims.values("layout"):
        sizes += [("misaligned", n) for n in range(_BETWEEN_N + 8, 32 * _BETWEEN_N, 8)]
    for layout, n in () if claims.shapes else sizes:
        if _admitted(claims, _FULL_BLOCKS, n) and claims.fits(layout, n):
            case = _drawn(claims, order, _FULL_BLOCKS, n, rows="blend", **_plain(claims) | _lying(order, layout))
            which = misaligned_alone(case) if layout == "misaligned" else layout
            if which not in alone and getattr(case, which, True) is not False:  # a weight or a bias that it has not
                yield case
                alone.add(which)


def _lying(order: random.Random, layout: str) -> dict[str, Any]:
    """A layout, with a gap if it has one; by an odd seed each tensor has its own distance, see ``strides.apart``."""
    return {"layout": layout, "gap": _BETWEEN_N * (layout in STRIDED), "seed": 2 * order.randrange(500) + 1}


def _plain(claims: Claims) -> dict[str, Any]:
    """The plainest values of all that the op alone has, and of the weights."""
    own = {axis: values[0] for axis, values in claims.own.items()} | ({"samples": "few"} if claims.op.modulated else {})
    return {**own, "weights": weight_kinds(claims.op)[0], "eps": 1e-5}


def of_size(claims: Claims, axis: str, size: int, seed: int) -> Iterator[Case]:
    """A case whose ``axis``, M or N, is ``size``: few rows, or short ones; none if the implementation declares its
    shapes, or has refused this one.
    """
    m, n = (2, size) if axis == "N" else (size, 64)
    if not claims.shapes and claims.admits(axis, size) and claims.fits(claims.layouts[0], n):
        yield _drawn(claims, random.Random(seed + 3), m, n)


def large(claims: Claims, device: str, times: int, seed: int) -> Iterator[Case]:
    """Cases of the LARGE shapes in order of size, each ``times`` times with other data.

    Of a modulated op in two samples, or in one if the rows are a prime: one sample may be summed in several turns. More
    rows than a grid has are as many samples as well. There are none if the implementation declares its shapes: the
    large ones are among those.
    """
    if claims.shapes:
        return
    order = random.Random(seed + 1)
    for m, n in sorted(LARGE[device], key=lambda shape: shape[0] * shape[1]) * times:
        if _admitted(claims, m, n):
            dy = order.choice(("shifted", "correlated"))
            dy = _ALONE if m > _GRID_ROWS else dy
            rows, samples = order.choice(("normal", "shifted")), "one" if least_prime(m) == m else "few"
            for own in (samples, *["each"] * (m > _GRID_ROWS)) if claims.op.modulated else ("",):
                yield _drawn(claims, order, m, n, rows=rows, dy=dy, **({"samples": own} if own else {}))


def far_apart(claims: Claims) -> Iterator[Case]:
    """Cases for a GPU whose last row, or last token, begins at element 2^31 or behind it: a kernel that counts elements
    in 32 bits fails them."""
    layouts = () if claims.shapes or claims.dtype == "fp32" else claims.values("layout")
    for layout, m, gap in (("x_strided", 65537, 32704), (HEADS, 8 * 10925, 16320)):
        if layout in layouts:
            order = random.Random(0)
            few = {"samples": "few"} if claims.op.modulated else {}
            yield _drawn(claims, order, m, 64, layout=layout, gap=gap, eps=1e-5, weight_dtype="same", **few)


def extreme(claims: Claims, seed: int) -> Iterator[Case]:
    """Cases of the EXTREME shapes for a GPU; none if the implementation declares its shapes."""
    order = random.Random(seed + 2)
    for m, n in () if claims.shapes else EXTREME:
        if _admitted(claims, m, n):
            alone = {"dy": _ALONE} if m > _GRID_ROWS else {}
            yield _drawn(claims, order, m, n, rows=order.choice(("normal", "shifted", "tail")), **alone)


def huge(claims: Claims, powers: Sequence[int]) -> Iterator[Case]:
    """A contiguous case for a GPU whose last row begins at element 2^p, for each p of ``powers``; not in fp32.

    A kernel that counts elements in 32 bits fails it, whatever strides it takes.
    """
    order = random.Random(1)
    left_out = claims.shapes or claims.dtype == "fp32" or claims.layouts[0] != "contiguous"
    for power in () if left_out else powers:
        few = {"samples": "few"} if claims.op.modulated else {}  # what each sample has is not as large again as x
        plain = {"eps": 1e-5, "weights": "normal", "weight_dtype": "same", **few}
        yield _drawn(claims, order, 2**power // HUGE_N + 1, HUGE_N, **plain)


def _admitted(claims: Claims, m: int, n: int) -> bool:
    """Whether so many rows and columns were not refused, or the next N that is a multiple of what the op asks."""
    n = -(-n // claims.columns) * claims.columns
    return claims.admits("M", m) and claims.admits("N", n) and claims.fits(claims.layouts[0], n)


def _drawn(claims: Claims, order: random.Random, m: int, n: int, **fixed: Any) -> Case:
    """A case of this size; fields that are not ``fixed`` are drawn independently of each other, but the layout."""
    clips, weight = order.choice(CLIPS) if claims.op.clamped else (), claims.values("weight")
    values: dict[str, Any] = {
        "weights": order.choice(weight_kinds(claims.op)),
        "weight_dtype": order.choice(claims.values("weight_dtype")),
        "bias": order.choice(claims.values("bias")),
        "eps": order.choice(EPS[:4]),
        "options": claims.op.clips(clips),
        "seed": order.randrange(1000),
    }
    finite = {axis: [value for value in own if value not in NOT_FINITE] for axis, own in claims.own.items()}
    values |= {axis: order.choice(own) for axis, own in finite.items()}  # what is not takes 2 us an element to judge
    values |= fixed | ({"dy": "normal"} if claims.op.quantises else {})
    if False in weight and (True not in weight or order.random() < _WITHOUT_WEIGHT):
        lone = claims.lone_bias and order.random() < 0.5
        values |= {"weights": NO_WEIGHT, "bias": lone, "weight_dtype": "same"}
    return claims.nearest(Case(op=claims.op.name, dtype=claims.dtype, M=m, N=n, **values))
