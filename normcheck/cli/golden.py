"""Commands ``normcheck golden``: record outputs, judge recorded ones again, compare two records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from normcheck.cli.options import Given, options
from normcheck.gate.options import VerifyOptions
from normcheck.options import built

app = typer.Typer(
    help="Recorded outputs, judged again on any machine, without the library that made them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command(name="record")
@options(
    VerifyOptions,
    only=("op", "impl", "dtype", "device", "timeout", "isolation", "sandbox"),
    help={"isolation": "Run kernels in processes of their own, or in this one."},
)
def record(
    out: Annotated[str, typer.Option("--out", help="New folder for the record; its parent has to exist.")],
    given: Given,
) -> None:
    """Run a fixed list of small cases on what is here and keep the outputs.

    Exit code: 0 recorded, and all of it holds; 1 recorded, and some of it does not hold; 2 wrong command line, or
    --out exists; 3 normcheck itself failed; 5 nothing ran and nothing was written.
    """
    from normcheck.files import refuse_existing
    from normcheck.gate.early import looked_at

    checked = built(VerifyOptions, given)
    looked_at(checked)
    refuse_existing(Path(out))
    if checked.isolation:
        from normcheck.isolation.forkserver import start_early

        start_early(checked.device)
    from normcheck.golden import run

    raise typer.Exit(run.record(checked, out, tuple(sys.argv[1:])))


@app.command(name="verify")
def verify(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders that golden record wrote.")],
) -> None:
    """Judge recorded outputs again, with the bounds of today.

    Exit code: 0 all of them hold; 1 some do not; 2 a folder is no record, or was changed; 3 normcheck itself failed; 5
    nothing was checked.
    """
    from normcheck.golden.early import looked_at

    looked_at(folders)
    from normcheck.golden import run

    raise typer.Exit(run.verify(folders, tuple(sys.argv[1:])))


@app.command(name="diff")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A folder that golden record wrote.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of the same implementations.")],
) -> None:
    """What moved between two records, by output, in ulps.

    Exit code: 0 the same bits; 1 something moved, or is in one of them only; 2 a folder is no record, or was changed;
    3 normcheck itself failed; 5 they have no case in common.
    """
    from normcheck.golden.early import looked_at

    looked_at((a, b))
    from normcheck.golden import run

    raise typer.Exit(run.diff(a, b))
