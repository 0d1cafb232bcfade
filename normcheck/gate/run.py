"""A whole run: every cell of a plan, shown while it happens, then the reports and the exit code."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, one_line
from normcheck.gate.decision import BROKEN, Terms, concluded
from normcheck.gate.known_failures import marked
from normcheck.gate.plan import Plan
from normcheck.gate.replay import keep
from normcheck.gate.request import Request, Target, plan_of, required_of, targets_of, terms_of
from normcheck.gate.sense import sensible
from normcheck.gate.sweep import Progress, run_cell
from normcheck.impls import source_location
from normcheck.isolation.pool import spread
from normcheck.reports import terminal
from normcheck.reports.report import formats
from normcheck.result import Run, Verdict
from normcheck.runner.call import link_of
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment

MOST_EXAMPLES = 10**15
"""What a report says where even more cases were allowed: more digits than any reader of JSON keeps."""


def run(request: Request, argv: tuple[str, ...]) -> int:
    """Check everything that ``request`` asks for; returns the exit code. Raises UsageError before anything runs."""
    start = time.perf_counter()
    targets = targets_of(request)
    plan = plan_of(request)
    request = replace(request, require=required_of(request, plan.cells))
    terms = terms_of(request)
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    screen_stream = sys.stderr if any(target.path == "-" for target in targets) else sys.stdout
    verdicts, complete = _sweep(plan, screen_stream, request, terms)
    result = Run(
        argv=argv,
        seed=request.seed,
        profile=request.profile,
        seconds=time.perf_counter() - start,
        environment=environment(plan.device),
        verdicts=verdicts,
        status="",
        exit_code=BROKEN,
        complete=complete,
        budget={"max_examples": min(plan.profile.max_examples, MOST_EXAMPLES), "seconds": plan.profile.seconds},
        shard=request.shard,
        required=request.require,
        part=request.part,
    )
    result = concluded(result, terms)
    return told(result, targets, screen_stream, verbosity=request.verbosity)


def told(result: Run, targets: Sequence[Target], stream: TextIO, *, cells: bool = False, verbosity: int = 0) -> int:
    """Write the reports of a run, and its end on the screen; returns the exit code.

    ``cells``: their lines as well; ``verbosity``: -1 quiet, 1 verbose.
    """
    unwritten = tuple(filter(None, [_write(result, target) for target in targets]))
    if unwritten and not result.exit_code:  # a report that is missing must not look like a pass
        result = replace(result, status="error", exit_code=BROKEN)
    result = replace(result, messages=(*unwritten, *result.messages))
    terminal.render(result, terminal.console_for(stream), cells=cells, verbosity=verbosity)
    return result.exit_code


def _sweep(plan: Plan, stream: TextIO, request: Request, terms: Terms) -> tuple[tuple[Verdict, ...], bool]:
    """Every cell's verdict, in the order of the cells, and whether all were reached before somebody interrupted."""
    verdicts: dict[int, Verdict] = {}
    names = [(cell.op.name, cell.implementation.name, cell.dtype) for cell in plan.cells]
    try:
        console = terminal.console_for(stream)
        shown = terminal.live(console, len(plan.cells), cells=names, verbosity=request.verbosity)
        with _stoppable(), shown as screen:

            def progress(index: int, cases: int, worst: float) -> None:
                screen.update(index, len(plan.cells), *names[index], cases, worst)

            for index, verdict in _verdicts(plan, request.workers, progress):
                verdicts[index] = marked(verdict, terms.known)
                trouble = keep(request.database, verdict) if request.database else ""
                if trouble:
                    print(f"normcheck: {trouble}", file=sys.stderr)
                screen.verdict(verdicts[index])
    except KeyboardInterrupt:
        return tuple(verdicts[index] for index in sorted(verdicts)), False
    return tuple(verdicts[index] for index in sorted(verdicts)), True


def _verdicts(plan: Plan, workers: int, progress: Callable[[int, int, float], None]) -> Iterator[tuple[int, Verdict]]:
    """(index, verdict) of every cell: one after another here, or side by side in judges of their own."""
    if workers == 1:
        with ExitStack() as left:
            for index, cell in enumerate(plan.cells):
                progress(index, 0, 0.0)
                _begin_processes(plan, index, left)
                yield index, judged(cell, plan, partial(progress, index))
        return
    jobs = [(cell, replace(plan, cells=())) for cell in plan.cells]
    start = partial(_judge_started, plan.device, workers)
    yield from spread(_judged_job, jobs, workers=workers, start=start, died=_judge_died, apart=lambda job: False)


def _begin_processes(plan: Plan, index: int, left: ExitStack) -> None:
    """Wait for the process of a cell, and start that of the next one, which comes up while this one is judged."""
    for number, cell in enumerate(plan.cells[index : index + 2]):
        link = link_of(cell.implementation)
        if link is None or why_not(cell, plan.device):
            continue
        if number == 0:
            link.ready()
        else:
            left.callback(link.end)
            with suppress(OSError):  # then the cell itself says so
                link.begin()


_JUDGES_SHARE = 0.6  # of a GPU's memory; the rest is for the kernels' processes


def _judge_started(device: str, workers: int) -> None:
    """Make a judge of this new process; on a GPU machine each has one GPU, and its share of what is for judges."""
    torch.set_num_threads(1)
    if device == "cuda":
        (number,) = multiprocessing.current_process()._identity[-1:]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        gpus = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[(number - 1) % len(gpus)]
        torch.cuda.set_per_process_memory_fraction(_JUDGES_SHARE / -(-workers // len(gpus)))
    device_for(device)


def _judged_job(job: tuple[Cell, Plan]) -> Verdict:
    return judged(*job, lambda cases, worst: None)


def _judge_died(job: tuple[Cell, Plan]) -> Verdict:
    cell, plan = job
    return _error(cell, plan, "the process that judged it ended")


def judged(cell: Cell, plan: Plan, progress: Progress) -> Verdict:
    """The verdict of a cell; a fault of normcheck itself is an ``error`` verdict, and the other cells go on.

    So is a verdict that makes no sense: normcheck may have been edited.
    """
    try:
        with its_process(cell):
            return sensible(run_cell(cell, plan, progress))
    except UsageError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return _error(cell, plan, f"normcheck itself failed: {type(error).__name__}: {error} ({where})")


def _error(cell: Cell, plan: Plan, detail: str) -> Verdict:
    place = source_location.of(cell.implementation)
    return Verdict(
        op=cell.op.name,
        implementation=cell.implementation.name,
        dtype=cell.dtype,
        device=plan.device,
        status="error",
        detail=detail,
        file=source_location.relative(place.file),
        line=place.line,
    )


@contextmanager
def its_process(cell: Cell) -> Iterator[None]:
    """Each cell has a process of its own: what it did to it is gone with it."""
    link = link_of(cell.implementation)
    try:
        yield
    finally:
        if link is not None:
            link.close()


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C is: reports are written for what was done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(result: Run, target: Target) -> str:
    """Write one report; returns why that failed, or ""."""
    report = formats()[target.format]
    try:
        if target.path == "-":
            report.write(result, sys.stdout)
        else:
            with open(target.path, "w", encoding="utf-8") as stream:
                report.write(result, stream)
    except OSError as error:
        return f"report={target.format}:{one_line(target.path, 200)}: it cannot be written: {error.strerror or error}"
    return ""
