"""``normcheck golden``: what its three commands do, and their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from normcheck.checks.cell import Cell
from normcheck.files import refuse_existing
from normcheck.gate.decision import BROKEN, FOUND, NOTHING, PASS
from normcheck.gate.request import Request, plan_of
from normcheck.golden import report
from normcheck.golden.diff import difference
from normcheck.golden.record import recorded_plan
from normcheck.golden.store import write
from normcheck.golden.verify import verified, verified_record
from normcheck.reports import terminal

_WORST = (FOUND, BROKEN, NOTHING, PASS)
"""Exit codes, the one that decides first."""


def record(request: Request, out: str, argv: Sequence[str]) -> int:
    """Record what ``request`` asks for into the new folder ``out``, and judge it. What does not hold is kept all the
    same: a record says what was. Nothing is written where nothing ran."""
    folder = Path(out)
    refuse_existing(folder)
    plan = plan_of(request)
    torch.set_num_threads(1)
    console = terminal.console_for(sys.stdout)
    names = [(cell.op.name, cell.implementation.name, cell.dtype) for cell in plan.cells]
    with terminal.live(console, len(plan.cells), cells=names) as screen:

        def progress(number: int, cell: Cell) -> None:
            screen.update(number, len(plan.cells), *names[number], 0, None)

        kept = recorded_plan(plan, progress)
    judged = verified_record(kept, out, argv)
    ran = any(entry.tensors for entry in kept.entries)
    size = write(kept, folder) if ran else 0
    report.render_recorded(judged, size, console)
    return judged.run.exit_code


def verify(folders: Sequence[str], argv: Sequence[str]) -> int:
    """Judge the records in ``folders`` again, one after another; all are read before the first is told of."""
    found = [verified(folder, argv) for folder in dict.fromkeys(folders)]
    console = terminal.console_for(sys.stdout)
    for one in found:
        report.render_verified(one, console)
    codes = {one.run.exit_code for one in found}
    return next(code for code in _WORST if code in codes)


def diff(a: str, b: str) -> int:
    """Tell what moved from one record to the other: 0 nothing, 1 something, 5 they have nothing in common."""
    found = difference(a, b)
    report.render_difference(found, terminal.console_for(sys.stdout))
    if not found.cases:
        return NOTHING
    return FOUND if found.changed else PASS
