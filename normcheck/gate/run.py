"""A whole run: every cell of a plan, shown while it happens, then the reports and the exit code."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TextIO

import torch

from normcheck.errors import ExitCode
from normcheck.gate.decision import Terms, concluded, terms_of, thinned
from normcheck.gate.early import targets_of
from normcheck.gate.engine import Engine
from normcheck.gate.known_failures import marked
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan
from normcheck.gate.replay import keep
from normcheck.gate.unchanged import Files
from normcheck.reports import terminal
from normcheck.reports.report import formats
from normcheck.reports.targets import Target, screen, written
from normcheck.result import SweepResult, Verdict
from normcheck.runner.interruption import interruptible

MOST_EXAMPLES = 10**15
"""What a report says if even more cases were allowed; beyond it, readers of JSON lose digits."""


def run(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files], engine: Engine) -> int:
    """Check everything that ``options`` ask for; returns the exit code. Raises UsageError before anything runs.

    ``files``: those that judge, which must be the same before the verdict is told. ``engine``: who judges the cells.
    """
    start = time.perf_counter()
    gc.freeze()  # torch's objects live until the end: no collection looks at them, and the last one is 0.3 s shorter
    targets = targets_of(options)
    begun = files.result()  # before any code under test runs
    plan = engine.planned(options)
    terms = terms_of(options, plan.required)
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    stream = screen(targets)
    verdicts, complete = swept(plan, stream, options, terms, engine)
    result = run_of(options, plan, verdicts, start, engine.environment(plan.device), argv)
    result = concluded(replace(result, complete=complete), terms)
    result = doubted(result, begun.changed())
    return publish(result, targets, stream, verbosity=options.verbosity)


def run_of(
    options: VerifyOptions,
    plan: Plan,
    verdicts: tuple[Verdict, ...],
    start: float,
    environment: Mapping[str, str],
    argv: tuple[str, ...] = (),
) -> SweepResult:
    """The run that began at ``start`` (of time.perf_counter) with these verdicts: an error until ``concluded``.

    ``environment``: the machine and the versions of its libraries, as an engine names them.
    """
    return SweepResult(
        argv=argv,
        seed=plan.seed,
        profile=plan.profile.name,
        seconds=time.perf_counter() - start,
        environment=environment,
        status="error",
        exit_code=ExitCode.BROKEN,
        verdicts=verdicts,
        budget={"max_examples": min(plan.profile.max_examples, MOST_EXAMPLES), "seconds": plan.profile.seconds},
        shard=options.shard,
        required=plan.required,
        part=options.part,
    )


def doubted(result: SweepResult, doubt: str) -> SweepResult:
    """``result`` as an error because of ``doubt``, if there is any: what it says of a cell may not be so."""
    if not doubt:
        return result
    return replace(result, status="error", exit_code=ExitCode.BROKEN, messages=(doubt, *result.messages))


def publish(
    result: SweepResult, targets: Sequence[Target], stream: TextIO, *, cells: bool = False, verbosity: int = 0
) -> int:
    """Write the reports of a run, and its summary to ``stream``; returns the exit code.

    ``cells``: the summary has a line for each cell; ``verbosity``: -1 quiet, 1 verbose.
    """
    unwritten = write_reports(result, targets)
    if unwritten and not result.exit_code:  # a report that is missing must not look like a pass
        result = replace(result, status="error", exit_code=ExitCode.BROKEN)
    result = replace(result, messages=(*unwritten, *result.messages))
    terminal.render(result, terminal.console_for(stream), cells=cells, verbosity=verbosity)
    return result.exit_code


def write_reports(result: SweepResult, targets: Sequence[Target]) -> tuple[str, ...]:
    """Write the reports of a run; returns why some could not be written."""
    return tuple(filter(None, [_written(result, target) for target in targets]))


def swept(
    plan: Plan,
    stream: TextIO,
    options: VerifyOptions,
    terms: Terms,
    engine: Engine,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[tuple[Verdict, ...], bool]:
    """The verdicts in the order of their cells, and whether the run got to its end without being interrupted.

    A failure that is known is marked as that when its verdict arrives. ``given_up``: asked after each case whether to
    stop, as by Ctrl-C.
    """
    verdicts: dict[int, Verdict] = {}
    keys = [cell.key for cell in plan.cells]
    try:
        console = terminal.console_for(stream)
        shown = terminal.live(console, len(plan.cells), cells=keys, verbosity=options.verbosity)
        with interruptible(), shown as live:

            def progress(index: int, cases: int, worst: float) -> None:
                live.update(index, keys[index], cases, worst)
                if given_up():
                    raise KeyboardInterrupt

            for index, verdict in engine.verdicts(plan, options, progress):
                verdicts[index] = verdict = marked(verdict, terms.known)
                trouble = keep(options.database, verdict) if options.database else ""
                if trouble:
                    print(f"normcheck: {trouble}", file=sys.stderr)
                live.verdict(thinned(verdict, terms))  # what is kept is held to it with all others, by ``concluded``
    except KeyboardInterrupt:
        return tuple(verdicts[index] for index in sorted(verdicts)), False
    return tuple(verdicts[index] for index in sorted(verdicts)), True


def _written(result: SweepResult, target: Target) -> str:
    return written(target, lambda stream: formats()[target.format].write(result, stream))
