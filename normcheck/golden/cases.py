"""The fixed list of cases that are recorded: few and small, each able to show a fault that no other would.

A cell has about 3,000 elements. A line here never changes its meaning: a record is found again by its case line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from normcheck.cases.case import Case
from normcheck.cases.op import RELU6, Op
from normcheck.impls.implementation import Implementation


@dataclass(frozen=True)
class _Spec:
    """A case without op and dtype. ``bias``: whether it has one if the op leaves the choice, None: as is usual for it.

    With False it is a case only of the ops that usually have one.
    """

    M: int
    N: int
    rows: str
    dy: str = "normal"
    eps: float = 1e-5
    weights: str = "normal"
    fp32_weights: bool = False
    layout: str = "contiguous"
    gap: int = 0
    bias: bool | None = None


_ANY = (
    _Spec(5, 7, "normal"),
    _Spec(3, 1, "shifted", dy="shifted", eps=1e-1, bias=True),  # variance 0: rstd is 1 / sqrt(eps)
    _Spec(3, 129, "shifted", "shifted", layout="strided", gap=3, bias=True),  # a gap, and a row one past a block
    _Spec(1, 768, "tail", dy="correlated", weights="probe"),  # the last element decides
    _Spec(3, 40, "offset", eps=1e-3, bias=True),  # E[x^2] - mean^2 cancels
    _Spec(64, 8, "normal", dy="shifted", weights="small"),  # tall sums for dw and db
    _Spec(19, 24, "blend", dy="shifted", eps=1e-3, weights="small", bias=True),  # every kind of rows once
    _Spec(2, 96, "tiny_variance", eps=1e-1, fp32_weights=True),  # eps decides
    _Spec(6, 17, "outlier", dy="integers", layout="rank3"),
    _Spec(5, 24, "shifted", dy="shifted", bias=False),
    _Spec(3, 129, "normal", dy="shifted", layout="strided", gap=3, bias=False),
)
_CLAMPED = (
    _Spec(5, 7, "normal"),
    _Spec(3, 1, "shifted", dy="shifted", eps=1e-1),
    _Spec(3, 129, "normal", dy="shifted", layout="strided", gap=3),
    _Spec(1, 768, "tail", dy="correlated", weights="probe"),  # bits at exact ties
    _Spec(1, 768, "shifted", dy="shifted", eps=1e-3),  # one of the few N that cuDNN's graph takes
    _Spec(33, 32, "normal", dy="shifted", weights="small"),
    _Spec(19, 32, "blend", dy="shifted", eps=1e-3, weights="small"),
    _Spec(5, 24, "shifted", dy="shifted", bias=False),
)
_CLIPS = (RELU6, (-0.5, 2.0))


def cases(op: Op, implementation: Implementation, dtype: str) -> Iterator[Case]:
    """The cases of one cell. Cases of rank 3 or with gaps that it does not claim are left out or made contiguous."""
    for seed, spec in enumerate(_CLAMPED if op.clamped else _ANY, start=1):
        if spec.layout == "rank3" and 3 not in implementation.ranks:
            continue
        if spec.bias is False and not op.biases[0]:
            continue
        packed = spec.layout == "strided" and not implementation.strided
        yield Case(
            op=op.name,
            dtype=dtype,
            M=spec.M,
            N=spec.N,
            eps=spec.eps,
            rows=spec.rows,
            dy=spec.dy,
            layout="contiguous" if packed else spec.layout,
            seed=seed,
            weights=spec.weights,
            weight_dtype="fp32" if spec.fp32_weights and dtype != "fp32" else "same",
            bias=spec.bias if spec.bias in op.biases else op.biases[0],
            gap=0 if packed else spec.gap,
            options=op.clips(_CLIPS[seed % len(_CLIPS)]),
        )
