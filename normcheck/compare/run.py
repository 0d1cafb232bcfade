"""``normcheck compare A B``: both sides of every op and dtype that they share, then the report and the exit code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.compare import report
from normcheck.compare.early import targets_of
from normcheck.compare.options import CompareOptions
from normcheck.compare.pair import Both, Progress, bare, compared
from normcheck.compare.results import ERROR, OUTSIDE, Compared, Pair
from normcheck.errors import UsageError, itself_failed, one_line, one_of
from normcheck.gate import decision
from normcheck.gate.plan import Plan, asked_for, profile_of
from normcheck.impls.implementation import Implementation
from normcheck.isolation import interpreter
from normcheck.isolation.select import select_apart
from normcheck.oracle.judging import PLAIN
from normcheck.reports import terminal
from normcheck.reports.targets import screen, written
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment
from normcheck.runner.interruption import interruptible


def compare(a: str, b: str, options: CompareOptions, argv: tuple[str, ...]) -> int:
    """Compare the implementations that ``a`` and ``b`` name; returns the exit code. Raises UsageError."""
    begun = time.perf_counter()
    report_targets = targets_of(a, b, options)
    lines = [parsed(line) for line in options.case]
    python = interpreter.found(options.interpreter) if options.interpreter else ""
    device = device_for(options.device)
    own = environment(device)
    environments = (own, interpreter.environment_of(python, device) if python else own)
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    ops = tuple(dict.fromkeys((*options.op, *(case.op for case in lines))))
    plan = Plan((), profile_of(options.as_verify()), options.seed, device, options.timeout, judge=PLAIN)
    sides = (_selected(a, ops, plan, options, ""), _selected(b, ops, plan, options, python))
    repeat = _repeat(a, b, options) if python else ()
    jobs = _jobs((a, b), sides, options, lines, repeat)
    stream = screen(report_targets)
    console = terminal.console_for(stream)
    pairs, complete = _all(jobs, plan, lines, console, options)
    done = Compared(
        argv=argv,
        specs=(a, b),
        interpreter=python,
        environments=environments,
        seed=options.seed,
        profile=plan.profile.name,
        seconds=time.perf_counter() - begun,
        exit_code=_exit_code(pairs, complete, same_bits=options.same_bits),
        complete=complete,
        pairs=pairs,
    )
    trouble = [why for target in report_targets if (why := written(target, lambda out: report.write_json(done, out)))]
    if trouble and not done.exit_code:  # a report that is missing must not look like a pass
        done = replace(done, exit_code=decision.exit_code(found=False, broken=True, enough=True))
    report.render(done, console, trouble)
    return done.exit_code


def _exit_code(pairs: Sequence[Pair], complete: bool, *, same_bits: bool) -> int:
    """``same_bits``: whether a difference is a finding."""
    statuses = {pair.status for pair in pairs}
    found = OUTSIDE in statuses or (same_bits and any(pair.differs for pair in pairs))
    enough = any(pair.cases for pair in pairs)
    return decision.exit_code(found=found, broken=ERROR in statuses, enough=enough, complete=complete)


def _selected(
    spec: str, ops: tuple[str, ...], plan: Plan, options: CompareOptions, python: str
) -> Mapping[str, Implementation]:
    """Op -> the implementation that ``spec`` names. Raises UsageError, also if there are several of an op."""
    try:
        found = select_apart(spec, ops, plan.device, plan.timeout, sandboxed=options.sandbox, python=python)
    except OSError as error:
        who = f"with={one_line(python, 200)}" if python else f"impl={one_line(spec, 200)}"
        raise UsageError(f"{who}: no process of it starts ({error}); expected one that can import {spec}") from None
    for op, count in Counter(i.op for i in found).items():
        if count > 1:
            names = one_of(f"{spec}:{i.name}" for i in found if i.op == op)
            raise UsageError(f"impl={spec}: has {count} implementations of {op}; expected {one_line(names, 400)}")
    return {i.op: i for i in found}


def _repeat(a: str, b: str, options: CompareOptions) -> tuple[str, ...]:
    """The words that run a case line on both again: B cannot be run by ``repro``, which has no other interpreter."""
    sandbox = () if options.sandbox else ("--no-sandbox",)
    return ("normcheck", "compare", a, b, "--with", options.interpreter, *sandbox, "--device", options.device, "--case")


def _jobs(
    specs: tuple[str, str],
    sides: tuple[Mapping[str, Implementation], Mapping[str, Implementation]],
    options: CompareOptions,
    lines: Sequence[Case],
    repeat: tuple[str, ...],
) -> list[Both]:
    """Both cells of every op and dtype. Raises UsageError if there is no op that both have."""
    shared = [op for op in OPS if op in sides[0] and op in sides[1]]
    if not shared:
        has = " and ".join(f"impl={spec} has {', '.join(side)}" for spec, side in zip(specs, sides, strict=True))
        raise UsageError(f"{one_line(has, 600)}: expected an op that both have")
    asked = tuple(dict.fromkeys(options.dtype)) or DTYPES
    jobs = []
    for op in shared:
        declared = [dtype for dtype in asked if all(dtype in side[op].dtypes for side in sides)]
        dtypes = [
            dtype for dtype in declared or asked if not lines or any((c.op, c.dtype) == (op, dtype) for c in lines)
        ]
        layouts = [case.layout for case in lines if case.op == op]
        own = [asked_for(layouts, spec, side[op]) for spec, side in zip(specs, sides, strict=True)]
        for dtype in dtypes:
            cells = [Cell(OPS[op], i, dtype, spec) for spec, i in zip(specs, own, strict=True)]
            jobs.append(Both(cells[0], cells[1], repeat))
    if not jobs:
        raise UsageError(f"case={one_line(str(lines[0]), 300)}: expected one of dtype {', '.join(asked)}")
    return jobs


def _all(
    jobs: Sequence[Both], plan: Plan, lines: Sequence[Case], console: Console, options: CompareOptions
) -> tuple[tuple[Pair, ...], bool]:
    """Every pair, and whether the run got to its end without being interrupted (Ctrl-C)."""
    pairs: list[Pair] = []
    try:
        with interruptible(), terminal.live(console, len(jobs), cells=[job.a.key for job in jobs]) as screen:
            for number, job in enumerate(jobs):

                def progress(cases: int, worst: float, number: int = number, job: Both = job) -> None:
                    screen.update(number, job.a.key, cases, worst)

                progress(0, 0.0)
                own = [case for case in lines if (case.op, case.dtype) == (job.a.op.name, job.a.dtype)]
                pairs.append(_pair(job, plan, own, progress, options))
    except KeyboardInterrupt:
        return tuple(pairs), False
    return tuple(pairs), True


def _pair(job: Both, plan: Plan, lines: Sequence[Case], progress: Progress, options: CompareOptions) -> Pair:
    """The pair; a fault of normcheck itself, or of an interpreter that starts nothing any more, is an ``error``."""
    try:
        return compared(job, plan, lines, progress, same_bits=options.same_bits, contexts=options.context)
    except UsageError:
        raise
    except OSError as error:
        return bare(job, plan, ERROR, f"a process of it does not start: {one_line(str(error), 300)}")
    except Exception as error:
        return bare(job, plan, ERROR, itself_failed(error))
