"""A case: one point of the sweep as plain data, printed and parsed as one line.

``case_line.parse(str(case)) == case`` for every case. The line is readable and complete: it gives tensors of the same
bits on every machine (see ``inputs.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from normcheck.cases.layouts import (
    CHANNELS_LAST,
    EXPANDED,
    HEADS,
    OF_ROW_GROUPS,
    OF_WEIGHTS,
    RANK4,
    SAMPLES_STRIDED,
    TRAILING,
    WEIGHT_INTERLEAVED,
    WEIGHT_STACKED,
    WEIGHT_STRIDED,
)
from normcheck.cases.ops import OPS
from normcheck.cases.split import (
    Heads,
    Split,
    divisor_near_root,
    heads_of,
    least_prime,
    others_behind,
    row_groups_of,
    split_of,
    token_heads,
)
from normcheck.cases.tensor_names import HEAD_COUNTS

RETURNED, LIMITED = "none", "limited"
"""The values of ``Case.scale`` for a kernel that returns its scale; ``limited``: it gets an upper limit of max |y|."""

GIVEN_SCALES = ("normal", "ties", "power", "coarse", "fine", "tiny")
"""The other values of ``Case.scale``, simplest first: kinds of given scales, see ``data_kinds.SCALE_VALUES``."""

SCALE_LIMITS = (1.75, 1.25)
"""The limits that such a kernel gets as ``scale_ub``, by turns of the seed. Some rows of ordinary data have their
maximum above it."""

SAMPLES = ("one", "few", "many", "each")
"""How many samples of a batch the M rows of a modulated op are, simplest first: 1; p, the least prime that divides M;
M / p, or M if that is a prime; M, of a row each. A case line may also have a number that divides M."""

NO_WEIGHT = "none"
"""In place of a kind of weights: the op is called without a weight, so without a bias as well. Its gamma is 1."""

MOST_COLUMNS = 65536
"""Longer rows are unusual: many a kernel holds a row in one block, and no block has so many elements."""

SMALL_ELEMENTS = 2**15
"""A case with no more elements, gaps included, costs a CPU less to judge than a GPU."""

HUGE_ELEMENTS = 2**28
"""A case with more elements, gaps included, is probed no deeper than the reason of a failure needs. One with more
elements of its own is run once, and what comes of it is judged, and that is all: memory does not allow more."""

MAX_ELEMENTS = 2**34
"""The largest ``room`` of a case line. It limits the memory that a hostile line can make this process allocate."""

_SAID_IF_OTHER = (
    *("gap", "weights", "weight_dtype", "bias", "residual", "residual_dtype", "scale", "gate", "samples", "channels"),
    *("groups", "head", "kv_heads", "rotary", "angles", "weight_groups"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the sweep.

    ``M`` rows of ``N`` elements; ``eps`` is the op's epsilon; ``rows``, ``dy`` and ``weights`` are kinds of data
    (``data_kinds.py`` lists them); ``weight_dtype`` is ``same`` or ``fp32``; ``bias`` is False if the op is called
    without one; ``gap`` counts the elements behind each row of a strided tensor, or each head; ``options`` are the op's
    own numbers (``lower_clip``, ``upper_clip``) as pairs in order of name. ``residual`` is a kind of data as well, and
    ``residual_dtype`` is ``same`` or ``fp32``, both of an op that adds a residual. ``scale``, of an op that quantises:
    a kind of given scales, or RETURNED, or LIMITED. ``gate``, of a gated op: a kind of data. ``samples``, of a
    modulated op: one of SAMPLES, or a number; ``weights`` and ``weight_dtype`` are those of its scale and shift.
    ``channels`` and ``groups``, of a grouped op: one of CHANNEL_COUNTS and of GROUP_COUNTS, or numbers. ``head``,
    ``kv_heads`` and ``rotary``, of a rotary op: one of HEAD_COLUMNS, KV_HEADS and ROTARY_PARTS, or numbers; ``angles``:
    a kind of cosines and sines, which have the dtype of the weights.
    ``weight_groups``: how many groups of rows have a weight of their own, in OF_ROW_GROUPS; 0: as M has it.

    With ``weights`` NO_WEIGHT there is no weight. Raises ValueError if such a case has a dtype of weights.
    """

    op: str
    dtype: str
    M: int
    N: int
    eps: float = 1e-5
    rows: str = "normal"
    dy: str = "normal"
    layout: str = "contiguous"
    seed: int = 0
    weights: str = "normal"
    weight_dtype: str = "same"
    bias: bool = True
    gap: int = 0
    options: tuple[tuple[str, float], ...] = ()
    residual: str = "normal"
    residual_dtype: str = "same"
    scale: str = RETURNED
    gate: str = "normal"
    samples: str = ""
    channels: str = ""
    groups: str = ""
    head: str = ""
    kv_heads: str = ""
    rotary: str = ""
    angles: str = ""
    weight_groups: int = 0

    def __post_init__(self) -> None:
        if self.weights == NO_WEIGHT and self.weight_dtype != "same":
            raise ValueError("weights=none: expected weight_dtype='same' with it")

    @property
    def weight(self) -> bool:
        """Whether the op is called with a weight."""
        return self.weights != NO_WEIGHT

    @property
    def rank(self) -> int:
        """Rank of x: 2 for (M, N), 3 for (B, S, N) with B*S == M, (T, H, N) with T*H == M, or (M, A, B) with A*B == N,
        and 4 for (B, S, T, N) with B*S*T == M. In OF_ROW_GROUPS 3 as well.
        """
        if self.samples or self.channels:
            return 3
        if self.layout == RANK4:
            return 4
        return 3 if self.layout in ("rank3", "rank3_strided", SAMPLES_STRIDED, HEADS, TRAILING, *OF_ROW_GROUPS) else 2

    @property
    def split(self) -> Split:
        """How N is split; one group of N channels of an op that is not grouped; the heads that a rotary one norms."""
        if self.rotates:
            return Split(self.of_heads.normed, self.N, 1)
        return split_of(self.N, self.channels, self.groups) if self.channels else Split(1, self.N, 1)

    @property
    def rotates(self) -> bool:
        """Whether its op is a rotary one."""
        return OPS[self.op].rotary

    @property
    def of_heads(self) -> Heads:
        """The heads of a token of a rotary op; the simplest words stand for those that are not said."""
        return token_heads(self.N, self.head or "64", self.kv_heads or "sixth", self.rotary or "all")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x and dy, of y and dx."""
        if self.channels:
            return self.M, self.split.channels, self.split.length
        if self.layout == HEADS:
            return self.M // self.heads, self.heads, self.N
        if self.layout == TRAILING:
            return self.M, *self.sides
        if self.layout in OF_ROW_GROUPS:
            sides = self.row_groups, self.M // self.row_groups
            return *(sides if self.layout == WEIGHT_STACKED else sides[::-1]), self.N
        if self.layout == RANK4:
            rest = self.M // self.batch
            inner = divisor_near_root(rest)
            sides = inner, rest // inner  # one of them is 1 if the rest is a prime, by turns
            return self.batch, *(sides[::-1] if self.seed % 2 else sides), self.N
        return (self.M, self.N) if self.rank == 2 else (self.batch, self.M // self.batch, self.N)

    @property
    def sides(self) -> tuple[int, ...]:
        """The shape of weight and bias: (N,), or (C,), or (G, N) in OF_ROW_GROUPS, or (A, B) in ``trailing``.

        A is the largest divisor of N up to its square root, so 1 if N is a prime.
        """
        if self.layout in OF_ROW_GROUPS:
            return self.row_groups, self.N
        if self.layout != TRAILING:
            return (self.split.channels,)
        side = divisor_near_root(self.N)
        return side, self.N // side

    def group_of(self, row: Any) -> Any:
        """The one of ``row_groups`` to which a row belongs, an int or a tensor of them."""
        return row % self.row_groups if self.layout == WEIGHT_INTERLEAVED else row // max(self.M // self.row_groups, 1)

    @property
    def heads(self) -> int:
        """H of the layout ``heads``."""
        return heads_of(self.M)

    @property
    def row_groups(self) -> int:
        """G of OF_ROW_GROUPS, in which each of G groups of M / G rows has a weight of its own; 1 in other layouts."""
        if self.layout not in OF_ROW_GROUPS:
            return 1
        given = self.weight_groups and self.M % self.weight_groups == 0
        return self.weight_groups if given else row_groups_of(self.M)

    @property
    def head_strides(self) -> tuple[int, int]:
        """The strides of the tokens and of the heads of x in the layout ``heads``."""
        return (self.heads + others_behind(self.heads)) * (self.N + self.gap), self.N + self.gap

    @property
    def gaps(self) -> Mapping[str, int]:
        """The elements behind each row of x and of dy; of heads an average, rounded up."""
        if self.layout == HEADS:
            return MappingProxyType({"x": math.ceil(self.head_strides[0] / self.heads) - self.N, "dy": 0})
        one = {"x": "dy_strided", "dy": "x_strided"}  # has no gap in this layout
        return MappingProxyType({name: self.gap * (self.layout != packed) for name, packed in one.items()})

    @property
    def room(self) -> int:
        """The elements of x or dy with the gaps of its rows, of the one that has more; without rows of the weight."""
        return max(self.M, 1) * (self.N + (self.gaps["x"] if self.layout == HEADS else self.gap))

    @property
    def small(self) -> bool:
        """Whether its ``room`` is at most SMALL_ELEMENTS."""
        return self.room <= SMALL_ELEMENTS

    @property
    def huge(self) -> bool:
        """Whether M * N is above HUGE_ELEMENTS."""
        return self.M * self.N > HUGE_ELEMENTS

    @property
    def weight_format(self) -> str:
        """The name of the dtype of weight and bias."""
        return self.dtype if self.weight_dtype == "same" else self.weight_dtype

    @property
    def residual_format(self) -> str:
        """The name of the dtype of residual, residual_out and their gradients."""
        return self.dtype if self.residual_dtype == "same" else self.residual_dtype

    @property
    def batch(self) -> int:
        """B of an x of rank 3 or 4: the largest divisor of M up to the square root of M, or what ``samples`` say."""
        if not self.samples:
            return divisor_near_root(self.M)
        if self.samples.isdigit():
            return int(self.samples) if self.M % int(self.samples) == 0 else 1
        least = least_prime(self.M)
        several = self.M // least if least < self.M else self.M
        return max(1, {"one": 1, "few": least, "many": several, "each": self.M}[self.samples])

    @property
    def option_values(self) -> Mapping[str, float]:
        """The op's own numbers by name, as forward and backward get them."""
        limit = {"scale_ub": SCALE_LIMITS[self.seed % 2]} if self.scale == LIMITED else {}
        count = {"groups": self.split.groups} if self.channels else {}
        count |= dict(zip(HEAD_COUNTS, self.of_heads, strict=False)) if self.head else {}
        return MappingProxyType({**dict(self.options), **limit, **count})

    def __str__(self) -> str:
        words = [self.op, self.dtype, f"M={self.M}", f"N={self.N}", f"eps={self.eps!r}", f"rows={self.rows}"]
        words += [f"dy={self.dy}", f"layout={self.layout}", f"seed={self.seed}"]
        for name in _SAID_IF_OTHER:
            value = getattr(self, name)
            if name == "bias":
                words += [f"bias={'yes' if value else 'none'}"] * (value != self.weight)
            elif value != getattr(Case, name):
                words.append(f"{name}={value}")
        return " ".join([*words, *(f"{name}={value!r}" for name, value in self.options)])


