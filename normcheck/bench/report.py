"""A bench, told to people: a table per direction beside the copy, what has no number and why, and the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from normcheck.bench.speed import COPY, DIRECTIONS, ERROR, FAIL, MEASURED, SKIP, Bench, Speed
from normcheck.reports import _text
from normcheck.reports._failure import put_failure
from normcheck.reports._text import console_for, counted, percent, put, put_lines, short

__all__ = ["console_for", "progress", "render"]

MARKS = {FAIL: "FAIL", SKIP: "-", ERROR: "ERROR"}
SIZE = len("1234567 x 123456 ")
NAMED = 6
"""Sizes that are named in a reason; the others are counted."""


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


def progress(console: Console) -> Callable[[str], None]:
    """Show where a bench is: one line that is written over, on a terminal only; "" takes it away.

    No thread draws it: that would be in the times.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return lambda words: None
    width = console.width - 1
    return lambda words: print(f"\r{short(words, width) if words else '':<{width}}\r", end="", file=console.file)


def _put_table(console: Console, table: Sequence[Speed]) -> None:
    """GB/s: a line per size, a column per implementation that ran at all; as many tables as their columns need."""
    first = table[0]
    point = first.point
    weight = "" if point.weight_dtype == "same" else f", {point.weight_dtype} weight"
    bias = "" if point.bias else ", no bias"
    names = list(dict.fromkeys(speed.implementation for speed in table if speed.status != SKIP))
    widths = {name: max(len(short(name, 24)), 6) + 2 for name in (COPY, *names)}
    words = f"{point.op} {first.direction}, {point.dtype}{weight}{bias}: GB/s"
    for part in _parts(names, widths, console.width - SIZE - widths[COPY]):
        put(console, (words, "bold"))
        head = "".join(f"{short(name, 24):>{widths[name]}}" for name in (COPY, *part))
        put(console, (f"{'M x N':<{SIZE}}{head}", "dim"), wrap=False)
        for size in dict.fromkeys(_size(s) for s in table):
            row = {s.implementation: s for s in table if _size(s) == size}
            put(console, f"{size:<{SIZE}}", *_cells(row, part, widths), wrap=False)
        put(console, (f"{'of the copy':<{SIZE}}{'':>{widths[COPY]}}{_shares(table, part, widths)}", "dim"), wrap=False)
        put(console, "")


def _size(speed: Speed) -> str:
    return f"{speed.point.M} x {speed.point.N}"


def _parts(names: list[str], widths: dict[str, int], room: int) -> list[list[str]]:
    """``names`` in parts that fit; a part has one at least."""
    parts: list[list[str]] = [[]]
    for name in names:
        if parts[-1] and sum(widths[n] for n in (*parts[-1], name)) > room:
            parts.append([])
        parts[-1].append(name)
    return parts


def _cells(row: dict[str, Speed], names: list[str], widths: dict[str, int]) -> list[tuple[str, str]]:
    """The numbers of one line, the greatest in bold; what is no number says what happened."""
    copy = next((s.copy_gb_per_s for s in row.values() if s.copy_gb_per_s is not None), None)
    best = max((s.gb_per_s or 0.0 for s in row.values()), default=0.0)
    cells = [(f"{_gb_per_s(copy):>{widths[COPY]}}", "dim")]
    for name in names:
        speed = row[name]
        text = _gb_per_s(speed.gb_per_s) if speed.status == MEASURED else MARKS[speed.status]
        style = "bold red" if speed.status in (FAIL, ERROR) else "bold" if speed.gb_per_s == best else ""
        cells.append((f"{text:>{widths[name]}}", style))
    return cells


def _gb_per_s(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else "<0.01"


def _shares(table: Sequence[Speed], names: list[str], widths: dict[str, int]) -> str:
    """Of each implementation the smallest and the largest share of the copy's rate."""
    cells = []
    for name in names:
        shares = [100 * s.share_of_copy for s in table if s.implementation == name and s.share_of_copy is not None]
        text = f"{min(shares):.0f}-{max(shares):.0f}%" if shares else "-"
        cells.append(f"{text:>{widths[name]}}")
    return "".join(cells)


def _put_findings(console: Console, bench: Bench) -> None:
    """One finding of each kind: the first, in full, and where else there is one like it."""
    alike: dict[tuple[str, ...], list[Speed]] = {}
    for speed in bench.with_status(FAIL):
        if speed.failure is not None:
            key = (speed.point.op, speed.implementation, speed.point.dtype, speed.failure.kind, speed.failure.output)
            alike.setdefault(key, []).append(speed)
    for own in alike.values():
        first = own[0]
        assert first.failure is not None
        cell = f"{short(first.point.op)} {short(first.implementation)} {short(first.point.dtype)}"
        put_failure(console, cell, first.failure)
        elsewhere = [s for s in own if _size(s) != _size(first)]
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
    """What a pasted table must say of how it came about."""
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
    """The last line. It is one line however long, so that ``tail -1`` shows all of it."""
    words = {0: ("MEASURED", "green"), 1: ("FAIL", "bold red"), 3: ("ERROR", "bold magenta")}
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
    word, style = words.get(bench.exit_code, nothing)
    put(console, (word, style), f"  {', '.join(tally)}; {_text.seconds(bench.seconds)}", wrap=False)
