"""Command ``normcheck tolerances``: the table of tolerances, or the bound of one element."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from normcheck.cli.options import Given, offered, options
from normcheck.errors import UsageError
from normcheck.gate.options import VerifyOptions
from normcheck.options import built, options_of


def _outputs(incomplete: str) -> list[str]:
    """The outputs and gradients of all ops, for completion."""
    from normcheck.result import OUTPUTS

    return [name for name in OUTPUTS if name.startswith(incomplete)]


@options(VerifyOptions, only=("device",))
def tolerances(
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CASE", help="A case line: show the bound of one element of it.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="With --explain: y, mean, rstd, bitmask, dx, dw or db.",
            autocompletion=_outputs,
        ),
    ] = None,
    at: Annotated[str | None, typer.Option("--at", help="With --explain: ROW,COLUMN, or ROW or COLUMN alone.")] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl",
            help="With --explain: whose model; default: the table's.",
            autocompletion=offered(options_of(VerifyOptions)["impl"]),
        ),
    ] = None,
    *,
    given: Given,
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

    device = built(VerifyOptions, given).device
    explained(Question(line=explain, output=output or "", at=at or "", impl=impl or "", device=device), sys.stdout)
