"""Run one case of a cell under the plan's limits of time and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
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
from normcheck.oracle.compare import Expectation
from normcheck.oracle.judge import BLOCK_ELEMENTS
from normcheck.oracle.tolerances import table
from normcheck.runner import call
from normcheck.runner.environment import memory_bytes
from normcheck.runner.session import session_of
from normcheck.runner.time_limit import TimeIsUp

T = TypeVar("T")


def why_not(cell: Cell, device: str) -> str:
    """Why no case of this cell can run on ``device`` ("cpu" or "cuda"), or an empty string."""
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
    """Run one case under the plan's timeout, unless ``supports(case)`` refuses it. ``depth``: how far it is probed.

    ``floors``: output -> ratio below which details are not needed; ``watch`` is called with all that is compared.
    """
    work = partial(check, cell.implementation, cell.op, case, plan.device, floors=floors, depth=depth, watch=watch)
    result = attempted(cell, case, plan, work)
    return replace(result, after=session_of(cell.implementation).before) if result.failed else result


def run_alone(cell: Cell, case: Case, plan: Setting, depth: Depth = Depth.ROWS) -> Result:
    """Like ``run_case``, but in a new process if the implementation has a process of its own."""
    session_of(cell.implementation).restart()
    return run_case(cell, case, plan, depth=depth)


def attempted(cell: Cell, case: Case, plan: Setting, work: Callable[[], T]) -> T | Result:
    """The value of ``work``, which calls the implementation; a Result with the reason if the case cannot run or end."""
    refused = unclaimed(cell.op, cell.implementation, case) or too_large(case, plan.device)
    if refused:
        return Result(case, table().model, refused=refused)
    try:
        with session_of(cell.implementation).case(case, plan.timeout):
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


_MAKING_BYTES, _JUDGING_BYTES = 64, 600
"""Bytes of fp64 temporaries for each element that is made, and for each that is judged: measured on one long row."""


def too_large(case: Case, device: str) -> str:
    """Why the tensors of a case would not fit into memory, or an empty string; a case line may ask for any size."""
    strided = {"strided": 2, "rank3_strided": 2, "x_strided": 1, "dy_strided": 1}.get(case.layout, 0)
    rows = max(case.M, 1)  # a case without rows has weights, bands as long as a row, and a gap
    elements = rows * (16 * case.N + 6 * strided * case.gap)  # inputs and copies, outputs, gradients, all of it twice
    needed = elements * (4 if case.dtype == "fp32" else 2)
    needed += _MAKING_BYTES * min(rows * case.N, max(SLAB_ELEMENTS, len(ROWS) * case.N))
    needed += _JUDGING_BYTES * min(rows * case.N, max(BLOCK_ELEMENTS[device], case.N))
    available = memory_bytes(device)
    return f"needs about {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB" if needed > available else ""


def died(result: Result) -> bool:
    """Whether the case ended the implementation's process, which had to be restarted."""
    return any(p.kind in ("timeout", "crash") for p in result.problems)


def timed_out(result: Result) -> bool:
    """Whether the case reached its timeout."""
    return any(p.kind == "timeout" for p in result.problems)
