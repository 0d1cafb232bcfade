"""The three commands of ``normcheck golden``: record, verify and diff, with their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from normcheck.checks.cell import Cell
from normcheck.errors import ExitCode
from normcheck.files import refuse_existing
from normcheck.gate.decision import exit_code
from normcheck.gate.options import VerifyOptions
from normcheck.gate.prepare import prepared
from normcheck.golden import report
from normcheck.golden.diff import difference
from normcheck.golden.record import record_plan
from normcheck.golden.store import write
from normcheck.golden.verify import verify_folder, verify_record
from normcheck.reports import terminal


def record(options: VerifyOptions, out: str, argv: Sequence[str]) -> int:
    """Record the cells of ``options`` into the new folder ``out``, and judge them; returns the exit code.

    A case that fails is kept as well: a record states what was returned. If nothing ran, nothing is written.
    """
    folder = Path(out)
    refuse_existing(folder)
    plan = prepared(options)
    torch.set_num_threads(1)
    console = terminal.console_for(sys.stdout)
    with terminal.live(console, len(plan.cells), cells=[cell.key for cell in plan.cells]) as screen:

        def progress(number: int, cell: Cell) -> None:
            screen.update(number, cell.key, 0, None)

        new = record_plan(plan, progress)
    verified = verify_record(new, out, argv)
    ran = any(entry.tensors for entry in new.entries)
    size = write(new, folder) if ran else 0
    report.render_recorded(verified, size, console)
    return verified.run.exit_code


def verify(folders: Sequence[str], argv: Sequence[str]) -> int:
    """Judge the records in ``folders`` again, report each after all are judged, and return the exit code."""
    records = [verify_folder(folder, argv) for folder in dict.fromkeys(folders)]
    console = terminal.console_for(sys.stdout)
    for verified in records:
        report.render_verified(verified, console)
    codes = {verified.run.exit_code for verified in records}
    enough = ExitCode.NOTHING not in codes
    return exit_code(found=ExitCode.FOUND in codes, broken=ExitCode.BROKEN in codes, enough=enough)


def diff(a: str, b: str) -> int:
    """Report what moved from record ``a`` to ``b``. Returns 0: nothing; 1: something; 5: they share no case."""
    moved = difference(a, b)
    report.render_difference(moved, terminal.console_for(sys.stdout))
    if not moved.cases:
        return ExitCode.NOTHING
    return ExitCode.FOUND if moved.changed else ExitCode.PASS
