"""The HTML report of a bench: a table and a picture for each op, dtype and direction, and the JSON report in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from normcheck.bench import plot
from normcheck.bench.report import MARKS, summary
from normcheck.bench.speed import COPY, ERROR, FAIL, MEASURED, SKIP, Bench, Speed
from normcheck.reports import _text
from normcheck.reports._page import put_page
from normcheck.reports._svg import figure, inline
from normcheck.reports._text import short


def write(bench: Bench, document: Mapping[str, object], stream: TextIO) -> None:
    """Write the page of ``bench``, with its JSON ``document``."""
    word, _, rest = summary(bench)
    reasons = dict.fromkeys(
        (f"{short(s.point.op)} {short(s.implementation)} {s.direction}", _size(s), short(_why(s), 400))
        for s in bench.speeds
        if s.status in (SKIP, FAIL, ERROR)
    )
    put_page(
        stream,
        "bench/templates/bench.html",
        document,
        word=word,
        status={"MEASURED": "pass", "FAIL": "fail", "ERROR": "error"}.get(word, "thin"),
        rest=rest,
        tables=[_table(bench, number, table) for number, table in enumerate(bench.tables, 1)],
        reasons=[*reasons],
        made=[
            ("command", short(shlex.join(("normcheck", *bench.argv)), 2000)),
            *([("suite", f"{bench.suite}: {bench.source}")] if bench.suite else []),
            *((f"bytes counted, {direction}", text) for direction, text in bench.counting.items()),
            ("copy", "reads half of these bytes and writes half"),
            ("time", bench.method),
            *((short(name, 60), short(str(value), 200)) for name, value in bench.environment.items() if value),
        ],
    )


def _why(speed: Speed) -> str:
    return speed.detail if speed.failure is None else f"{speed.failure.kind}: {speed.failure.message}"


def _size(speed: Speed) -> str:
    return f"{speed.point.M} x {speed.point.N}"


def _table(bench: Bench, number: int, speeds: Sequence[Speed]) -> dict[str, Any]:
    """A table, with its picture: a row for each size, GB/s and the share of the copy for each implementation."""
    first = speeds[0]
    names = list(dict.fromkeys(s.implementation for s in speeds if s.status != SKIP))
    title = f"{short(first.point.op)} {first.direction}, {first.point.dtype}, M = {first.point.M:,}"
    rows = []
    for size in dict.fromkeys(_size(s) for s in speeds):
        own = {s.implementation: s for s in speeds if _size(s) == size}
        copy = next((s.copy_gb_per_s for s in own.values() if s.copy_gb_per_s is not None), None)
        rows.append((size, _rate(copy), *(_cell(own[name]) if name in own else "" for name in names)))
    with figure(7.5, 4.0) as drawing:
        axes = drawing.add_subplot()
        plot.panel(axes, speeds, bench.implementations)
        axes.set_title("")  # the page has it
        handles, labels = axes.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=4)
        picture = inline(drawing, f"{title}: GB/s over N", number)
    return {"title": title, "header": ("M x N", COPY, *map(short, names)), "rows": rows, "picture": picture}


def _cell(speed: Speed) -> str:
    if speed.status != MEASURED or speed.gb_per_s is None:
        return MARKS.get(speed.status, "")
    share = "" if speed.share_of_copy is None else f" ({speed.share_of_copy:.0%})"
    return f"{_rate(speed.gb_per_s)}{share}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else _text.compact(value)
