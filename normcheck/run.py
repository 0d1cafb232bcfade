"""A whole run: every cell of a plan, shown while it happens, then the reports and the exit code."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

import torch

from normcheck import discovery
from normcheck.attempt import run_case, why_not
from normcheck.call import poisoned_memory
from normcheck.case import parse
from normcheck.environment import environment
from normcheck.errors import UsageError
from normcheck.explain import finding
from normcheck.gate import BROKEN, FOUND, NOTHING, PASS, decide
from normcheck.inputs import DY_KINDS, ROW_KINDS, WEIGHT_KINDS
from normcheck.plan import PROFILES, Cell, Plan
from normcheck.reports import terminal
from normcheck.request import Request, Target, check_timeout, device_for, plan_of, targets_of
from normcheck.result import Run, Verdict
from normcheck.sweep import run_cell


def run(request: Request, argv: tuple[str, ...]) -> int:
    """Check everything that ``request`` asks for; returns the exit code. Raises UsageError before anything runs."""
    start = time.perf_counter()
    targets = targets_of(request)
    plan = plan_of(request)
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    screen_stream = sys.stderr if any(target.path == "-" for target in targets) else sys.stdout
    verdicts, complete = _sweep(plan, screen_stream)
    status, code, messages = decide(verdicts, request.require, complete=complete)
    result = Run(
        argv=argv,
        seed=request.seed,
        profile=request.profile,
        seconds=time.perf_counter() - start,
        environment=environment(plan.device),
        verdicts=verdicts,
        status=status,
        exit_code=code,
        messages=messages,
        complete=complete,
    )
    written = [_write(result, target) for target in targets]
    terminal.render(result, terminal.console_for(screen_stream), cells=False)
    return code if code or all(written) else BROKEN  # a report that is missing must not look like a pass


def _sweep(plan: Plan, stream: TextIO) -> tuple[tuple[Verdict, ...], bool]:
    """Every cell's verdict, and whether all were reached before somebody interrupted."""
    verdicts: list[Verdict] = []
    names = [(cell.op.name, cell.implementation.name, cell.dtype) for cell in plan.cells]
    try:
        with terminal.live(terminal.console_for(stream), len(plan.cells), cells=names) as screen:
            for index, cell in enumerate(plan.cells):

                def progress(cases: int, worst: float, index: int = index) -> None:
                    screen.update(index, len(plan.cells), *names[index], cases, worst)

                progress(0, 0.0)
                verdict = _judged(cell, plan, progress)
                verdicts.append(verdict)
                screen.verdict(verdict)
    except KeyboardInterrupt:
        return tuple(verdicts), False
    return tuple(verdicts), True


def _judged(cell: Cell, plan: Plan, progress: object) -> Verdict:
    """run_cell; a fault of normcheck itself is an ``error`` verdict, and the other cells go on."""
    try:
        return run_cell(cell, plan, progress)  # type: ignore[arg-type]
    except UsageError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Verdict(
            op=cell.op.name,
            implementation=cell.implementation.name,
            dtype=cell.dtype,
            device=plan.device,
            status="error",
            detail=f"normcheck itself failed: {type(error).__name__}: {error} ({where})",
        )


def _write(result: Run, target: Target) -> bool:
    """Write one report; False, and a line on standard error, where that failed."""
    report = discovery.reports()[target.format]
    if target.path == "-":
        report.write(result, sys.stdout)
        return True
    try:
        with open(target.path, "w", encoding="utf-8") as stream:
            report.write(result, stream)
    except OSError as error:
        print(f"normcheck: report={target.format}:{target.path}: {error.strerror or error}", file=sys.stderr)
        return False
    return True


def repro_case(spec: str, line: str, device: str, timeout: float) -> int:
    """Run one case line again on the implementation that ``spec`` names; returns the exit code."""
    ops = discovery.ops()
    options = {name: op.options for name, op in ops.items()}
    case = parse(line, options=options, kinds={"rows": ROW_KINDS, "dy": DY_KINDS, "weights": WEIGHT_KINDS})
    check_timeout(timeout)
    if not case.bias and not ops[case.op].bias_optional:
        raise UsageError(f"bias=none in the case line: {case.op} always has a bias")
    where = device_for(device)
    console = terminal.console_for(sys.stdout)
    code = NOTHING
    for implementation in discovery.select(spec, (case.op,)):
        cell = Cell(ops[case.op], implementation, case.dtype, spec)
        plan = Plan((cell,), PROFILES["quick"], 0, where, timeout)
        reason = why_not(cell, where)
        if reason:
            console.print(f"skip {case.op} {implementation.name} {case.dtype}: {reason}", markup=False)
            continue
        with poisoned_memory():
            result = run_case(cell, case, plan)
            if result.refused:
                console.print(f"skip {case.op} {implementation.name} {case.dtype}: {result.refused}", markup=False)
                continue
            found = [finding(cell, result, where)] if result.failed else []
        compared = ((c.output, c.check, c.comparison) for c in result.checked)
        rows = [(output, name, c.ratio, c.max_abs, c.max_ulp, c.uncheckable) for output, name, c in compared]
        terminal.render_case(
            console,
            case=line,
            implementation=implementation.name,
            rows=rows,
            findings=found,
            not_returned=result.not_returned,
        )
        code = FOUND if found else PASS if code == NOTHING else code
    return code
