"""Compiling all points of a suite before the first is timed: in processes, one for each core, on a GPU.

What they compile lies in the compilers' own caches on disk when this process asks for it, and cuDNN's plans on a shelf.
Nothing that happens to them touches a verdict or a time: they have ended by then. Meanwhile this process builds what
would be lost with another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context

from normcheck.bench.speed import Point
from normcheck.bench.verified import case_of
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.claims import unclaimed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.impls import discovery
from normcheck.runner.arena import Surroundings
from normcheck.runner.run import LocalRun

IN_PROCESS = ("cudnn_graph",)
"""Implementations whose library keeps what it builds in the process that has built it."""

FEWEST = 8
"""With fewer jobs the processes take longer to start than they save."""


@dataclass(frozen=True, slots=True)
class Job:
    """A call to make once: of implementation ``name`` of ``op``, found by ``spec``, for the case of ``line``."""

    spec: str
    op: str
    name: str
    line: str
    device: str


def jobs_of(points: Sequence[Point], cells: Mapping[tuple[str, str], Sequence[Cell]], device: str) -> list[Job]:
    """A job for each implementation at each point that it declares to take, as ``verified.verify`` will call it.

    A call beyond that may end the GPU's context: a graph of cuDNN's that needs a bias reads one that is not there.
    """
    return [
        Job(cell.spec, point.op, cell.implementation.name, str(case), device)
        for point in points
        for cell in cells[point.op, point.dtype]
        if (case := _claimed(cell, point)) is not None
    ]


def _claimed(cell: Cell, point: Point) -> Case | None:
    """The case of ``point``, or else the one with a bias, if ``cell`` declares to take it."""
    cases = [case_of(point)] + [case_of(replace(point, bias=True))] * cell.op.takes_bias
    return next((case for case in cases if not unclaimed(cell.op, cell.implementation, case)), None)


def compile_all(jobs: Sequence[Job], processes: int = 0) -> int:
    """Make every call once, in so many processes, by default one for each core but one -> how many were made.

    Those of ``IN_PROCESS`` are made here. A job that fails is left to the bench, which says why.
    """
    here = [job for job in jobs if job.name in IN_PROCESS]
    others = [job for job in jobs if job.name not in IN_PROCESS]
    processes = min(processes or len(os.sched_getaffinity(0)) - 1, len(others))
    if len(jobs) < FEWEST or processes < 2:
        return 0
    done = 0
    with suppress(BrokenProcessPool), ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(_call, others)
        done += sum(map(_call, here))
        done += sum(results)
    return done


def _call(job: Job) -> bool:
    """Call forward and backward of a job once; whether they returned."""
    try:
        found = discovery.select(job.spec, (job.op,))
        implementation = next(i for i in found if (i.op, i.name) == (job.op, job.name))
        case = parsed(job.line)
        inputs = make(case, OPS[job.op], job.device)
        run = LocalRun(implementation, Surroundings())
        forward = run.forward(case, inputs).result()
        if implementation.backward is None:
            forward.by_autograd(inputs.cotangents)
        else:
            run.backward(case, inputs, forward.outputs).result()
    except Exception:  # whatever it is: the bench makes the same call, and says what is wrong
        return False
    return True
