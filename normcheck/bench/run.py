"""``normcheck bench``: GB/s of forward and backward, point by point, and only of what passed there just before."""

from __future__ import annotations

import gc
import math
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from normcheck.bench import files, plot
from normcheck.bench import report as report
from normcheck.bench.calls import copy_times, graphs_stay, times_of
from normcheck.bench.plan import BenchRequest, cells_of, suite_for
from normcheck.bench.speed import BACKWARD, DIRECTIONS, ERROR, FAIL, MEASURED, SKIP, Bench, Point, Speed, Times
from normcheck.bench.suites import Suite
from normcheck.bench.timing import METHOD
from normcheck.bench.verified import Verified, case_of, verify
from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import context_lost
from normcheck.checks.contract import Problem
from normcheck.errors import Broken, UnsupportedCase, UsageError
from normcheck.gate.decision import BROKEN, FOUND, INTERRUPTED, NOTHING, PASS
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.request import check_timeout, targets
from normcheck.result import Finding
from normcheck.runner.call import refusal
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment

_NO_MEMORY = "no memory to time it"


def bench(request: BenchRequest, argv: tuple[str, ...]) -> int:
    """Measure what ``request`` asks for; returns the exit code. Raises UsageError before anything runs."""
    begun = time.perf_counter()
    wanted = targets(request.reports, files.FORMATS)
    if any(target.format == "png" for target in wanted):
        plot.check(target.path for target in wanted if target.format == "png")
    check_timeout(request.timeout)
    if request.time_budget is not None and not 0 < request.time_budget <= 1e6:
        raise UsageError(f"time_budget={request.time_budget:g}: expected seconds > 0")
    device = device_for(request.device)
    suite = suite_for(request, device)
    ways = cells_of(request, suite)
    stream = sys.stderr if any(target.path == "-" for target in wanted) else sys.stdout
    until = begun + request.time_budget if request.time_budget else math.inf
    run = _Run(Plan((), PROFILES["quick"], 0, device, request.timeout), suite, until)
    speeds, complete = _measured(run, ways, report.progress(report.console_for(sys.stderr)))
    done = Bench(
        argv=argv,
        suite=suite.name,
        source=suite.source,
        device=device,
        seconds=time.perf_counter() - begun,
        environment=environment(device),
        counting={direction: count.text for direction, count in suite.counts.items()},
        method=METHOD[device],
        speeds=tuple(speeds),
        exit_code=exit_code(speeds, complete=complete),
        complete=complete,
    )
    written = [files.write(done, target.format, target.path) for target in wanted]
    report.render(done, report.console_for(stream))
    return done.exit_code if done.exit_code or all(written) else BROKEN


def exit_code(speeds: Sequence[Speed], *, complete: bool) -> int:
    """As of ``verify``: a finding decides first, then a fault of normcheck itself, then whether there is a number."""
    statuses = {speed.status for speed in speeds}
    if not complete:
        return INTERRUPTED
    if FAIL in statuses:
        return FOUND
    if ERROR in statuses:
        return BROKEN
    return PASS if MEASURED in statuses else NOTHING


@dataclass
class _Run:
    """What a run needs and remembers: the ``copies`` by their bytes, and who ``lost`` the GPU's context."""

    plan: Plan
    suite: Suite
    until: float
    copies: dict[int, Times] = field(default_factory=dict)
    lost: str = ""


def _measured(
    run: _Run, ways: dict[tuple[str, str], list[Cell]], show: Callable[[str], None]
) -> tuple[list[Speed], bool]:
    """Every speed, and whether all were reached before somebody interrupted."""
    speeds: list[Speed] = []
    jobs = [(point, cell) for point in run.suite.points for cell in ways[point.op, point.dtype]]
    try:
        with graphs_stay():
            for number, (point, cell) in enumerate(jobs, 1):
                where = f"{point.op} {point.dtype} M={point.M} N={point.N} {cell.implementation.name}"
                show(f"[{number}/{len(jobs)}] {where}")
                speeds += _speeds(run, point, cell)
    except KeyboardInterrupt:
        return speeds, False
    finally:
        show("")
    return speeds, True


def _speeds(run: _Run, point: Point, cell: Cell) -> list[Speed]:
    """Both directions of one implementation at one point. A fault of normcheck itself is an ``error``."""
    blank = [
        Speed(
            point=point,
            implementation=cell.implementation.name,
            direction=direction,
            status=SKIP,
            bytes=run.suite.counts[direction].bytes(point),
        )
        for direction in DIRECTIONS
    ]
    try:
        for speed in blank:
            if speed.bytes not in run.copies and not run.lost:
                run.copies[speed.bytes] = copy_times(speed.bytes, run.plan.device)
        with_copies = [replace(speed, copy_times=run.copies.get(speed.bytes)) for speed in blank]
        reason = _why_not(run, cell)
        if reason:
            return [replace(speed, detail=reason) for speed in with_copies]
        return _proven_speeds(run, cell, with_copies, verify(cell, point, run.plan))
    except UsageError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"normcheck itself failed: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        return [replace(speed, status=ERROR, detail=detail) for speed in blank]


def _why_not(run: _Run, cell: Cell) -> str:
    if run.lost:
        return f"not run: {run.lost} lost the GPU's context, and nothing runs in this process any more"
    if time.perf_counter() > run.until:
        return "not run: the time budget is spent"
    return why_not(cell, run.plan.device)


def _proven_speeds(run: _Run, cell: Cell, blank: list[Speed], proof: Verified) -> list[Speed]:
    """The times of what ``proof`` says has passed; for the rest its reason."""
    if proof.lost:
        run.lost = cell.implementation.name
    judged = [replace(s, verified_rows=proof.rows, cases=proof.cases, note=proof.note) for s in blank]
    if not proof.passed:
        status = SKIP if proof.refused else FAIL
        return [replace(s, status=status, detail=proof.refused, failure=proof.failure) for s in judged]
    return [_timed(run, cell, proof, speed) for speed in judged]


def _timed(run: _Run, cell: Cell, proof: Verified, blank: Speed) -> Speed:
    """One direction of what has passed."""
    if blank.direction == BACKWARD and "dx" in proof.not_returned:
        return replace(blank, detail="no gradients are returned")
    try:
        times = times_of(cell.implementation, cell.op, proof.point, blank.direction, run.plan.device)
        return replace(blank, status=MEASURED, times=times)
    except torch.OutOfMemoryError:
        return replace(blank, detail=_NO_MEMORY)
    except UnsupportedCase as refused:
        return replace(blank, detail=refusal(refused))
    except Broken as error:
        if "out of memory" in error.message:
            return replace(blank, detail=_NO_MEMORY)
        found = _while_timed(cell, proof.point, error)
        if context_lost(Problem("exception", "", error.message)):
            run.lost = cell.implementation.name
        return replace(blank, status=FAIL, failure=found)
    finally:
        gc.collect()
        if run.plan.device == "cuda" and not run.lost:
            torch.cuda.empty_cache()


def _while_timed(cell: Cell, point: Point, error: Broken) -> Finding:
    """What broke only when it was called again and again."""
    line = str(case_of(point))
    return Finding(
        kind=error.kind,
        output=error.output,
        case=line,
        message=error.message,
        reproduce=f"normcheck repro {shlex.quote(cell.spec)} {shlex.quote(line)}",
        traceback=error.frames,
    )
