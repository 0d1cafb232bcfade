"""``normcheck repro``: run one case again, or several in one process; show every check, write a dump, open pdb."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case, why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import undeclared_model
from normcheck.checks.finding import finding
from normcheck.errors import ExitCode, UsageError, one_line
from normcheck.gate.decision import exit_code
from normcheck.gate.options import ReproOptions
from normcheck.gate.plan import PROFILES, Plan, asked_for
from normcheck.gate.prepare import selected
from normcheck.gate.tally import Tally
from normcheck.gate.torn import without_graph
from normcheck.impls.implementation import Implementation
from normcheck.oracle.compare import Expectation
from normcheck.oracle.judging import PLAIN
from normcheck.reports import terminal
from normcheck.runner.call import poisoned_memory
from normcheck.runner.device import device_for
from normcheck.runner.session import session_of


def repro_cases(
    spec: str,
    lines: Sequence[str],
    options: ReproOptions,
    loaded: Callable[[Cell], Cell] | None = None,
) -> int:
    """Run case lines again, in one process, on the implementation that ``spec`` names; returns the exit code.

    The dump holds the last case. With the debugger, kernels run in this process. ``loaded``: the cell that a loader
    makes of one that was found. Raises UsageError.
    """
    cases = [parsed(line) for line in lines]
    op = _the_op(cases)
    folder = None if options.dump is None else _new(options.dump)
    if options.pdb and sys.stdin is None:
        raise UsageError("pdb: standard input is closed; expected a terminal, or the debugger's commands")
    device, timeout, isolation = device_for(options.device), options.timeout, options.isolation and not options.pdb
    chosen = selected(spec, (op,), device, timeout, isolation=isolation, sandbox=options.sandbox)
    if folder and len(chosen) > 1:
        expected = f"expected one, such as {spec}:{one_line(chosen[0].name, 200)}"
        raise UsageError(
            f"dump={one_line(str(folder), 200)}: impl={spec} names {len(chosen)} implementations; {expected}"
        )
    console, codes = terminal.console_for(sys.stdout), [ExitCode.NOTHING]
    torch.set_num_threads(1)  # as in any other run
    for declared in chosen:
        implementation = asked_for([case.layout for case in cases], spec, declared)
        if options.pdb:
            implementation, timeout = _debugged(implementation)
        cells = [Cell(OPS[op], implementation, case.dtype, spec, configuration=options.configs) for case in cases]
        if loaded is not None:
            cells = list(map(loaded, cells))
        plan = Plan(
            tuple(cells),
            PROFILES["quick"],
            0,
            device,
            timeout,
            judge=PLAIN,
            within=(*options.context, *options.require_context),
            asked=True,
            held_to=options.require_context,
        )
        with session_of(implementation) as session, poisoned_memory():
            session.configure(options.configs)  # until the session ends
            tally = Tally(undeclared_model(implementation, device))
            for number, (cell, case) in enumerate(zip(cells, cases, strict=True), 1):
                kept = folder if number == len(cases) else None
                codes.append(_reproduce(console, cell, case, plan, lines[:number], kept, tally))
    return exit_code(found=ExitCode.FOUND in codes, broken=False, enough=ExitCode.PASS in codes)


def _the_op(cases: Sequence[Case]) -> str:
    """The op that all cases share. Raises UsageError if they do not."""
    for case in cases[1:]:
        if case.op != cases[0].op:
            raise UsageError(f"case={case.op}: expected cases of one op, {cases[0].op} as the first; run them apart")
    return cases[0].op


def _new(dump: str) -> Path:
    from normcheck.files import refuse_existing

    refuse_existing(Path(dump), "dump")
    return Path(dump)


def _debugged(implementation: Implementation) -> tuple[Implementation, float]:
    from normcheck.gate.debugger import FOREVER_SECONDS, debugged

    return debugged(implementation), FOREVER_SECONDS


def _reproduce(
    console: Console, cell: Cell, case: Case, plan: Plan, lines: Sequence[str], folder: Path | None, tally: Tally
) -> ExitCode:
    """Run the case and show it; with ``folder``, dump it there. Returns its exit code.

    ``lines``: those that this process has run, and last that of the case: what fails may need all of them. ``tally``:
    of those before.
    """
    name = cell.implementation.name
    compared: list[Expectation] = []
    reason = why_not(cell, plan.device)
    if not reason:
        result = run_case(cell, case, plan, Ask(watch=compared.append if folder else None))
        reason = result.refused
        if folder and not reason:
            from normcheck.gate.dump import write

            write(folder, cell, result, compared, plan.device)  # while the process still has the outputs
        tally.add(result)
        failed = result if result.failed else without_graph(tally)
        findings = [finding(cell, failed, plan.device, after=lines[:-1])] if failed else []
    if reason:
        terminal.render_skip(console, cell.key, reason)
        return ExitCode.NOTHING
    if folder:
        console.print(
            f"Written: {one_line(str(folder))}. Next: python {one_line(shlex.quote(str(folder / 'worst.py')))}\n",
            markup=False,
            soft_wrap=True,
        )
    rows = [
        (c.output, c.check, c.comparison.ratio, c.comparison.max_abs, c.comparison.max_ulp, c.comparison.uncheckable)
        for c in result.checked
    ]
    terminal.render_case(
        console,
        case=lines[-1],
        implementation=name,
        rows=rows,
        findings=findings,
        not_returned=result.not_returned,
        refused=result.seen.refused,
        contexts=result.contexts,
        pdb=not cell.loaded,
    )
    return ExitCode.FOUND if findings else ExitCode.PASS
