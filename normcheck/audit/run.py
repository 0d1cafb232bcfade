"""``normcheck audit``: count the planted faults that the gate finds, and the correct kernels that it accuses."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TextIO

from normcheck.audit import catalogue, html, json
from normcheck.audit import report as report
from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import REGIMES, Regime
from normcheck.audit.mutants.under import under
from normcheck.audit.options import ALL, EVERY, AuditOptions
from normcheck.audit.recipes import recipe
from normcheck.audit.rotation import Pair, by_turns, pairs, sample
from normcheck.audit.score import ERROR, KILLED, SURVIVED, Audit, Control, Outcome
from normcheck.audit.trial import PROMISES, Trial, TrialResult, crashed, run_trial, runs_alone, start, why_not
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.errors import ExitCode, UsageError, one_of
from normcheck.gate import decision
from normcheck.isolation.pool import spread
from normcheck.reports._page import NEEDS
from normcheck.reports.targets import Target, screen, targets, written
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment
from normcheck.runner.interruption import interruptible

MOST_WORKERS = 8


def audit(options: AuditOptions, argv: tuple[str, ...]) -> int:
    """Run the audit that ``options`` describe, write its reports and return the exit code.

    Raises UsageError, before anything runs, for options that do not fit together.
    """
    begun = time.perf_counter()
    report_targets = _targets(options)
    trials = trials_of(options)
    stream = screen(report_targets)
    results, complete = _run_all(trials, _workers(options, len(trials)), stream)
    outcomes = tuple(result for result in results if isinstance(result, Outcome))
    controls = tuple(result for result in results if isinstance(result, Control))
    done = Audit(
        argv=argv,
        seed=options.seed,
        profile=options.profile,
        recipe=options.recipe,
        seconds=time.perf_counter() - begun,
        environment=environment(trials[0].device if trials else "cpu"),
        outcomes=outcomes,
        controls=controls,
        exit_code=exit_code(outcomes, controls, recipe=options.recipe, complete=complete),
        complete=complete,
    )
    unwritten = [why for target in report_targets if (why := written(target, partial(_WRITERS[target.format], done)))]
    for why in unwritten:
        print(f"normcheck: {why}", file=sys.stderr)
    report.render(done, report.console_for(stream), details=bool(options.mutant))
    return done.exit_code if done.exit_code or not unwritten else ExitCode.BROKEN


def exit_code(outcomes: Sequence[Outcome], controls: Sequence[Control], *, recipe: str, complete: bool) -> ExitCode:
    """The exit code of an audit: a broken promise, a wrong name or a false alarm decides first.

    A recipe is measured, not judged.
    """
    statuses = {outcome.status for outcome in outcomes}
    misled = any(outcome.asked and outcome.explanation and not outcome.rightly for outcome in outcomes)
    promise_broken = any(outcome.status == SURVIVED and outcome.promised for outcome in outcomes)
    return decision.exit_code(
        found=not recipe and (promise_broken or misled or any(control.accused for control in controls)),
        broken=ERROR in statuses or any(control.error for control in controls),
        enough=bool(statuses & {KILLED, SURVIVED}),
        complete=complete,
    )


def trials_of(options: AuditOptions) -> tuple[Trial, ...]:
    """Every cell to run: the plain mutants in their order, mutants under a regime, then the correct kernels.

    An audit of everything has a sample of the mutants under regimes. ``--mutant`` leaves out the correct kernels.
    ``--regime`` leaves out the correct kernels and the plain mutants. Raises UsageError.
    """
    known = catalogue.mutants()
    for name in options.mutant:
        if name not in known:
            near = difflib.get_close_matches(name, known, 4)
            raise UsageError(f"mutant={name}: expected {one_of(near or known)}")
    regimes = _regimes(options)
    device, ops, dtypes = _scope(options)
    trial = partial(
        Trial, profile=options.profile, seed=options.seed, device=device, recipe=options.recipe, judge=options.judge
    )
    whole = options.cells == EVERY
    chosen = [mutant for mutant in known.values() if not options.mutant or mutant.id in options.mutant]
    runnable = [mutant for mutant in chosen if not why_not(mutant, device)]
    if regimes:
        under_regimes = pairs(regimes, runnable, ops, dtypes, every_cell=options.regime_cells == EVERY)
        return tuple(trial(name=p.mutant.id, op=p.op, dtype=p.dtype, regime=p.regime.id) for p in under_regimes)
    narrowed = options.op or options.dtype or options.mutant or options.recipe
    every = () if narrowed else pairs(tuple(REGIMES.values()), runnable, ops, dtypes)
    sampled = sample([p for p in every if _is_promised(p, options.profile) and not _is_slow(p.mutant, device)])
    mutants = [
        trial(  # the report shows one case of each, and says what it might be
            name=mutant.id, op=op, dtype=dtype, shrink=whole and not number, explain=not number and not options.recipe
        )
        for mutant in chosen
        if not (options.recipe and _is_slow(mutant, "cpu"))
        for number, (op, dtype) in enumerate(_cells(mutant, ops, dtypes, every=whole))
    ]
    faults = [trial(name=p.mutant.id, op=p.op, dtype=p.dtype, regime=p.regime.id, shrink=False) for p in sampled]
    controls = [  # each has a seed of its own, which is another core: other sizes, kinds and data
        trial(name=control.name, op=control.op, dtype=dtype, control=True, seed=options.seed + number)
        for number, control in enumerate(() if options.mutant else catalogue.controls())
        for dtype in (control.dtypes if whole else [control.dtypes[number % len(control.dtypes)]])
        if control.op in ops and dtype in dtypes
    ]
    return (*mutants, *faults, *controls)


def _cells(mutant: Mutant, ops: set[str], dtypes: set[str], *, every: bool) -> list[tuple[str, str]]:
    """The (op, dtype) of ``ops`` and ``dtypes`` to run a plain mutant in: every one, or each op in one dtype."""
    own = product(mutant.ops, mutant.dtypes) if every else by_turns(mutant, dtypes)
    return [(op, dtype) for op, dtype in own if op in ops and dtype in dtypes]


def _is_slow(mutant: Mutant, device: str) -> bool:
    """Whether a mutant is interpreted. Triton's are the same faults as torch's."""
    return mutant.language != "torch" and device == "cpu"


def _is_promised(pair: Pair, profile: str) -> bool:
    return PROMISES.index(under(pair.regime, pair.mutant).promised) <= PROMISES.index(profile)


def _regimes(options: AuditOptions) -> tuple[Regime, ...]:
    """The regimes of ``--regime``; empty without it. Raises UsageError beside an option for plain mutants only."""
    if options.regime and options.recipe:
        raise UsageError(f"regime={options.regime[0]}: expected no --recipe with it, a recipe judges plain mutants")
    if options.regime and options.cells != EVERY:
        raise UsageError(f"cells={options.cells}: expected --regime-cells beside --regime, this is for plain mutants")
    return tuple(r for r in REGIMES.values() if ALL in options.regime or r.id in options.regime)


def _scope(options: AuditOptions) -> tuple[str, set[str], set[str]]:
    """The device, ops and dtypes of the options; with a recipe, only the ops and dtypes that it has."""
    ops, dtypes = set(options.op or OPS), set(options.dtype or DTYPES)
    if not options.recipe:
        return device_for(options.device), ops, dtypes
    chosen = recipe(options.recipe)
    if options.device == "cuda":
        raise UsageError("device=cuda: expected auto or cpu, a recipe is run on the CPU")
    return device_for("cpu"), ops & set(chosen.ops), dtypes & set(chosen.dtypes)


def _workers(options: AuditOptions, trials: int) -> int:
    if options.workers is None:
        return max(1, min(len(os.sched_getaffinity(0)), MOST_WORKERS, trials))
    return options.workers


def _run_all(trials: Sequence[Trial], workers: int, stream: TextIO) -> tuple[list[TrialResult], bool]:
    """Results in the order of the trials, and whether all were reached before an interrupt (Ctrl-C, SIGTERM)."""
    results: dict[int, TrialResult] = {}
    complete = True
    init = partial(start, trials[0].device if trials else "cpu")
    init()
    try:
        with interruptible(), report.live(report.console_for(stream), len(trials)) as show:
            order = sorted(range(len(trials)), key=lambda index: _of_one_core(trials[index]))
            jobs = [trials[index] for index in order]
            for place, result in spread(run_trial, jobs, workers=workers, start=init, died=crashed, apart=runs_alone):
                results[order[place]] = result
                show(result)
    except KeyboardInterrupt:
        complete = False
    return [results[index] for index in sorted(results)], complete


def _of_one_core(trial: Trial) -> tuple[bool, str, str]:
    """Orders trials so that those of one op and dtype follow each other: most have the same claims, and so one core,
    which each process then makes once. The correct kernels come last; each has a core of its own.
    """
    return trial.control, trial.op, trial.dtype


_WRITERS: Mapping[str, Callable[[Audit, TextIO], None]] = MappingProxyType({"json": json.write, "html": html.write})


def _targets(options: AuditOptions) -> tuple[Target, ...]:
    return targets(options.report, tuple(_WRITERS), needs={"html": NEEDS})
