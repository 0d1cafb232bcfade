"""Command ``normcheck repro``: run cases again."""

from __future__ import annotations

from typing import Annotated

import typer

from normcheck.cli import imports
from normcheck.cli.options import Given, offered
from normcheck.cli.options import options as with_options
from normcheck.errors import UsageError
from normcheck.gate.options import ReproOptions, VerifyOptions
from normcheck.options import built, options_of


@with_options(ReproOptions)
def repro(
    implementation: Annotated[
        str,
        typer.Argument(
            help="As for --impl. None with --kernelbench or --solution.",
            autocompletion=offered(options_of(VerifyOptions)["impl"]),
        ),
    ],
    case: Annotated[
        list[str] | None,
        typer.Argument(help="A case line, quoted: 'rmsnorm fp16 M=3 N=129 ...'. Several run in one process, in order."),
    ] = None,
    *,
    given: Given,
) -> None:
    """Run one case again, or several in one process, and show every check."""
    options = built(ReproOptions, given)
    if not (case or options.loads):
        raise UsageError("case is missing: expected normcheck repro IMPLEMENTATION 'CASE LINE'")
    if options.isolation and not options.pdb:
        from normcheck.isolation.forkserver import start_early

        start_early(options.device)
    with imports.at_once():
        from normcheck.gate.repro import repro_cases

    if options.loads:
        from normcheck.loaders.job import repro_loaded

        raise typer.Exit(repro_loaded((implementation, *(case or ())), options))
    raise typer.Exit(repro_cases(implementation, case or (), options))
