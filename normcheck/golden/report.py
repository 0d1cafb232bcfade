"""Golden records, told to people: what was recorded, whether it still holds, what moved between two of them."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from normcheck.golden.results import CellChange, Difference, Moved, Verified
from normcheck.reports import terminal
from normcheck.reports._text import STATUS_STYLES, counted, percent, put, put_lines, short, ulps

__all__ = ["render_difference", "render_recorded", "render_verified"]

INDENT = 6


def render_recorded(judged: Verified, size: int, console: Console) -> None:
    """Print what was recorded, judged as ``golden verify`` would, and where it is."""
    if size:
        put(console, (short(judged.folder), "bold"), f": {size:,} bytes", wrap=False)
    else:
        put(console, ("nothing ran, so nothing was written", "bold yellow"), wrap=False)
    terminal.render(judged.run, console)


def render_verified(found: Verified, console: Console) -> None:
    """Print where a record comes from, the report of its cells, and how many checks that rests on."""
    put(console, (short(found.folder), "bold"), f": {counted(found.checks, 'check')} of recorded outputs", wrap=False)
    put(console, (f"recorded with {_facts(found.recorded)}", "dim"), hang=2)
    terminal.render(found.run, console)


def _facts(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{short(name, 40)} {short(value, 60)}" for name, value in facts.items())


def render_difference(found: Difference, console: Console) -> None:
    """Print which versions differ, a block for each cell where something moved, and one last line."""
    for mark, folder in zip("-+", found.folders, strict=True):
        put(console, f"{mark} ", (short(folder), "bold"), wrap=False)
    for fact, (was, now) in found.facts.items():
        put(console, f"{short(fact, 40)}: {short(was, 60) or 'none'} -> {short(now, 60) or 'none'}", indent=2, hang=4)
    for cell in found.cells:
        _put_cell(console, cell)
    for folder, own in zip(found.folders, found.only, strict=True):
        if own:
            put(console, (f"only in {short(folder)}", "bold"), wrap=False)
        for name, cases in own.items():
            put(console, f"{' '.join(short(word) for word in name)}: {counted(cases, 'case')}", indent=2, hang=4)
    _put_last(console, found)


def _put_cell(console: Console, cell: CellChange) -> None:
    name = " ".join(short(word) for word in (cell.op, cell.implementation, cell.dtype))
    mark, style = ("moved", STATUS_STYLES["skip"]) if cell.moved or cell.notes else ("same", STATUS_STYLES["pass"])
    put(console, (f"{mark:<{INDENT}}", style), f"{name}  {counted(cell.cases, 'case')}", hang=INDENT)
    for moved in cell.moved:
        put(console, _words(moved, cell.cases), indent=INDENT, hang=2)
        put(console, (moved.case, "dim"), indent=INDENT + 2, wrap=False)
    for note in cell.notes:
        put_lines(console, note, indent=INDENT, style="dim")


def _words(moved: Moved, cases: int) -> str:
    share = percent(moved.elements, moved.total)
    where = (
        f"{moved.output}: {moved.elements:,} of {moved.total:,} ({share}) in {moved.cases} of {counted(cases, 'case')}"
    )
    return where if moved.ulps is None else f"{where}, at most {ulps(moved.ulps)} ulp"


def _put_last(console: Console, found: Difference) -> None:
    """One line, enough by itself."""
    if not found.cases:
        put(console, ("NOTHING IN COMMON", "bold yellow"), wrap=False)
        return
    only = [
        f"; {counted(sum(own.values()), 'case')} only in the {which}"
        for own, which in zip(found.only, ("first", "second"), strict=True)
        if own
    ]
    moved = [cell for cell in found.cells if cell.moved or cell.notes]
    if not moved:
        word, style = ("SAME BITS, OTHER CASES", "bold yellow") if only else ("SAME", "bold green")
        words = f"{counted(len(found.cells), 'cell')}, {counted(found.cases, 'case')}: the same bits"
        put(console, (word, style), f"  {words}{''.join(only)}", wrap=False)
        return
    largest = max((m.ulps or 0.0 for cell in moved for m in cell.moved), default=0.0)
    most = f", at most {ulps(largest)} ulp" if largest else ""
    words = f"{len(moved)} of {counted(len(found.cells), 'cell')}{most}{''.join(only)}"
    put(console, ("MOVED", "bold yellow"), f"  {words}", wrap=False)
