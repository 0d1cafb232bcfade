"""Run one case of a cell under the plan's limits of time and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from normcheck.cases.case import HUGE_ELEMENTS, Case
from normcheck.cases.claims import layouts_of, unclaimed
from normcheck.cases.data_kinds import ROWS
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import torch_dtype
from normcheck.cases.of_samples import SLAB_ELEMENTS
from normcheck.cases.ops import OPS
from normcheck.checks import gpu_memory
from normcheck.checks.ask import FULLY, Ask
from normcheck.checks.cell import Cell, Setting
from normcheck.checks.check import Result, check
from normcheck.checks.contexts import UNTRIED, Tried, tried
from normcheck.checks.contract import Problem
from normcheck.circumstances import HELD, NOT_TRIED, TOLD, WRONG, InContext
from normcheck.contexts.catalogue import CONTEXTS
from normcheck.errors import Broken, UnsupportedCase
from normcheck.impls.implementation import NotImported
from normcheck.oracle.conventions import with_convention
from normcheck.oracle.judge import BLOCK_ELEMENTS
from normcheck.oracle.judging import FUSED
from normcheck.oracle.tolerances import table
from normcheck.result import CONTEXT
from normcheck.runner import call
from normcheck.runner.environment import memory_bytes
from normcheck.runner.session import session_of
from normcheck.runner.time_limit import TimeIsUp

T = TypeVar("T")


def why_not(cell: Cell, device: str) -> str:
    """Why no case of this cell can run on ``device`` ("cpu" or "cuda"), or an empty string.

    Raises ImportFailed if there is no implementation because it cannot be imported.
    """
    implementation = cell.implementation
    if isinstance(implementation.forward, NotImported):
        implementation.forward()
    if cell.dtype not in implementation.dtypes:
        return f"declares only {', '.join(implementation.dtypes)}"
    if not layouts_of(cell.op, implementation, cell.layouts):
        has = layouts_of(cell.op, implementation)
        return f"layout={', '.join(cell.layouts)}: declares only {', '.join(has)}"
    return call.unavailable(implementation, device)


def run_case(cell: Cell, case: Case, plan: Setting, ask: Ask = FULLY) -> Result:
    """Run one case under the plan's timeout, unless ``supports(case)`` refuses it.

    A case that is right is called again in the contexts of the plan.
    """
    most = deepest(case)
    ask = replace(ask, depth=most if ask.depth.reaches(most) else ask.depth, fused=plan.judge == FUSED)
    work = partial(check, cell.implementation, cell.op, case, plan.device, ask)
    result = attempted(cell, case, plan, work)
    for name in plan.within:
        if not (result.failed or result.refused):
            result = _in_context(cell, result, plan, name)
    return replace(result, after=session_of(cell.implementation).before) if result.failed else result


def _in_context(cell: Cell, result: Result, plan: Setting, name: str) -> Result:
    """``result``, with how the case did in a context. What goes wrong there is a problem of that context."""
    case, context = result.case, CONTEXTS[name]
    if plan.device not in context.devices:
        needed = "a GPU" if context.devices == ("cuda",) else "a CPU"
        return _with_context(result, name, InContext(status=NOT_TRIED, why=f"it takes {needed}"))
    held_to = name in (*plan.held_to, *cell.implementation.contexts)
    asked = plan.asked or held_to
    models = tuple(with_convention(result.model, each) for each in result.conventions or ((),))
    work = partial(tried, cell.implementation, cell.op, case, plan.device, models, name, asked=asked)
    done = attempted(cell, case, plan, work, most=context.seconds)
    if isinstance(done, Result):
        if done.refused:
            return _with_context(result, name, InContext(status=NOT_TRIED, why=done.refused))
        first = done.problems[0]
        done = Tried(Problem(CONTEXT, first.output, first.message, first.frames, name), "", 0)
    result = replace(result, launched=done.launched or result.launched)
    if done.problem is None and done.prevented and held_to:
        done = replace(done, problem=Problem(CONTEXT, "", f"{UNTRIED}: {done.not_tried}", check=name))
    if done.problem is None:
        status = HELD if done.steps else NOT_TRIED
        return _with_context(result, name, InContext(status=status, cases=int(done.steps > 0), why=done.not_tried))
    if context.told and not asked:
        return _with_context(result, name, InContext(status=TOLD, cases=1, why=done.problem.message))
    found = _with_context(result, name, InContext(status=WRONG, cases=1, why=done.problem.message))
    return replace(found, problems=(*found.problems, done.problem))


def _with_context(result: Result, name: str, how: InContext) -> Result:
    return replace(result, contexts={**result.contexts, name: how})


def run_alone(cell: Cell, case: Case, plan: Setting, ask: Ask = FULLY) -> Result:
    """Like ``run_case``, but in a new process if the implementation has a process of its own."""
    session_of(cell.implementation).restart()
    return run_case(cell, case, plan, ask)


def attempted(cell: Cell, case: Case, plan: Setting, work: Callable[[], T], most: float = 0.0) -> T | Result:
    """The value of ``work``, which calls the implementation; a Result with the reason if the case cannot run or end.

    ``most``: seconds within which even what compiles must end, if that is less than the plan's timeout; 0 for none.
    """
    seconds, first_calls = plan.timeout, plan.first_calls
    if 0 < most < seconds:
        seconds, first_calls = most, 1.0
    refused = unclaimed(cell.op, cell.implementation, case)
    if not (refused or case.huge or case.small):
        refused = too_large(case, plan.device)
        if refused and plan.device == "cuda":
            refused = _too_large_yet(case)
    if refused:
        return Result(case, table().model, refused=refused)
    try:
        with session_of(cell.implementation).case(case, seconds, first_calls):
            refused = _no_room(case, plan.device) if case.huge else ""
            if refused:
                return Result(case, table().model, refused=refused)
            reason = call.supports(cell.implementation, case)
            if reason is not None:
                return Result(case, table().model, refused=reason or "supports(case) gave no reason")
            return work()
    except TimeIsUp:
        message = f"no result after timeout={seconds:g} s"
        return Result(case, table().model, problems=(Problem("timeout", "", message),))
    except torch.OutOfMemoryError:
        pass
    except UnsupportedCase as unsupported:  # in a context, as memory that was there is another's now
        return Result(case, table().model, refused=str(unsupported))
    except Broken as broken:
        if short := gpu_memory.others_have_it(broken, case, plan.device):
            return Result(case, table().model, refused=short)
        problem = Problem(broken.kind, broken.output, broken.message, broken.frames)
        return Result(case, table().model, problems=(problem,))
    # Only here, behind the handler, nobody holds the frames in which the memory ran out, and their tensors.
    gc.collect()
    torch.cuda.empty_cache()
    words = _shortage(_needed(case, plan.device), memory_bytes(plan.device))
    return Result(case, table().model, refused=f"judging it {words} of the GPU's memory")


def deepest(case: Case) -> Depth:
    """How far a case can be probed: further runs cost memory, and the time of as many cases."""
    if case.huge:
        return Depth.OFF
    return Depth.REASON if case.room > HUGE_ELEMENTS else Depth.ROWS


_MAKING_BYTES, _JUDGING_BYTES = 64, 600
"""Bytes of fp64 temporaries for each element that is made, and for each that is judged: measured on one long row."""

_INPUTS, _Y, _DX = 2, 3, 5
"""Of a huge case on a GPU: copies of x and of dy, the original and the one that both processes use; of y, in the
kernel's process, in shared memory and here; of dx, the same, and two of a backward's second call. Without a second run
of the kernel this is all, beside what the kernel itself needs."""

_MASK_BYTES = 5
"""For each element of a clamped op: its bits, those in doubt and at a tie, and the mask on its way."""


def too_large(case: Case, device: str) -> str:
    """Why the tensors of a case would not fit into memory, or an empty string; a case line may ask for any size."""
    needed, there = _needed(case, device), memory_bytes(device)
    return _shortage(needed, there) if needed > there else ""


def _shortage(needed: int, there: int) -> str:
    return f"needs about {needed / 2**30:.1f} GiB of {there / 2**30:.1f} GiB"


def _no_room(case: Case, device: str) -> str:
    """``too_large``, once a process that has just ended has given back its memory on the GPU."""
    end = time.monotonic() + (_ENDING_SECONDS if device == "cuda" else 0.0)
    while (reason := too_large(case, device)) and time.monotonic() < end:
        if _needed(case, device) > torch.cuda.mem_get_info()[1]:
            break
        if not _too_large_yet(case):
            return ""
        time.sleep(0.1)
    return reason


def _too_large_yet(case: Case) -> str:
    """``too_large`` on a GPU, once those tensors of earlier cases are given back that only a cycle of objects holds."""
    gc.collect()
    torch.cuda.empty_cache()
    return too_large(case, "cuda")


_ENDING_SECONDS = 5.0


def _needed(case: Case, device: str) -> int:
    """Bytes that a case takes, of the GPU's memory if it runs there."""
    rows = max(case.M, 1)  # a case without rows has weights, bands as long as a row, and a gap
    item = torch_dtype(case.dtype).itemsize
    if case.huge and device == "cuda":
        op = OPS[case.op]
        y = max(torch_dtype(name).itemsize for name in op.y_dtypes(case.dtype, case.weight_format))
        inputs = sum(rows * (case.N + gap) * item for gap in case.gaps.values())
        tensors = _INPUTS * inputs + rows * case.N * (_Y * y + _DX * item + _MASK_BYTES * op.clamped)
    else:
        gaps = sum(case.gaps.values())
        tensors = rows * (16 * case.N + 6 * gaps) * item  # inputs and copies, outputs, gradients, all of it twice
    tensors += tensors * bool(OPS[case.op].by_name)  # as many again, with sums or activations
    making = _MAKING_BYTES * min(rows * case.N, max(SLAB_ELEMENTS, len(ROWS) * case.N))
    return tensors + making + _JUDGING_BYTES * min(rows * case.N, max(BLOCK_ELEMENTS[device], case.N))


def died(result: Result) -> bool:
    """Whether the case ended the implementation's process, which had to be restarted."""
    return any(p.kind in ("timeout", "crash") for p in result.problems)


def timed_out(result: Result) -> bool:
    """Whether the case reached its timeout."""
    return any(p.kind == "timeout" for p in result.problems)
