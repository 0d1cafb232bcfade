"""The terminal report of a bench: a table per direction beside the copy, why numbers are missing, and the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normcheck.bench.speed import COPY, DIRECTIONS, ERROR, FAIL, MEASURED, SKIP, Bench, Speed
from normcheck.errors import ExitCode
from normcheck.reports import _text
from normcheck.reports._failure import put_failure
from normcheck.reports._progress import progress_line
from normcheck.reports._text import console_for, counted, percent, put, put_lines, short, table_lines, text_of

__all__ = ["console_for", "progress_line", "render"]

MARKS = {FAIL: "FAIL", SKIP: "-", ERROR: "ERROR"}
SIZE, COLUMN, GAP = len("1234567 x 123456 "), 6, 2
"""The least width of a size and of a speed, and the gap between them, in columns of the terminal."""
NAMED = 6
"""The number of sizes that a reason names; the others are counted."""


def render(bench: Bench, console: Console) -> None:
    """Print the report of ``bench``."""
    for table in bench.tables:
        _put_table(console, table)
    _put_findings(console, bench)
    _put_reasons(console, "Not judged, because normcheck failed", bench.with_status(ERROR), lambda s: s.detail)
    _put_reasons(console, "Not measured", bench.with_status(SKIP), lambda s: s.detail)
    _put_reasons(console, "Notes", bench.with_status(MEASURED), lambda s: s.note)
    _put_reasons(console, "Verified with fewer rows than timed, for want of memory", _partly(bench), _rows)
    _put_method(console, bench)
    _put_summary(console, bench)


def _put_table(console: Console, speeds: Sequence[Speed]) -> None:
    """Print GB/s, a line per size and a column per implementation that ran; several tables if one is too wide."""
    first = speeds[0]
    point = first.point
    weight = "" if point.weight_dtype == "same" else f", {point.weight_dtype} weight"
    bias = "" if point.bias else ", no bias"
    names = list(dict.fromkeys(speed.implementation for speed in speeds if speed.status != SKIP))
    shares = {name: _share(speeds, name) for name in names}
    widths = {name: GAP + max(COLUMN, len(short(name, 24)), len(shares[name])) for name in names}
    for part in _parts(widths, console.width - SIZE - COLUMN - GAP):
        put(console, (f"{point.op} {first.direction}, {point.dtype}{weight}{bias}: GB/s", "bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 0, 0, GAP), header_style="dim")
        table.add_column("M x N", min_width=SIZE)
        for name in (COPY, *part):
            table.add_column(text_of(console, short(name, 24)), justify="right", min_width=COLUMN)
        for size in dict.fromkeys(_size(s) for s in speeds):
            row = {s.implementation: s for s in speeds if _size(s) == size}
            table.add_row(size, *(Text(*cell) for cell in _cells(row, part)))
        table.add_row("of the copy", "", *(shares[name] for name in part), style="dim")
        for line in table_lines(console, table, wrap=False):
            put(console, line, wrap=False)
        put(console, "")


def _size(speed: Speed) -> str:
    return f"{speed.point.M} x {speed.point.N}"


def _parts(widths: dict[str, int], room: int) -> list[list[str]]:
    """The names of columns, split into parts that fit into ``room``; a part has at least one."""
    parts: list[list[str]] = [[]]
    for name in widths:
        if parts[-1] and sum(widths[n] for n in (*parts[-1], name)) > room:
            parts.append([])
        parts[-1].append(name)
    return parts


def _cells(row: dict[str, Speed], names: list[str]) -> list[tuple[str, str]]:
    """The numbers of one line as (text, style), the greatest in bold; a word if there is no number."""
    copy = next((s.copy_gb_per_s for s in row.values() if s.copy_gb_per_s is not None), None)
    best = max((s.gb_per_s or 0.0 for s in row.values()), default=0.0)
    cells = [(_gb_per_s(copy), "dim")]
    for name in names:
        speed = row[name]
        text = _gb_per_s(speed.gb_per_s) if speed.status == MEASURED else MARKS[speed.status]
        style = "bold red" if speed.status in (FAIL, ERROR) else "bold" if speed.gb_per_s == best else ""
        cells.append((text, style))
    return cells


def _gb_per_s(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else "<0.01"


def _share(speeds: Sequence[Speed], name: str) -> str:
    """The smallest and the largest share of the copy's rate that an implementation reached."""
    shares = [100 * s.share_of_copy for s in speeds if s.implementation == name and s.share_of_copy is not None]
    return f"{min(shares):.0f}-{max(shares):.0f}%" if shares else "-"


