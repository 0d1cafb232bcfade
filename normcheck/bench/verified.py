"""What is timed is verified first: a few cases of that very shape, dtype and weights, through the gate's own check."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch

from normcheck.bench.speed import Point
from normcheck.cases.case import Case
from normcheck.checks.attempt import run_case, too_large
from normcheck.checks.cell import Cell
from normcheck.checks.check import NO_MEMORY, Result, context_lost
from normcheck.checks.finding import finding
from normcheck.checks.probes import Depth
from normcheck.gate.plan import Plan
from normcheck.oracle.tolerances import table
from normcheck.result import Finding
from normcheck.runner.call import poisoned_memory

DATA = (
    ("normal", "normal", Depth.MEMORY),
    ("blend", "correlated", Depth.REASON),
    ("mean100", "shifted", Depth.REASON),
)
"""Rows, cotangents and what the probes are asked: plain data run twice, every kind of rows together, and an offset."""

_HALVINGS = 10
"""How often the rows of a case that memory has no room for are halved before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What became of the cases of a point: they passed where neither ``refused`` nor ``failure`` is set.

    ``point``: as it was verified and is to be timed. ``rows``: the fewest of a case. ``lost``: the GPU's context is.
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
        """Whether a number may be given."""
        return not self.refused and self.failure is None


def case_of(point: Point, *, rows: int = 0, seed: int = 0) -> Case:
    """The case of ``point`` with plain data, as it is timed; ``rows``: another number of rows."""
    return Case(
        op=point.op,
        dtype=point.dtype,
        M=rows or point.M,
        N=point.N,
        eps=point.eps,
        weight_dtype=point.weight_dtype,
        bias=point.bias,
        options=point.options,
        seed=seed,
    )


def verify(cell: Cell, point: Point, plan: Plan) -> Verified:
    """Verify ``point``, with fewer rows where memory does not suffice.

    Where the op always has a bias and the point has none, an implementation that needs one is given one, and the note
    says so: a missing bias is not among what it has to take.
    """
    found = _verified(cell, point, plan)
    needs_bias = found.refused or (found.failure is not None and found.failure.kind == "exception" and not found.lost)
    if point.bias or False in cell.op.biases or not needs_bias:
        return found
    reason = found.refused or (found.failure.message if found.failure is not None else "")
    reason = reason.removeprefix(f"{', '.join(case_of(point).unusual)}: ")  # it is the bias that is missing here
    again = _verified(cell, replace(point, bias=True), plan)
    return replace(again, note=f"timed with a bias, because without one: {reason}") if again.passed else found


def _verified(cell: Cell, point: Point, plan: Plan) -> Verified:
    rows = point.M
    missing: tuple[str, ...] = ()
    for number, (kind, dy, depth) in enumerate(DATA):
        case = replace(case_of(point, rows=rows, seed=number), rows=kind, dy=dy)
        result = _with_room(cell, case, plan, depth)
        rows = result.case.M
        if result.refused:
            return Verified(point=point, rows=rows, cases=number, refused=result.refused)
        if result.failed:
            lost = any(context_lost(problem) for problem in result.problems)
            found = finding(cell, result, plan.device, advise=not lost)
            return Verified(point=point, rows=rows, cases=number + 1, failure=found, lost=lost)
        missing = tuple(dict.fromkeys((*missing, *result.not_returned)))
    return Verified(point=point, rows=rows, cases=len(DATA), not_returned=missing)


def _with_room(cell: Cell, case: Case, plan: Plan, depth: Depth) -> Result:
    """The result of ``case``, or of as many of its rows as there is memory for."""
    for _ in range(_HALVINGS):
        if case.M == 1 or not too_large(case, plan.device):
            result = _tried(cell, case, plan, depth)
            if result is not None:
                return result
            if plan.device == "cuda":
                torch.cuda.empty_cache()
        if case.M == 1:
            break
        case = replace(case, M=case.M // 2)
    return Result(case, table().model, refused=f"not verified: no memory even for {case.M} of the rows")


def _tried(cell: Cell, case: Case, plan: Plan, depth: Depth) -> Result | None:
    """run_case; None where memory did not suffice, be it for the implementation or for its judge."""
    try:
        with poisoned_memory():
            result = run_case(cell, case, plan, depth=depth)
    except torch.OutOfMemoryError:
        gc.collect()
        return None
    short = NO_MEMORY in result.refused or any("out of memory" in problem.message for problem in result.problems)
    return None if short else result
