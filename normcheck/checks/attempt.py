"""One case of a cell under the plan's limits: whether it may run at all, and what became of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from normcheck.cases.case import Case
from normcheck.cases.claims import unclaimed
from normcheck.cases.data_kinds import ROWS
from normcheck.cases.inputs import SLAB_ELEMENTS
from normcheck.checks.cell import Cell, Setting
from normcheck.checks.check import Result, check
from normcheck.checks.contract import Problem
from normcheck.checks.probes import Depth
from normcheck.errors import Broken
from normcheck.oracle.judge import BLOCK_ELEMENTS, Expectation
from normcheck.oracle.tolerances import table
from normcheck.runner import call
from normcheck.runner.environment import memory
from normcheck.runner.time_limit import TimeIsUp, alarm

T = TypeVar("T")


def why_not(cell: Cell, device: str) -> str:
    """Why nothing of this cell can run on ``device``, or an empty string."""
    implementation = cell.implementation
    if cell.dtype not in implementation.dtypes:
        return f"declares only {', '.join(implementation.dtypes)}"
    return call.unavailable(implementation, device)


def run_case(
    cell: Cell,
    case: Case,
    plan: Setting,
    floors: Mapping[str, float] | None = None,
    depth: Depth = Depth.ROWS,
    watch: Callable[[Expectation], None] | None = None,
) -> Result:
    """One case, under the plan's timeout; what supports() says first. ``depth``: what the probes are asked.

    ``watch``: told of everything that is compared.
    """
    work = partial(check, cell.implementation, cell.op, case, plan.device, floors=floors, depth=depth, watch=watch)
    result, link = attempted(cell, case, plan, work), call.link_of(cell.implementation)
    return replace(result, after=link.before) if link is not None and result.failed else result


def run_alone(cell: Cell, case: Case, plan: Setting, depth: Depth = Depth.ROWS) -> Result:
    """As ``run_case``, in a new process if the implementation has one of its own."""
    link = call.link_of(cell.implementation)
    if link is not None:
        link.close()
    return run_case(cell, case, plan, depth=depth)


def attempted(cell: Cell, case: Case, plan: Setting, work: Callable[[], T]) -> T | Result:
    """``work``, which calls the implementation, where the case may run; a result that says why it did not end."""
    refused = unclaimed(cell.op, cell.implementation, case) or too_large(case, plan.device)
    if refused:
        return Result(case, table().model, refused=refused)
    link = call.link_of(cell.implementation)
    if link is not None:
        link.limit(plan.timeout, case)
    try:
        with alarm(plan.timeout) if link is None else nullcontext():
            reason = call.supports(cell.implementation, case)
            if reason is not None:
                return Result(case, table().model, refused=reason or "supports(case) gave no reason")
            return work()
    except TimeIsUp:
        message = f"no result after timeout={plan.timeout:g} s"
        return Result(case, table().model, problems=(Problem("timeout", "", message),))
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return Result(case, table().model, refused="judging it needs more of the GPU's memory than is free")
    except Broken as broken:
        problem = Problem(broken.kind, broken.output, broken.message, broken.frames)
        return Result(case, table().model, problems=(problem,))


_MAKING, _JUDGING = 64, 600
"""Bytes of temporaries in fp64 for an element that is made, and for one that is judged: measured, for one long row."""


def too_large(case: Case, device: str) -> str:
    """Why the tensors of a case would not fit: a case line may ask for anything."""
    strided = {"strided": 2, "rank3_strided": 2, "x_strided": 1, "dy_strided": 1}.get(case.layout, 0)
    rows = max(case.M, 1)  # without rows there are still weights, bands as long as a row, and a gap
    elements = rows * (16 * case.N + 6 * strided * case.gap)  # inputs and copies, outputs, gradients, all of it twice
    needed = elements * (4 if case.dtype == "fp32" else 2)
    needed += _MAKING * min(rows * case.N, max(SLAB_ELEMENTS, len(ROWS) * case.N))
    needed += _JUDGING * min(rows * case.N, max(BLOCK_ELEMENTS[device], case.N))
    there = memory(device)
    return f"needs about {needed / 2**30:.1f} GiB of {there / 2**30:.1f} GiB" if needed > there else ""


def died(result: Result) -> bool:
    """Whether the implementation's process had to be started anew."""
    return any(p.kind in ("timeout", "crash") for p in result.problems)


def timed_out(result: Result) -> bool:
    """Whether a case was given up for its time."""
    return any(p.kind == "timeout" for p in result.problems)
