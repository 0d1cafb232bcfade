"""``normcheck bench``: GB/s of forward and backward, point by point, only for kernels that have just passed there."""

from __future__ import annotations

import gc
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console

from normcheck.bench import files, judge
from normcheck.bench import report as report
from normcheck.bench.ahead import compile_all, jobs_of
from normcheck.bench.calls import copy_times, reusable_graphs, times_of
from normcheck.bench.early import targets_of
from normcheck.bench.options import BenchOptions
from normcheck.bench.plan import cells_of, suite_for
from normcheck.bench.speed import BACKWARD, ERROR, FAIL, MEASURED, SKIP, Bench, Point, Speed, Times
from normcheck.bench.suites import Suite
from normcheck.bench.timing import METHOD
from normcheck.bench.verified import VerifiedPoint, case_of, scale_of, verify
from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import context_lost
from normcheck.checks.contract import Problem
from normcheck.errors import Broken, ExitCode, UnsupportedCase, UsageError, itself_failed
from normcheck.gate import decision
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls._cudnn_shelf import shelf
from normcheck.reports.targets import screen
from normcheck.result import Finding
from normcheck.runner.call import refusal
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment

_NO_MEMORY = "no memory to time it"


def bench(options: BenchOptions, argv: tuple[str, ...]) -> int:
    """Measure the points of ``options``, write the reports and return the exit code.

    Raises UsageError, before anything runs, for options that do not fit together.
    """
    if options.suite == judge.SUITE:
        return judge.bench(options, argv)
    begun = time.perf_counter()
    report_targets = targets_of(options)
    device = device_for(options.device)
    suite = suite_for(options, device)
    cells = cells_of(options, suite, device)
    until = begun + options.time_budget if options.time_budget else math.inf
    run = _State(Plan((), PROFILES["quick"], 0, device, options.timeout), suite, until)
    with shelf():  # for what is compiled ahead
        if device == "cuda":
            compile_all(jobs_of(suite.points, cells, device))
        speeds, complete = _measured(run, cells, report.console_for(sys.stderr))
    done = Bench(
        argv=argv,
        suite=suite.name,
        source=suite.source,
        device=device,
        seconds=time.perf_counter() - begun,
        environment=environment(device),
        counting={
            direction: count.words(suite.points)
            for direction, count in suite.counts.items()
            if any(direction in point.directions for point in suite.points)
        },
        method=METHOD[device],
        speeds=tuple(speeds),
        exit_code=exit_code(speeds, complete=complete),
        complete=complete,
    )
    unwritten = [why for target in report_targets if (why := files.write(done, target))]
    for why in unwritten:
        print(f"normcheck: {why}", file=sys.stderr)
    report.render(done, report.console_for(screen(report_targets)))
    return done.exit_code if done.exit_code or not unwritten else ExitCode.BROKEN


def exit_code(speeds: Sequence[Speed], *, complete: bool) -> ExitCode:
    """The exit code of a bench: one measured speed is enough."""
    statuses = {speed.status for speed in speeds}
    enough = MEASURED in statuses
    return decision.exit_code(found=FAIL in statuses, broken=ERROR in statuses, enough=enough, complete=complete)


@dataclass
class _State:
    """The settings and the state of a bench.

    ``until``: when nothing new is begun any more, by time.perf_counter. ``copies``: bytes -> times of a copy.
    ``imported``: the implementations that have run. ``lost``: the one that lost the GPU's context, or "".
    """

    plan: Plan
    suite: Suite
    until: float
    copies: dict[int, Times] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    lost: str = ""

    def ran(self, name: str) -> None:
        """Note that the implementation ``name`` has run. What it has imported lives until the end, so no collection
        looks at it again: there is one for each speed, and with the libraries of all it takes a third of a second.
        """
        if name not in self.imported:
            self.imported.add(name)
            gc.collect()
            gc.freeze()


def _measured(run: _State, cells: dict[tuple[str, str], list[Cell]], console: Console) -> tuple[list[Speed], bool]:
    """Every speed, and whether all were reached before an interrupt (Ctrl-C); ``console`` shows the progress."""
    speeds: list[Speed] = []
    jobs = [(point, cell) for point in run.suite.points for cell in cells[point.op, point.dtype]]
    try:
        with reusable_graphs(), report.progress_line(console) as line:
            for number, (point, cell) in enumerate(jobs, 1):
                where = f"{point.op} {point.dtype} M={point.M} N={point.N} {cell.implementation.name}"
                if line is not None:
                    line.draw(f"[{number}/{len(jobs)}] {where}")
                speeds += _speeds(run, point, cell)
    except KeyboardInterrupt:
        return speeds, False
    return speeds, True


def _speeds(run: _State, point: Point, cell: Cell) -> list[Speed]:
    """The directions of one implementation at one point. A fault of normcheck itself is an ``error``."""
    if cell.op.quantises:
        point = replace(point, scale=scale_of(cell.implementation))
    blank = [
        Speed(
            point=point,
            implementation=cell.implementation.name,
            direction=direction,
            status=SKIP,
            bytes=run.suite.counts[direction].bytes(point),
        )
        for direction in point.directions
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
        return [replace(speed, status=ERROR, detail=itself_failed(error)) for speed in blank]


def _why_not(run: _State, cell: Cell) -> str:
    if run.lost:
        return f"not run: {run.lost} lost the GPU's context, and nothing runs in this process any more"
    if time.perf_counter() > run.until:
        return "not run: the time budget is spent"
    return why_not(cell, run.plan.device)


def _proven_speeds(run: _State, cell: Cell, blank: list[Speed], proof: VerifiedPoint) -> list[Speed]:
    """The times if the point passed, else the reason, from ``proof``."""
    if proof.lost:
        run.lost = cell.implementation.name
    run.ran(cell.implementation.name)
    judged = [replace(s, verified_rows=proof.rows, cases=proof.cases, note=proof.note) for s in blank]
    if not proof.passed:
        status = SKIP if proof.refused else FAIL
        return [replace(s, status=status, detail=proof.refused, failure=proof.failure) for s in judged]
    return [_timed(run, cell, proof, speed) for speed in judged]


def _timed(run: _State, cell: Cell, proof: VerifiedPoint, blank: Speed) -> Speed:
    """The speed of one direction of a point that has passed."""
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
        if context_lost(Problem("exception", "", error.message)):
            run.lost = cell.implementation.name
        return replace(blank, status=FAIL, failure=_finding_while_timed(cell, proof.point, error))
    finally:
        gc.collect()
        if run.plan.device == "cuda" and not run.lost:
            torch.cuda.empty_cache()


def _finding_while_timed(cell: Cell, point: Point, error: Broken) -> Finding:
    """The finding of an implementation that broke only when it was called again and again."""
    line = str(case_of(point))
    return Finding(
        kind=error.kind,
        output=error.output,
        case=line,
        message=error.message,
        reproduce=f"normcheck repro {shlex.quote(cell.spec)} {shlex.quote(line)}",
        traceback=error.frames,
    )
