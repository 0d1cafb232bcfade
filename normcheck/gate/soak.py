"""``normcheck verify --profile soak``: round after round of new cases, until it is told to stop.

Round k is what ``--seed SEED+k`` draws: another core, other sizes and other data. A cell that failed is not run again.
What was found stays: failing cases in a folder, reports written anew after each round. So a run that is killed loses
no more than its last round.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

import torch
from rich.console import Console

from normcheck.errors import UsageError
from normcheck.gate.decision import Terms, concluded, terms_of
from normcheck.gate.early import targets_of
from normcheck.gate.engine import Engine
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan
from normcheck.gate.run import doubted, publish, run_of, swept, write_reports
from normcheck.gate.shards import one_verdict
from normcheck.gate.unchanged import Files
from normcheck.reports import terminal
from normcheck.reports._text import put
from normcheck.reports.targets import screen
from normcheck.result import CellKey, SweepResult, Verdict
from normcheck.runner.interruption import interruptible

FOLDER = "normcheck-soak"
"""Where failing cases are kept, in the present folder, if ``--database`` names no other."""


def soak(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files], engine: Engine) -> int:
    """Run rounds until Ctrl-C or SIGTERM, or until each cell has ``--max-examples`` cases; returns the exit code.

    Being stopped is how such a run ends: 0 if nothing was found, 1 if something was, 130 if no round was complete.
    Raises UsageError before anything runs.
    """
    start = time.perf_counter()
    options = _checked(options)
    targets, begun = targets_of(options), files.result()
    plan = engine.planned(replace(options, max_examples=None))
    most = min(options.max_examples or math.inf, plan.profile.max_examples)
    plan = replace(plan, profile=replace(plan.profile, max_examples=int(most)))
    terms = terms_of(options, plan.required)
    torch.set_num_threads(1)  # as in any other run
    stream = screen(targets)
    console = terminal.console_for(stream)
    rounds: dict[CellKey, list[Verdict]] = {cell.key: [] for cell in plan.cells}
    number, goes_on = 0, True
    with suppress(KeyboardInterrupt), interruptible(signal.SIGINT):  # also between two rounds
        while goes_on and (left := _left(plan, rounds, options.max_examples)):
            goes_on = _round(replace(left, seed=plan.seed + number), rounds, stream, options, terms, engine)
            number += goes_on
            result = _so_far(options, plan, rounds, start, argv, terms, engine, rounds_done=number)
            write_reports(result, [target for target in targets if target.path != "-"])
            _put_round(console, number, result, quiet=options.quiet)
    result = _so_far(options, plan, rounds, start, argv, terms, engine, rounds_done=number)
    if not number:
        result = concluded(replace(result, complete=False), terms)
    return publish(doubted(result, begun.changed()), targets, stream, cells=True, verbosity=options.verbosity)


def _checked(options: VerifyOptions) -> VerifyOptions:
    """``options`` of a soak. Raises UsageError for those that it has no use for."""
    for name, value in (("watch", options.watch), ("shard", options.shard)):
        if value:
            raise UsageError(
                f"profile=soak {name}={value}: expected no --{name} with it; its rounds have seeds instead"
            )
    return options if options.database else replace(options, database=FOLDER)


def _left(plan: Plan, rounds: dict[CellKey, list[Verdict]], most: int | None) -> Plan | None:
    """``plan`` with the cells that are to have another round, or None. What failed before is replayed once."""

    def wants_more(key: CellKey) -> bool:
        done = rounds[key]
        enough = most is not None and sum(v.cases for v in done) >= most
        return not done or (not enough and done[-1].status in ("pass", "thin") and done[-1].cases > 0)

    cells = tuple(cell for cell in plan.cells if wants_more(cell.key))
    replays = {} if any(rounds.values()) else plan.replays
    return replace(plan, cells=cells, replays=replays) if cells else None


def _round(
    plan: Plan,
    rounds: dict[CellKey, list[Verdict]],
    stream: TextIO,
    options: VerifyOptions,
    terms: Terms,
    engine: Engine,
) -> bool:
    """Run the cells of ``plan`` once and keep their verdicts; whether all were run, and nobody stopped it."""
    verdicts, complete = swept(plan, stream, replace(options, quiet=True, verbose=False), terms, engine)
    for verdict in verdicts:
        seed = f"seed {plan.seed}"
        found = replace(verdict, notes=(*verdict.notes, f"found with {seed}")) if verdict.failure else verdict
        rounds[verdict.key].append(found)
    return complete


def _so_far(
    options: VerifyOptions,
    plan: Plan,
    rounds: dict[CellKey, list[Verdict]],
    start: float,
    argv: tuple[str, ...],
    terms: Terms,
    engine: Engine,
    *,
    rounds_done: int,
) -> SweepResult:
    verdicts = tuple(in_rounds(own) for own in rounds.values() if own)
    result = run_of(options, plan, verdicts, start, engine.environment(plan.device), argv)
    budget = {"max_examples": float(options.max_examples or 0), "seconds": plan.profile.seconds, "rounds": rounds_done}
    if not options.max_examples:
        del budget["max_examples"]
    return concluded(replace(result, budget=budget), terms)


def in_rounds(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a cell from those of its rounds. It is thin if the core was finished in none of them."""
    whole = one_verdict(verdicts)
    cores = [v.core for v in verdicts if v.core is not None]
    fullest = min(cores, key=lambda core: len(core.missed), default=None)
    passed = next((v for v in verdicts if v.status == "pass"), None)
    if whole.status == "thin" and passed is not None:
        whole = replace(whole, status="pass", detail=passed.detail)
    return replace(whole, core=fullest)


def _put_round(console: Console, number: int, result: SweepResult, *, quiet: bool) -> None:
    if quiet or not number:
        return
    cases, failed = sum(v.cases for v in result.verdicts), sum(v.status == "fail" for v in result.verdicts)
    cells = len(result.verdicts)
    words = f"Round {number}: {cases:,} cases in {cells} {'cell' if cells == 1 else 'cells'} so far, {failed} failed"
    put(console, (f"{words}; {result.seconds / 60:,.0f} min. Ctrl-C ends.", "dim"), wrap=False)
    if console.file is not sys.stderr:
        console.file.flush()
