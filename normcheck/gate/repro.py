"""``normcheck repro``: one case again, or some in one process, every check of it, and what somebody looks at beside."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from normcheck.cases.case import Case
from normcheck.checks.attempt import run_case, why_not
from normcheck.checks.cell import Cell
from normcheck.checks.finding import finding
from normcheck.errors import UsageError, one_line
from normcheck.gate.decision import FOUND, NOTHING, PASS
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.request import check_timeout, parsed, selected
from normcheck.gate.run import its_process
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import Expectation
from normcheck.reports import terminal
from normcheck.runner.call import poisoned_memory
from normcheck.runner.device import device_for


def repro_cases(
    spec: str,
    lines: Sequence[str],
    device: str,
    timeout: float,
    *,
    isolation: bool = True,
    dump: str | None = None,
    pdb: bool = False,
) -> int:
    """Run case lines again, in one process, on the implementation that ``spec`` names; returns the exit code.

    ``dump``: a new folder for what was computed and compared in the last case; ``pdb``: under the debugger, in this
    process.
    """
    cases = [parsed(line) for line in lines]
    op = _the_op(cases)
    check_timeout(timeout)
    folder = None if dump is None else _new(dump)
    if pdb and sys.stdin is None:
        raise UsageError("pdb: standard input is closed; expected a terminal, or the debugger's commands")
    where = device_for(device)
    found = selected(spec, (op,), where, timeout, isolation=isolation)
    if folder and len(found) > 1:
        expected = f"expected one, such as {spec}:{one_line(found[0].name, 200)}"
        raise UsageError(
            f"dump={one_line(str(folder), 200)}: impl={spec} names {len(found)} implementations; {expected}"
        )
    console, codes = terminal.console_for(sys.stdout), [NOTHING]
    for implementation in found:
        if pdb:
            implementation, timeout = _debugged(implementation)
        cells = [Cell(discovery.ops()[op], implementation, case.dtype, spec) for case in cases]
        plan = Plan(tuple(cells), PROFILES["quick"], 0, where, timeout)
        with _quitting(pdb), its_process(cells[0]), poisoned_memory():
            for number, (cell, case, line) in enumerate(zip(cells, cases, lines, strict=True), 1):
                kept = folder if number == len(cases) else None
                codes.append(_reproduced(console, cell, case, plan, line, kept))
    return FOUND if FOUND in codes else PASS if PASS in codes else NOTHING


def _the_op(cases: Sequence[Case]) -> str:
    """The one op that the cases are of."""
    for case in cases[1:]:
        if case.op != cases[0].op:
            raise UsageError(f"case={case.op}: expected cases of one op, {cases[0].op} as the first; run them apart")
    return cases[0].op


def _new(dump: str) -> Path:
    from normcheck.files import refuse_existing

    refuse_existing(Path(dump), "dump")
    return Path(dump)


def _debugged(implementation: Implementation) -> tuple[Implementation, float]:
    from normcheck.gate.debugger import FOREVER, debugged

    return debugged(implementation), FOREVER


def _quitting(pdb: bool) -> AbstractContextManager[None]:
    if not pdb:
        return nullcontext()
    from normcheck.gate.debugger import quitting

    return quitting()


def _reproduced(console: Console, cell: Cell, case: Case, plan: Plan, line: str, folder: Path | None) -> int:
    """Run the case, show it and dump it; its exit code."""
    name = cell.implementation.name
    compared: list[Expectation] = []
    reason = why_not(cell, plan.device)
    if not reason:
        result = run_case(cell, case, plan, watch=compared.append if folder else None)
        reason = result.refused
        if folder and not reason:
            from normcheck.gate.dump import write

            write(folder, cell, result, compared, plan.device)  # while the process still has the outputs
        findings = [finding(cell, result, plan.device)] if result.failed else []
    if reason:
        terminal.render_skip(console, (case.op, name, case.dtype), reason)
        return NOTHING
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
        case=line,
        implementation=name,
        rows=rows,
        findings=findings,
        not_returned=result.not_returned,
        refused=result.seen.refused,
    )
    return FOUND if findings else PASS
