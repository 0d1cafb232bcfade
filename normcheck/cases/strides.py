"""How far apart the rows of each tensor of a case lie. If one of two lies so alone, the seed says which.

A kernel may take the strides of one for both.
"""

from __future__ import annotations

from normcheck.cases.case import Case
from normcheck.cases.layouts import EXPANDED
from normcheck.cases.ops import OPS


def of_residual(case: Case) -> bool:
    """Whether the residual lies apart in place of x, and its cotangent apart, or expanded, in place of dy."""
    return OPS[case.op].adds_residual and case.seed % 2 == 1


def gap_of(case: Case, name: str) -> int:
    """The elements behind each row of x, of dy, or of what has their shape."""
    like = {"residual": "x", "dresidual_out": "dy"}.get(name, name)
    if case.layout in ("x_strided", "dy_strided"):
        apart = {"x_strided": ("x", "residual"), "dy_strided": ("dy", "dresidual_out")}[case.layout]
        return case.gap * (name == apart[of_residual(case)])
    if case.layout == "rank3_strided" and case.seed % 2:
        return case.gap * (like == ("x", "dy")[case.seed // 2 % 2])
    return case.gaps[like]


def expands(case: Case, name: str) -> bool:
    """Whether all rows of this cotangent share one memory."""
    return case.layout in EXPANDED and name == ("dy", "dresidual_out")[of_residual(case)]


def gate_gap(case: Case) -> int:
    """The elements behind each row of a gate: as many as behind those of x, or twice as many, by turns of the seed."""
    return (1 + case.seed % 2) * case.gaps["dy"]


def modulation_stride(case: Case, name: str = "scale") -> int:
    """The row stride of scale and shift: that of a sixth of a projection if dy is strided, else they are packed. With
    an odd seed ``scale`` alone is such a sixth.
    """
    return case.N * (6 if case.gaps["dy"] and (name == "scale" or case.seed % 2 == 0) else 1)


def angle_stride(case: Case) -> int:
    """The row stride of cos and sin: that of one half of a cache of both if dy is strided, else they are packed."""
    return case.of_heads.pairs * (2 if case.gaps["dy"] else 1)
