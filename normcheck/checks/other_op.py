"""Whether a kernel whose y has a dtype that its op has not computes another op, which its user may mean: Llama's
RMSNorm. What else an op differs in, the values show: see ``diagnosis``.
"""

from __future__ import annotations

from dataclasses import fields, replace

from normcheck.cases.claims import unclaimed
from normcheck.cases.depth import Depth
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check

_CASTINGS = ("name", "rounds_xhat", "zero_centered", "biases", "formula", "source")
"""The fields of an op in which one that may be meant differs."""

_PLAIN = {"M": 5, "N": 40, "rows": "normal", "dy": "normal", "weights": "normal", "layout": "contiguous", "gap": 0}
"""A case that shows whether a weight is rounded, or 1 is added to it: one of a single element may do so by chance."""


def advice(cell: Cell, result: Result, device: str) -> str:
    """The advice to name the op by which this very case, and a plain one, are right; "" if there is none."""
    case = result.case
    if case.bias or not case.weight or callable(cell.implementation.model) or cell.implementation.model:
        return ""
    for other in OPS.values():
        if other is cell.op or not _is_alike(other, cell.op):
            continue
        own = replace(case, op=other.name)
        asked = (own, replace(own, **_PLAIN))  # type: ignore[arg-type]
        if any(unclaimed(other, cell.implementation, each) for each in asked):
            continue
        tried = [check(cell.implementation, other, each, device, Ask(Depth.OFF)) for each in asked]
        if not any(each.failed or each.refused for each in tried):
            return f"It is right as {other.name}, see normcheck list: if that is meant, name it, --op {other.name}."
    return ""


def _is_alike(one: Op, other: Op) -> bool:
    return all(getattr(one, f.name) == getattr(other, f.name) for f in fields(Op) if f.name not in _CASTINGS)
