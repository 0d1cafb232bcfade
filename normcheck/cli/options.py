"""Options of the command line that more than one command has. Imports nothing that takes time."""

from __future__ import annotations

from typing import Annotated

import typer

from normcheck.cli import complete
from normcheck.errors import UsageError

Op = Annotated[
    list[str] | None, typer.Option("--op", help="Op to check; may repeat. Default: all.", autocompletion=complete.ops)
]
Impl = Annotated[
    list[str] | None,
    typer.Option(
        "--impl",
        help="Known name, FILE.py, FILE.py:NAME or MODULE:NAME; may repeat. Default: see list.",
        autocompletion=complete.implementations,
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", help="fp16, bf16 or fp32; may repeat. Default: all.", autocompletion=complete.dtypes),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.", autocompletion=complete.devices)]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds that a case may take.")]
Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require", help="Implementation that must run here; may repeat.", autocompletion=complete.implementations
    ),
]
AllowThin = Annotated[
    bool | None,
    typer.Option("--allow-thin", help="A cell whose core was not finished does not fail the run.", show_default=False),
]
Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report", help="FORMAT:PATH, such as json:out.json; - is standard output.", autocompletion=complete.reports
    ),
]
KnownFailures = Annotated[
    str | None, typer.Option("--known-failures", help="File of cells that are known to fail: OP IMPL DTYPE  # reason.")
]
Baseline = Annotated[
    str | None, typer.Option("--baseline", help="File of normcheck baseline make; drift from it fails.")
]
DriftRatio = Annotated[
    float | None, typer.Option("--drift-ratio", help="Times the stored ratio that is drift. Default: 2.")
]
DriftUlp = Annotated[float | None, typer.Option("--drift-ulp", help="Ulps more that are drift. Default: 1.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show only failures and the last line.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show all that was measured, and every reason why a case was not run.")
]
Config = Annotated[
    str | None, typer.Option("--config", help="TOML file with [tool.normcheck]. Default: the nearest pyproject.toml.")
]
Isolation = Annotated[
    bool, typer.Option("--isolation/--no-isolation", help="Run kernels in processes of their own, or in this one.")
]


def verbosity_of(quiet: bool, verbose: bool) -> int:
    """-1, 0 or 1. Raises UsageError for both at once."""
    if quiet and verbose:
        raise UsageError("quiet, verbose: expected one of -q and -v, or neither")
    return int(verbose) - int(quiet)
