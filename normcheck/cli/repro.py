"""Command ``normcheck repro``: run cases again."""

from __future__ import annotations

from typing import Annotated

import typer

from normcheck.cli import imports
from normcheck.cli.options import Given, offered, options
from normcheck.gate.options import ReproOptions, VerifyOptions, built, options_of


@options(ReproOptions)
def repro(
    implementation: Annotated[
        str, typer.Argument(help="As for --impl.", autocompletion=offered(options_of(VerifyOptions)["impl"]))
    ],
    case: Annotated[
        list[str],
        typer.Argument(help="A case line, quoted: 'rmsnorm fp16 M=3 N=129 ...'. Several run in one process, in order."),
    ],
    given: Given,
) -> None:
    """Run one case again, or several in one process, and show every check."""
    if given["isolation"] and not given["pdb"]:
        from normcheck.isolation.forkserver import start_early

        start_early(given["device"])
    with imports.at_once():
        from normcheck.gate.repro import repro_cases

    raise typer.Exit(repro_cases(implementation, case, built(ReproOptions, given)))