def _put_findings(console: Console, bench: Bench) -> None:
    """Print the first finding of each kind in full, with the other sizes that have one like it."""
    alike: dict[tuple[str, ...], list[Speed]] = {}
    for speed in bench.with_status(FAIL):
        if speed.failure is not None:
            key = (speed.point.op, speed.implementation, speed.point.dtype, speed.failure.kind, speed.failure.output)
            alike.setdefault(key, []).append(speed)
    for group in alike.values():
        first = group[0]
        assert first.failure is not None
        cell = f"{short(first.point.op)} {short(first.implementation)} {short(first.point.dtype)}"
        put_failure(console, cell, first.failure)
        elsewhere = [s for s in group if _size(s) != _size(first)]
        if elsewhere:
            put(console, f"The same kind of finding at {_sizes(elsewhere)}.", hang=2)
        put(console, "")


def _put_reasons(console: Console, title: str, speeds: Iterable[Speed], reason_of: Callable[[Speed], str]) -> None:
    """Print each reason once, with the implementations, directions and sizes that it holds for."""
    reasons: dict[tuple[str, str, str], list[Speed]] = {}
    for speed in speeds:
        if reason := reason_of(speed):
            reasons.setdefault((reason, speed.implementation, speed.point.op), []).append(speed)
    if not reasons:
        return
    put(console, (title, "bold"))
    for (reason, name, op), own in reasons.items():
        directions = {s.direction for s in own}
        way = "" if directions == set(DIRECTIONS) else f" {own[0].direction}"
        put(console, f"{short(op)} {short(name)}{way}, {_sizes(own)}:", indent=2, hang=4)
        put_lines(console, reason, indent=4, style="dim")
    put(console, "")


def _sizes(speeds: Sequence[Speed]) -> str:
    sizes = list(dict.fromkeys(_size(s) for s in speeds))
    more = len(sizes) - NAMED
    return ", ".join(sizes[:NAMED]) + (f" and {counted(more, 'other size')}" if more > 0 else "")


def _partly(bench: Bench) -> tuple[Speed, ...]:
    return tuple(s for s in bench.with_status(MEASURED) if s.verified_rows < s.point.M)


def _rows(speed: Speed) -> str:
    return f"verified at {speed.verified_rows:,} of {speed.point.M:,} rows"


def _put_method(console: Console, bench: Bench) -> None:
    """Print the method and the versions, which a pasted table needs."""
    if bench.suite:
        put(console, (f"Suite {bench.suite}: {bench.source}.", "dim"), hang=2)
    counting = "; ".join(f"{direction}: {text}" for direction, text in bench.counting.items())
    put(console, (f"Bytes counted, {counting}. GB/s is 1e9 bytes a second of the median time.", "dim"), hang=2)
    put(console, ("Copy: reads half of these bytes and writes half.", "dim"), hang=2)
    put(console, (f"Time: {bench.method}.", "dim"), hang=2)
    cases = max((speed.cases for speed in bench.with_status(MEASURED)), default=0)
    if cases:
        words = f"Verified before it was timed: {counted(cases, 'case')} of each size and dtype, every output."
        put(console, (words, "dim"), hang=2)
    facts = [f"{short(name, 40)} {short(str(value), 60)}" for name, value in bench.environment.items() if value]
    put(console, (", ".join(facts), "dim"), hang=2)


def _put_summary(console: Console, bench: Bench) -> None:
    """Print the last line. It is one line however long, so that ``tail -1`` shows all of it."""
    word, style, rest = summary(bench)
    put(console, (word, style), f"  {rest}", wrap=False)


def summary(bench: Bench) -> tuple[str, str, str]:
    """The outcome in capitals, its style, and what was measured."""
    words = {
        ExitCode.PASS: ("MEASURED", "green"),
        ExitCode.FOUND: ("FAIL", "bold red"),
        ExitCode.BROKEN: ("ERROR", "bold magenta"),
    }
    nothing = ("NOTHING MEASURED", "bold yellow") if bench.complete else ("INCOMPLETE", "bold yellow")
    measured, failed = bench.with_status(MEASURED), bench.with_status(FAIL)
    tally = [f"{len(measured):,} of {counted(len(bench.speeds), 'speed')} measured"]
    if failed:
        names = ", ".join(dict.fromkeys(short(s.implementation, 40) for s in failed))
        tally.append(f"{len(failed):,} without a number because of findings: {names}")
    if errors := bench.with_status(ERROR):
        tally.append(f"{len(errors):,} not judged")
    if skipped := bench.with_status(SKIP):
        tally.append(f"{percent(len(skipped), len(bench.speeds))} not run")
    word, style = words.get(ExitCode(bench.exit_code), nothing)
    return word, style, f"{', '.join(tally)}; {_text.seconds(bench.seconds)}"
