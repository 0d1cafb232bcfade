"""``normcheck tolerances``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from normcheck.cli import complete
from normcheck.cli.options import Device
from normcheck.errors import UsageError


def tolerances(
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CASE", help="A case line: show the bound of one element of it.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="With --explain: y, mean, rstd, bitmask, dx, dw or db.",
            autocompletion=complete.outputs,
        ),
    ] = None,
    at: Annotated[str | None, typer.Option("--at", help="With --explain: ROW,COLUMN, or ROW or COLUMN alone.")] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl",
            help="With --explain: whose model; default: the table's.",
            autocompletion=complete.implementations,
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """The table that decides, with its reasons; or the bound of one element, term by term."""
    if explain is None:
        for name, value in (("output", output), ("at", at), ("impl", impl)):
            if value is not None:
                raise UsageError(f"{name}={value}: expected --explain 'CASE' with it")
        from importlib.resources import files

        typer.echo(files("normcheck.oracle").joinpath("tolerances.toml").read_text(encoding="utf-8"), nl=False)
        return
    from normcheck.gate.explain_bound import Question
    from normcheck.gate.explain_bound import explain as explained

    explained(Question(line=explain, output=output or "", at=at or "", impl=impl or "", device=device), sys.stdout)
