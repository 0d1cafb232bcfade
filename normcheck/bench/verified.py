"""Verifying a point before it is timed: a few cases of its shape, dtype and weights, by the gate's own check."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from normcheck.bench.speed import Point
from normcheck.cases.case import GIVEN_SCALES, NO_WEIGHT, RETURNED, Case, unusual
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.cases.split import HEAD_COLUMNS, KV_HEADS, ROTARY_PARTS
from normcheck.checks import gpu_memory
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case, too_large
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, context_lost
from normcheck.checks.finding import finding
from normcheck.gate.plan import Plan
from normcheck.impls.implementation import Implementation
from normcheck.oracle.tolerances import table
from normcheck.result import Finding
from normcheck.runner.call import poisoned_memory

DATA = (
    ("normal", "normal", Depth.MEMORY),
    ("blend", "correlated", Depth.REASON),
    ("mean100", "shifted", Depth.REASON),
)
"""Kind of rows, kind of dy and depth of the probes: plain data run twice, every kind of rows together, an offset."""

_MOST_HALVINGS = 10
"""How often the rows of a case that does not fit into memory are halved before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPoint:
    """The result of verifying a point: it passed if neither ``refused`` nor ``failure`` is set.

    ``point``: as it was verified and is to be timed. ``rows``: the fewest rows of a case. ``lost``: whether the GPU's
    context was lost. ``note``: what else a reader of the number must know.
    """

    point: Point
    rows: int
    cases: int = 0
    not_returned: tuple[str, ...] = ()
    refused: str = ""
    failure: Finding | None = None
    lost: bool = False
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the point may be timed."""
        return not self.refused and self.failure is None


def case_of(point: Point, *, rows: int = 0, seed: int = 0) -> Case:
    """The case of ``point`` with plain data, as it is timed; ``rows``: M, if it is not the point's."""
    weighted = True in OPS[point.op].weights_of((True,))
    return Case(
        op=point.op,
        dtype=point.dtype,
        M=rows or point.M,
        N=point.N,
        eps=point.eps,
        weights="normal" if weighted else NO_WEIGHT,
        weight_dtype=point.weight_dtype if weighted else "same",
        bias=point.bias,
        options=point.options,
        scale=GIVEN_SCALES[0] if point.scale == "given" else RETURNED,
        samples="few" if OPS[point.op].modulated else "",
        channels="root" if OPS[point.op].grouped else "",
        groups="few" if OPS[point.op].grouped else "",
        **(_HEADS if OPS[point.op].rotary else {}),
        seed=seed,
    )


_HEADS: Mapping[str, Any] = {
    "head": HEAD_COLUMNS[1],
    "kv_heads": KV_HEADS[0],
    "rotary": ROTARY_PARTS[0],
    "angles": "normal",
}
"""How a token of a point is split: heads of 128 columns, four of q to one of k, all of it rotated."""


def scale_of(implementation: Implementation) -> str:
    """``Point.scale`` of an implementation that returns codes."""
    model = implementation.model
    return str(model.get("scale", "given")) if isinstance(model, Mapping) else "given"


def verify(cell: Cell, point: Point, plan: Plan) -> VerifiedPoint:
    """Verify ``point``, with fewer rows if memory does not suffice.

    If the point has no bias, an implementation that refuses that gets one, with a note.
    """
    result = _verified(cell, point, plan)
    if point.bias or not (result.refused and cell.op.takes_bias):
        return result
    with_bias = _verified(cell, replace(point, bias=True), plan)
    reason = result.refused.removeprefix(f"{', '.join(unusual(case_of(point)))}: ")  # the table names these already
    note = f"timed with a bias, because without one: {reason}"
    return replace(with_bias, note=note) if with_bias.passed else result


def _verified(cell: Cell, point: Point, plan: Plan) -> VerifiedPoint:
    rows = point.M
    missing: tuple[str, ...] = ()
    for number, (kind, dy, depth) in enumerate(DATA):
        case = replace(case_of(point, rows=rows, seed=number), rows=kind, dy=dy)
        result = _with_room(cell, case, plan, depth)
        rows = result.case.M
        if result.refused:
            return VerifiedPoint(point=point, rows=rows, cases=number, refused=result.refused)
        if result.failed:
            lost = any(context_lost(problem) for problem in result.problems)
            failure = finding(cell, result, plan.device, advise=not lost)
            return VerifiedPoint(point=point, rows=rows, cases=number + 1, failure=failure, lost=lost)
        missing = tuple(dict.fromkeys((*missing, *result.not_returned)))
    return VerifiedPoint(point=point, rows=rows, cases=len(DATA), not_returned=missing)


def _with_room(cell: Cell, case: Case, plan: Plan, depth: Depth) -> Result:
    """The result of ``case``, with its rows halved until there is enough memory."""
    for _ in range(_MOST_HALVINGS):
        if case.M == 1 or not too_large(case, plan.device):
            result = _result_if_room(cell, case, plan, depth)
            if result is not None:
                return result
            if plan.device == "cuda":
                torch.cuda.empty_cache()
        if case.M == 1:
            break
        case = replace(case, M=case.M // 2)
    return Result(case, table().model, refused=f"not verified: no memory even for {case.M} of the rows")


def _result_if_room(cell: Cell, case: Case, plan: Plan, depth: Depth) -> Result | None:
    """The result of ``case``; None if the implementation or its judge ran out of memory."""
    try:
        with poisoned_memory():
            result = run_case(cell, case, plan, Ask(depth))
    except torch.OutOfMemoryError:
        gc.collect()
        return None
    short = gpu_memory.IN_USE in result.refused or any(
        "out of memory" in problem.message for problem in result.problems
    )
    return None if short else result
