"""Regimes, as data: the calls that have a planted fault, while all other calls are right.

Kernels have code paths for tall tensors, for one width, for rows that are not packed. A fault in such a path shows only
in the calls that take it. A regime is a predicate over arguments that forward and backward both get, so that the two
always decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS

if TYPE_CHECKING:
    from torch import Tensor

TALL = 64
"""The least number of rows of ``tall``."""

WIDTHS = (1, 3, 64, 129, 768, 1024, 1025, 4097, 8200)
"""The N of each ``one_n``: small ones, powers of two and their neighbours, 768 of many models, wider than a block."""

OCTAVES = (8, 512, 4096)
"""The longest row of each ``several_rows``: a kernel that gives a block two rows does so for blocks of one size."""

LONG = 32768
"""The longest row that is clean in ``long_rows``."""

LATE = 4096
"""The number of clean rows before the first wrong row of ``late_rows``."""

_MOST_ELEMENTS = 1 << 15  # of a case that is moved into a regime of wide rows


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The calls that have a planted fault.

    ``what`` completes the words of a fault: "the last column is left out, ``only from 64 rows on``". ``holds(x, weight,
    bias)`` decides for forward and backward. If there is a ``holds_dy(dy)``, a faulty backward must satisfy it as well,
    and ``holds`` is true for every forward. ``first_row``: the rows before it stay clean if the fault can be divided.
    ``why_not(op, dtype)``: why all calls of a cell, or none, are in the regime; else "". ``into(case)`` returns the
    case moved into the regime. ``width``: the least N of the regime; 0 for any N.
    """

    id: str
    what: str
    holds: Callable[[Tensor, Tensor, Tensor | None], bool]
    into: Callable[[Case], Case]
    holds_dy: Callable[[Tensor], bool] | None = None
    first_row: int = 0
    why_not: Callable[[str, str], str] = lambda op, dtype: ""
    width: int = 0


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _has_gaps(t: Tensor) -> bool:
    """Whether something lies between the rows of ``t``, (M, N) or (B, S, N)."""
    return t.stride(-2) > t.shape[-1]


def _tall(case: Case) -> Case:
    return replace(case, M=case.M if case.M >= TALL else TALL + case.M, N=min(case.N, 1025))


def _one_n(width: int, case: Case) -> Case:
    return replace(case, N=width, M=min(case.M, max(2, _MOST_ELEMENTS // width)))


def _several(octave: int, case: Case) -> Case:
    n = min(max(case.N, octave // 2 + 1), octave)
    return replace(case, N=n, M=min(max(case.M, 2), max(2, _MOST_ELEMENTS // n)))


def _long(case: Case) -> Case:
    return replace(case, N=LONG + 1 + case.N % LONG, M=min(case.M, 2))


def _late(case: Case) -> Case:
    return replace(case, M=LATE + max(1, case.M), N=case.N if case.N <= 300 else 5)


def _in_layout(one: str, case: Case) -> Case:
    """The case with a gap behind the rows of x or dy, or of both."""
    if case.layout in (one, "strided"):
        return case
    return replace(case, layout=(one, "strided")[case.seed % 2], gap=case.gap or (3, 8, 1)[case.seed % 3])


def _only_with_a_bias(op: str, dtype: str) -> str:
    return "" if OPS[op].takes_bias else "its ops never have a bias"


def _only_half(op: str, dtype: str) -> str:
    return "" if dtype != "fp32" else "beside an fp32 x the weights are always fp32"


_EVERY = (
    Regime(
        id="tall",
        what=f"only from {TALL} rows on",
        holds=lambda x, weight, bias: _rows(x) >= TALL,
        into=_tall,
    ),
    *(
        Regime(
            id=f"one_n:{width}",
            what=f"only where N is {width:,}",
            holds=lambda x, weight, bias, width=width: bool(x.shape[-1] == width),  # type: ignore[misc]
            into=partial(_one_n, width),
            width=width,
        )
        for width in WIDTHS
    ),
    *(
        Regime(
            id=f"several_rows:{octave}",
            what=f"only where N is {octave // 2 + 1:,} to {octave:,} and there are several rows",
            holds=lambda x, weight, bias, octave=octave: bool(octave // 2 < x.shape[-1] <= octave and _rows(x) > 1),  # type: ignore[misc]
            into=partial(_several, octave),
            width=octave // 2 + 1,
        )
        for octave in OCTAVES
    ),
    Regime(
        id="long_rows",
        what=f"only where N is above {LONG:,}",
        holds=lambda x, weight, bias: bool(x.shape[-1] > LONG),
        into=_long,
        width=LONG + 1,
    ),
    Regime(
        id="late_rows",
        what=f"only behind row {LATE:,}",
        holds=lambda x, weight, bias: _rows(x) > LATE,
        into=_late,
        first_row=LATE,
    ),
    Regime(
        id="no_bias",
        what="only without a bias",
        holds=lambda x, weight, bias: bias is None,
        into=lambda case: replace(case, bias=False),
        why_not=_only_with_a_bias,
    ),
    Regime(
        id="strided",
        what="only where rows of x have gaps between them",
        holds=lambda x, weight, bias: _has_gaps(x),
        into=partial(_in_layout, "x_strided"),
    ),
    Regime(
        id="dy_strided",
        what="only where rows of dy have gaps between them",
        holds=lambda x, weight, bias: True,
        holds_dy=_has_gaps,
        into=partial(_in_layout, "dy_strided"),
    ),
    Regime(
        id="fp32_weights",
        what="only with fp32 weights beside a half x",
        holds=lambda x, weight, bias: weight.element_size() > x.element_size(),
        into=lambda case: replace(case, weight_dtype="fp32"),
        why_not=_only_half,
    ),
)

REGIMES = {regime.id: regime for regime in _EVERY}
"""Id -> regime."""
