"""The terminal reports of golden records: what was recorded, whether it still holds, what moved between two records."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from normcheck.golden.results import CellChange, Difference, Moved, VerifiedRecord
from normcheck.reports import terminal
from normcheck.reports._cells import name_of
from normcheck.reports._text import STATUS_STYLES, counted, most_ulps, percent, put, put_lines, short

__all__ = ["render_difference", "render_recorded", "render_verified"]

INDENT = 6


def render_recorded(verified: VerifiedRecord, size: int, console: Console) -> None:
    """Print the folder and ``size`` in bytes of a new record, and its cells as ``golden verify`` judges them."""
    if size:
        put(console, (short(verified.folder), "bold"), f": {size:,} bytes", wrap=False)
    else:
        put(console, ("nothing ran, so nothing was written", "bold yellow"), wrap=False)
    terminal.render(verified.run, console)


def render_verified(verified: VerifiedRecord, console: Console) -> None:
    """Print the number of checks, the versions that a record comes from, and the report of its cells."""
    checks = f"{counted(verified.checks, 'check')} of recorded outputs"
    put(console, (short(verified.folder), "bold"), f": {checks}", wrap=False)
    put(console, (f"recorded with {_facts(verified.recorded)}", "dim"), hang=2)
    terminal.render(verified.run, console)


def _facts(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{short(name, 40)} {short(value, 60)}" for name, value in facts.items())


def render_difference(difference: Difference, console: Console) -> None:
    """Print which versions differ, a block for each cell, and a last line that sums up."""
    for mark, folder in zip("-+", difference.folders, strict=True):
        put(console, f"{mark} ", (short(folder), "bold"), wrap=False)
    for fact, (was, now) in difference.facts.items():
        put(console, f"{short(fact, 40)}: {short(was, 60) or 'none'} -> {short(now, 60) or 'none'}", indent=2, hang=4)
    for cell in difference.cells:
        _put_cell(console, cell)
    for folder, own in zip(difference.folders, difference.only, strict=True):
        if own:
            put(console, (f"only in {short(folder)}", "bold"), wrap=False)
        for key, cases in own.items():
            put(console, f"{name_of(key)}: {counted(cases, 'case')}", indent=2, hang=4)
    _put_summary(console, difference)


def _put_cell(console: Console, cell: CellChange) -> None:
    mark, style = ("moved", STATUS_STYLES["skip"]) if cell.moved or cell.notes else ("same", STATUS_STYLES["pass"])
    put(console, (f"{mark:<{INDENT}}", style), f"{name_of(cell.key)}  {counted(cell.cases, 'case')}", hang=INDENT)
    for moved in cell.moved:
        put(console, _words(moved, cell.cases), indent=INDENT, hang=2)
        put(console, (moved.case, "dim"), indent=INDENT + 2, wrap=False)
    for note in cell.notes:
        put_lines(console, note, indent=INDENT, style="dim")


def _words(moved: Moved, cases: int) -> str:
    share = percent(moved.elements, moved.total)
    elements = f"{moved.elements:,} of {moved.total:,} ({share})"
    words = f"{moved.output}: {elements} in {moved.cases} of {counted(cases, 'case')}"
    return words if moved.ulps is None else f"{words}, {most_ulps(moved.ulps)}"


def _put_summary(console: Console, difference: Difference) -> None:
    """Print one line, which is enough by itself."""
    if not difference.cases:
        put(console, ("NOTHING IN COMMON", "bold yellow"), wrap=False)
        return
    only = [
        f"; {counted(sum(own.values()), 'case')} only in the {which}"
        for own, which in zip(difference.only, ("first", "second"), strict=True)
        if own
    ]
    moved = [cell for cell in difference.cells if cell.moved or cell.notes]
    if not moved:
        word, style = ("SAME BITS, OTHER CASES", "bold yellow") if only else ("SAME", "bold green")
        words = f"{counted(len(difference.cells), 'cell')}, {counted(difference.cases, 'case')}: the same bits"
        put(console, (word, style), f"  {words}{''.join(only)}", wrap=False)
        return
    largest = max((m.ulps or 0.0 for cell in moved for m in cell.moved), default=0.0)
    most = f", {most_ulps(largest)}" if largest else ""
    words = f"{len(moved)} of {counted(len(difference.cells), 'cell')}{most}{''.join(only)}"
    put(console, ("MOVED", "bold yellow"), f"  {words}", wrap=False)
