"""The plot of a bench, a PNG: GB/s over N, a line per implementation, and the copy as the ceiling. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from normcheck.bench.speed import MEASURED, Bench, Speed
from normcheck.errors import UsageError
from normcheck.reports._text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG_FROM_RATIO = 16
"""The axis is logarithmic if the largest N is at least this many times the smallest."""


def check(paths: Iterable[str]) -> None:
    """Refuse, before anything runs, a plot that could not be made afterwards. Raises UsageError."""
    for path in paths:
        if path == "-":
            raise UsageError("report=png:-: expected a path, a picture is not for standard output")


def save(bench: Bench, path: str) -> None:
    """Write the plot of ``bench``: a panel per table, two in a row. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = bench.tables
    columns = min(2, max(len(tables), 1))
    rows = -(-max(len(tables), 1) // columns)
    figure = Figure(figsize=(7.5 * columns, 5 * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(bench))
    for number, table in enumerate(tables, 1):
        panel(figure.add_subplot(rows, columns, number), table, bench.implementations)
    lines = {
        str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()
    }  # the legend is under the panels: within one it would hide lines
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 5), fontsize=8)
    figure.savefig(path, format="png", dpi=120)


def _title(bench: Bench) -> str:
    what = bench.suite or "normcheck bench"
    return f"{what} on {short(bench.environment.get('device', bench.device), 80)}"


def panel(axes: Axes, table: Sequence[Speed], names: Sequence[str]) -> None:
    """Draw one table as lines; every implementation has one colour in all panels, the copy that of the text."""
    import matplotlib

    ceiling = {s.point.N: s.copy_gb_per_s for s in table if s.copy_gb_per_s is not None}
    axes.plot(
        list(ceiling),
        list(ceiling.values()),
        color=matplotlib.rcParams["text.color"],
        linestyle="--",
        marker="_",
        label="copy of the same bytes",
    )
    for name in names:
        own = [s for s in table if s.implementation == name and s.status == MEASURED]
        if own:
            number = names.index(name)
            ns, speeds = [s.point.N for s in own], [s.gb_per_s or 0.0 for s in own]
            look = f"C{number % 10}", "o^sDvP"[number % 6]
            axes.plot(ns, speeds, label=short(name, 40), color=look[0], marker=look[1], markersize=4)
    widths = [s.point.N for s in table]
    if max(widths) >= _LOG_FROM_RATIO * min(widths):
        axes.set_xscale("log", base=2)
    first = table[0]
    axes.set_title(f"{first.point.op} {first.direction}, {first.point.dtype}, M = {first.point.M}", fontsize=11)
    axes.set_xlabel("N: hidden size (elements)")
    axes.set_ylabel("counted bytes / median time (GB/s)")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
