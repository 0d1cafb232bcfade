"""How far apart the rows of each tensor of a case lie. If one of two lies so alone, the seed says which.

A kernel may take the strides of one for both.
"""

from __future__ import annotations

from normcheck.cases.case import Case
from normcheck.cases.layouts import EXPANDED
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import GATE, RESIDUAL, SCALE


def of_residual(case: Case) -> bool:
    """Whether the residual lies apart in place of x, and its cotangent apart, or expanded, in place of dy."""
    return OPS[case.op].adds_residual and case.seed % 2 == 1


def of_partner(case: Case) -> str:
    """What lies apart where x alone does: with an odd seed what is read beside it, if the op has that."""
    op = OPS[case.op]
    partner = RESIDUAL if op.adds_residual else GATE if op.gated else SCALE if op.modulated else "x"
    return partner if case.seed % 2 else "x"


def gap_of(case: Case, name: str) -> int:
    """The elements behind each row of x, of dy, or of what has their shape."""
    like = {RESIDUAL: "x", "dresidual_out": "dy", GATE: "dy"}.get(name, name)
    if case.layout == "x_strided":
        return case.gap * (name == of_partner(case))
    if case.layout == "dy_strided":
        if name == GATE:
            return case.gap * (case.seed % 3)
        return case.gap * (name == ("dy", "dresidual_out")[of_residual(case)])
    if case.layout == "strided" and case.seed % 2:  # each has its own
        return case.gap * (2 if name in ("dy", RESIDUAL, GATE) else 1)
    if case.layout == "rank3_strided" and case.seed % 2:
        return case.gap * (like == ("x", "dy")[case.seed // 2 % 2])
    return case.gaps[like]


def expands(case: Case, name: str) -> bool:
    """Whether all rows of this cotangent share one memory."""
    return case.layout in EXPANDED and name == ("dy", "dresidual_out")[of_residual(case)]


def modulation_stride(case: Case, name: str = SCALE) -> int:
    """The row stride of scale and shift: that of a sixth of a projection if dy is strided, else they are packed. With
    an odd seed ``scale`` alone is such a sixth, beside an x that is strided alone as well.
    """
    alone = name == SCALE and case.layout == "x_strided" and of_partner(case) == SCALE
    return case.N * (6 if alone or (case.gaps["dy"] and (name == SCALE or case.seed % 2 == 0)) else 1)


def angle_stride(case: Case) -> int:
    """The row stride of cos and sin: that of one half of a cache of both if dy is strided, else they are packed."""
    return case.of_heads.pairs * (2 if case.gaps["dy"] else 1)
