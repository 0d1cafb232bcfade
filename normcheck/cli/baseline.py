"""Command ``normcheck baseline``: keep the worst ratios of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normcheck.errors import UsageError, one_line

app = typer.Typer(
    help="How near to its bound each output comes, kept to see drift: verify --baseline FILE.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _callback() -> None:
    pass


@app.command()
def make(
    reports: Annotated[list[str], typer.Argument(metavar="REPORT.json...", help="JSON reports of whole runs.")],
    out: Annotated[str, typer.Option("--out", help="File to write.")],
) -> None:
    """Keep the worst of each output of every cell that passed."""
    from normcheck.files import resolved
    from normcheck.gate.baseline import text_of
    from normcheck.reports.json_reader import read

    if resolved(out) in map(resolved, reports):
        raise UsageError(f"out={one_line(out, 200)}: expected another file, this one is read")
    runs = [(file, read(file)) for file in reports]
    text = text_of(runs)
    try:
        Path(out).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"out={one_line(out, 200)}: expected a file that can be written ({reason})") from error
    cells = [verdict for _, run in runs for verdict in run.verdicts]
    left_out = [one_line(f"{v.op} {v.implementation} {v.dtype} ({v.status})", 120) for v in cells if v.status != "pass"]
    kept = len(cells) - len(left_out)
    rest = f"; left out: {', '.join(left_out)}" if left_out else ""
    typer.echo(f"{one_line(out, 200)}: {kept} cell{'' if kept == 1 else 's'}{rest}")
