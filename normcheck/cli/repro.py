"""``normcheck repro``."""

from __future__ import annotations

from typing import Annotated

import typer

from normcheck.cli import complete
from normcheck.cli.options import Device, Isolation, Timeout
from normcheck.cli.warm import warm


def repro(
    implementation: Annotated[str, typer.Argument(help="As for --impl.", autocompletion=complete.implementations)],
    case: Annotated[
        list[str],
        typer.Argument(help="A case line, quoted: 'rmsnorm fp16 M=3 N=129 ...'. Several run in one process, in order."),
    ],
    device: Device = "auto",
    timeout: Timeout = 120.0,
    isolation: Isolation = True,
    dump: Annotated[
        str | None,
        typer.Option("--dump", help="New folder for inputs, outputs, reference and bounds, and a script to read it."),
    ] = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="In this process: stop where it raises, or right after forward.")
    ] = False,
) -> None:
    """Run one case again, or several in one process, and show every check."""
    isolation = isolation and not pdb
    warm(device, isolation)
    from normcheck.gate.repro import repro_cases

    code = repro_cases(implementation, case, device, timeout, isolation=isolation, dump=dump, pdb=pdb)
    raise typer.Exit(code)
