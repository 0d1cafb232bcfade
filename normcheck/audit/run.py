"""How good is the gate? Plant faults and count what it finds; give it correct kernels and count what it accuses."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TextIO

from normcheck.audit import json
from normcheck.audit import report as report
from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import REGIMES, Regime
from normcheck.audit.mutants.under import under
from normcheck.audit.recipes import recipe
from normcheck.audit.rotation import Pair, pairs, sample
from normcheck.audit.score import Audit, Control, Outcome
from normcheck.audit.trial import PROMISES, Trial, Tried, apart, died, start, tried, why_not
from normcheck.cases.dtypes import DTYPES
from normcheck.errors import UsageError, one_of
from normcheck.gate.decision import BROKEN, FOUND, INTERRUPTED, NOTHING, PASS
from normcheck.gate.request import Request, Target, targets_of
from normcheck.impls import discovery
from normcheck.isolation.pool import spread
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment

MOST_WORKERS = 8
ALL = "all"
"""Every regime, or every cell of a mutant under a regime."""
CELLS = ("one", ALL)


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """The options of ``normcheck audit``, as they were given. ``workers``: None for as many as there are cores.

    ``regimes``: only mutants under these, ``("all",)`` for every one; ``regime_cells``: each pair in ``one`` op and
    dtype, or in ``all`` that have the fault.
    """

    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    mutants: tuple[str, ...] = ()
    profile: str = "quick"
    seed: int = 0
    device: str = "auto"
    workers: int | None = None
    recipe: str = ""
    regimes: tuple[str, ...] = ()
    regime_cells: str = "one"
    reports: tuple[str, ...] = ()


def audit(request: AuditRequest, argv: tuple[str, ...]) -> int:
    """Run the audit that ``request`` asks for; returns the exit code. Raises UsageError before anything runs."""
    begun = time.perf_counter()
    targets = _targets(request)
    trials = trials_of(request)
    stream = sys.stderr if any(target.path == "-" for target in targets) else sys.stdout
    results, complete = _tried(trials, _workers(request, len(trials)), stream)
    outcomes = tuple(result for result in results if isinstance(result, Outcome))
    controls = tuple(result for result in results if isinstance(result, Control))
    done = Audit(
        argv=argv,
        seed=request.seed,
        profile=request.profile,
        recipe=request.recipe,
        seconds=time.perf_counter() - begun,
        environment=environment(trials[0].device if trials else "cpu"),
        outcomes=outcomes,
        controls=controls,
        exit_code=exit_code(outcomes, controls, recipe=request.recipe, complete=complete),
        complete=complete,
    )
    written = [_write(done, target) for target in targets]
    report.render(done, report.console_for(stream), details=bool(request.mutants))
    return done.exit_code if done.exit_code or all(written) else BROKEN


def exit_code(outcomes: Sequence[Outcome], controls: Sequence[Control], *, recipe: str, complete: bool) -> int:
    """What an audit returns: a broken promise or a false alarm decides first. A recipe is measured, not judged."""
    statuses = {outcome.status for outcome in outcomes}
    broken = any(outcome.status == "survived" and outcome.promised for outcome in outcomes)
    if not complete:
        return INTERRUPTED
    if not recipe and (broken or any(control.accused for control in controls)):
        return FOUND
    if "error" in statuses or any(control.error for control in controls):
        return BROKEN
    return PASS if statuses & {"killed", "survived"} else NOTHING


def trials_of(request: AuditRequest) -> tuple[Trial, ...]:
    """Every cell to run: the mutants in their order, those under a regime, then the correct kernels.

    An audit of everything has a sample of the mutants under regimes. One of single mutants has no correct kernels, one
    of regimes neither those nor plain mutants.
    """
    known = discovery.mutants()
    _known("op", request.ops, tuple(discovery.ops()))
    _known("dtype", request.dtypes, DTYPES)
    _known("profile", (request.profile,), PROMISES)
    for name in request.mutants:
        if name not in known:
            near = difflib.get_close_matches(name, known, 4)
            raise UsageError(f"mutant={name}: expected {one_of(near or known)}")
    regimes = _regimes(request)
    device, ops, dtypes = _scope(request)
    trial = partial(Trial, profile=request.profile, seed=request.seed, device=device, recipe=request.recipe)
    chosen = [mutant for mutant in known.values() if not request.mutants or mutant.id in request.mutants]
    there = [mutant for mutant in chosen if not why_not(mutant, device)]
    if regimes:
        asked = pairs(regimes, there, ops, dtypes, every_cell=request.regime_cells == "all")
        return tuple(trial(name=p.mutant.id, op=p.op, dtype=p.dtype, regime=p.regime.id) for p in asked)
    narrowed = request.ops or request.dtypes or request.mutants or request.recipe
    every = () if narrowed else pairs(tuple(REGIMES.values()), there, ops, dtypes)
    sampled = sample([p for p in every if _is_promised(p, request.profile)])
    mutants = [
        trial(name=mutant.id, op=op, dtype=dtype, shrink=not number)  # the report shows one case of each
        for mutant in chosen
        if not request.recipe or mutant.language == "torch"  # the same faults again, and far too slow interpreted
        for number, (op, dtype) in enumerate(product(*_cells(mutant, ops, dtypes)))
    ]
    faults = [trial(name=p.mutant.id, op=p.op, dtype=p.dtype, regime=p.regime.id) for p in sampled]
    controls = [
        trial(name=control.name, op=control.op, dtype=dtype, control=True)
        for control in (() if request.mutants else discovery.controls())
        for dtype in control.dtypes
        if control.op in ops and dtype in dtypes
    ]
    return (*mutants, *faults, *controls)


def _cells(mutant: Mutant, ops: set[str], dtypes: set[str]) -> tuple[list[str], list[str]]:
    return [op for op in mutant.ops if op in ops], [dtype for dtype in mutant.dtypes if dtype in dtypes]


def _is_promised(pair: Pair, profile: str) -> bool:
    return PROMISES.index(under(pair.regime, pair.mutant).promised) <= PROMISES.index(profile)


def _regimes(request: AuditRequest) -> tuple[Regime, ...]:
    """The regimes that are asked for; empty if none is."""
    _known("regime", request.regimes, (*REGIMES, ALL))
    _known("regime_cells", (request.regime_cells,), CELLS)
    if request.regimes and request.recipe:
        raise UsageError(f"regime={request.regimes[0]}: expected no --recipe with it, a recipe judges plain mutants")
    return tuple(r for r in REGIMES.values() if ALL in request.regimes or r.id in request.regimes)


def _scope(request: AuditRequest) -> tuple[str, set[str], set[str]]:
    """The device, ops and dtypes that are asked for; of a recipe, those that it has."""
    ops, dtypes = set(request.ops or discovery.ops()), set(request.dtypes or DTYPES)
    if not request.recipe:
        return device_for(request.device), ops, dtypes
    asked = recipe(request.recipe)
    if request.device == "cuda":
        raise UsageError("device=cuda: expected auto or cpu, a recipe is run on the CPU")
    return device_for("cpu"), ops & set(asked.ops), dtypes & set(asked.dtypes)


def _known(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{option}={name}: expected {one_of(known)}")


def _workers(request: AuditRequest, trials: int) -> int:
    if request.workers is None:
        return max(1, min(len(os.sched_getaffinity(0)), MOST_WORKERS, trials))
    if not 1 <= request.workers <= 256:
        raise UsageError(f"workers={request.workers}: expected an integer from 1 to 256")
    return request.workers


def _tried(trials: Sequence[Trial], workers: int, stream: TextIO) -> tuple[list[Tried], bool]:
    """Results in the order of the trials, and whether all were reached before somebody interrupted."""
    results: dict[int, Tried] = {}
    complete = True
    begin = partial(start, trials[0].device if trials else "cpu")
    begin()
    try:
        with report.live(report.console_for(stream), len(trials)) as show:
            for index, result in spread(tried, trials, workers=workers, start=begin, died=died, apart=apart):
                results[index] = result
                show(result)
    except KeyboardInterrupt:
        complete = False
    return [results[index] for index in sorted(results)], complete


def _targets(request: AuditRequest) -> tuple[Target, ...]:
    for text in request.reports:
        if text.partition(":")[0] != "json":
            raise UsageError(f"report={text}: expected json:PATH, the only format of an audit besides the terminal")
    return targets_of(Request(reports=request.reports))


def _write(done: Audit, target: Target) -> bool:
    """Write one report; False, and a line on standard error, where that failed."""
    if target.path == "-":
        json.write(done, sys.stdout)
        return True
    try:
        with open(target.path, "w", encoding="utf-8") as stream:
            json.write(done, stream)
    except OSError as error:
        print(f"normcheck: report={target.format}:{target.path}: {error.strerror or error}", file=sys.stderr)
        return False
    return True
