"""Command ``normcheck baseline``: keep the worst ratios of reports, or the bits of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normcheck.cli.options import Given, options
from normcheck.errors import UsageError, one_line
from normcheck.gate.options import VerifyOptions
from normcheck.options import built

app = typer.Typer(
    help="What is kept to see what moved: ratios to the bounds (verify --baseline FILE), or a kernel's bits.",
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


@app.command()
@options(VerifyOptions, only=("op", "impl", "dtype", "profile", "max_examples", "seed", "device", "timeout", "sandbox"))
def bits(
    out: Annotated[str, typer.Option("--out", help="New file, for the digests of what --impl returns.")] = "",
    against: Annotated[str, typer.Option("--against", help="Such a file: its cases are run and compared.")] = "",
    *,
    given: Given,
) -> None:
    """Keep digests of all outputs of a cell's core, or compare with kept ones: an upgrade without the old version.

    Exit code: 0 kept, or the same bits; 1 a bit differs; 2 wrong command line; 3 normcheck itself failed; 5 nothing
    ran, or a kept cell has no implementation here.
    """
    if bool(out) == bool(against):
        raise UsageError(f"out={one_line(out, 200)} against={one_line(against, 200)}: expected one of the two")
    checked = built(VerifyOptions, given)
    from normcheck.gate.early import looked_at

    looked_at(checked)
    from normcheck.isolation.forkserver import start_early

    start_early(checked.device)
    from normcheck.compare import bits as kept

    raise typer.Exit(kept.keep(checked, out) if out else kept.against(checked, against))
