"""The fixed list of what is recorded: few and small, each there for what it alone would show.

About 3,000 elements a cell. A line here never changes its meaning: a record is found again by its case line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from normcheck.cases.case import Case
from normcheck.cases.ops.op import Op
from normcheck.impls.implementation import Implementation


@dataclass(frozen=True)
class _Telling:
    """A case without its cell. ``bias``: where the op may go without one."""

    M: int
    N: int
    rows: str
    dy: str = "normal"
    eps: float = 1e-5
    weights: str = "normal"
    fp32_weights: bool = False
    layout: str = "contiguous"
    gap: int = 0
    bias: bool = False


_ANY = (
    _Telling(5, 7, "normal"),
    _Telling(3, 1, "shifted", dy="shifted", eps=1e-1, bias=True),  # variance 0: rstd is 1 / sqrt(eps)
    _Telling(3, 129, "shifted", "shifted", layout="strided", gap=3, bias=True),  # one element past a block, and a gap
    _Telling(1, 768, "tail", dy="correlated", weights="probe"),  # the last element decides
    _Telling(3, 40, "offset", eps=1e-3, bias=True),  # E[x^2] - mean^2 cancels
    _Telling(64, 8, "normal", dy="shifted", weights="small"),  # tall sums for dw and db
    _Telling(19, 24, "blend", dy="shifted", eps=1e-3, weights="small", bias=True),  # every kind of rows once
    _Telling(2, 96, "tiny_variance", eps=1e-1, fp32_weights=True),  # eps decides
    _Telling(6, 17, "outlier", dy="integers", layout="rank3"),
)
_CLAMPED = (
    _Telling(5, 7, "normal"),
    _Telling(3, 1, "shifted", dy="shifted", eps=1e-1),
    _Telling(3, 129, "normal", dy="shifted", layout="strided", gap=3),
    _Telling(1, 768, "tail", dy="correlated", weights="probe"),  # bits at exact ties
    _Telling(1, 768, "shifted", dy="shifted", eps=1e-3),  # cuDNN's graph takes few N, and this is one
    _Telling(33, 32, "normal", dy="shifted", weights="small"),
    _Telling(19, 32, "blend", dy="shifted", eps=1e-3, weights="small"),
)
_CLIPS = ((0.0, 6.0), (-0.5, 2.0))


def cases(op: Op, implementation: Implementation, dtype: str) -> Iterator[Case]:
    """The cases of one cell; a layout that the implementation does not claim is left out or contiguous."""
    for seed, t in enumerate(_CLAMPED if op.clamped else _ANY, start=1):
        if t.layout == "rank3" and 3 not in implementation.ranks:
            continue
        packed = t.layout == "strided" and not implementation.strided
        clips = _CLIPS[seed % len(_CLIPS)]
        yield Case(
            op=op.name,
            dtype=dtype,
            M=t.M,
            N=t.N,
            eps=t.eps,
            rows=t.rows,
            dy=t.dy,
            layout="contiguous" if packed else t.layout,
            seed=seed,
            weights=t.weights,
            weight_dtype="fp32" if t.fp32_weights and dtype != "fp32" else "same",
            bias=t.bias if t.bias in op.biases else op.biases[0],
            gap=0 if packed else t.gap,
            options=(("lower_clip", clips[0]), ("upper_clip", clips[1])) if op.clamped else (),
        )