_REFUSED_LAYOUTS = ("misaligned", CHANNELS_LAST, WEIGHT_STRIDED, SAMPLES_STRIDED)


def unusual(case: Case) -> tuple[str, ...]:
    """The words of its line that many kernels refuse. A clear refusal of these is as good as an answer."""
    refusable = {
        "M=0": case.M == 0,
        f"N={case.N}": case.N > MOST_COLUMNS or bool(case.channels and case.N == 1),
        f"layout={case.layout}": case.layout in (*_REFUSED_LAYOUTS, *EXPANDED),
        "weight_dtype=fp32": case.weight_dtype == "fp32" and case.dtype != "fp32",
        f"head={case.head}": case.rotates and case.of_heads.columns.bit_count() > 1,
        "residual_dtype=fp32": case.residual_dtype == "fp32" and case.dtype != "fp32",
    }
    return tuple(words for words, refused in refusable.items() if refused)


def without_unusual(case: Case) -> Case:
    """``case`` without what many kernels refuse, see ``unusual``; a long row stays as long."""
    plain = replace(case, M=max(case.M, 1), weight_dtype="same", residual_dtype="same")
    plain = replace(plain, N=max(plain.N, 2)) if case.channels else plain
    plain = replace(plain, head="64") if f"head={case.head}" in unusual(case) else plain
    if case.layout in EXPANDED:
        return replace(plain, layout="contiguous", dy="normal")
    return replace(plain, layout="contiguous", gap=0) if case.layout in _REFUSED_LAYOUTS else plain


_TURNS = 840
"""A multiple of each number up to 8, of 10 and of 12: shapes and strides go by turns of the seed, at most so many."""


def without_seed(case: Case) -> Case:
    """What a kernel may know of a case before it is called: all but which of the cases of its kind it is."""
    return replace(case, seed=0)


def with_other_values(case: Case) -> Case:
    """``case`` with other values in tensors of the same shapes that lie alike: a kernel may refuse other strides."""
    return replace(case, seed=case.seed + _TURNS)


def with_rows(case: Case, rows: int) -> Case:
    """The case of so many of its rows, packed; x keeps its rank."""
    packed = "rank3" if case.layout in ("rank3_strided", SAMPLES_STRIDED) and not case.samples else case.layout
    kept = ("rank3", RANK4, TRAILING, HEADS, CHANNELS_LAST, *OF_WEIGHTS)
    packed = packed if packed in kept else "contiguous"
    samples, groups = "one" if case.samples else "", int(packed in OF_ROW_GROUPS)
    return replace(case, M=rows, layout=packed, gap=0, samples=samples, weight_groups=groups)
