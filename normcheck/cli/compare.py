"""Command ``normcheck compare``: two implementations on the same cases."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from normcheck.cli import imports
from normcheck.cli.options import Given, offered, options
from normcheck.compare.options import CompareOptions
from normcheck.gate.options import VerifyOptions
from normcheck.options import built, options_of

_OFFERED = offered(options_of(VerifyOptions)["impl"])


@options(CompareOptions)
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="As for --impl.", autocompletion=_OFFERED)],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another, or the same one with --with.", autocompletion=_OFFERED)
    ],
    given: Given,
) -> None:
    """Two implementations on the same cases: what moved, by output, and which is nearer to fp64.

    Exit code: 0 both are inside their bounds in all cases, whether or not they differ; 1 one of them is outside, or,
    with --same-bits, a bit differs; 2 wrong command line, or an interpreter that cannot run B; 3 normcheck itself
    failed; 5 nothing was compared; 130 interrupted.
    """
    from normcheck.compare.early import looked_at

    checked = built(CompareOptions, given)
    looked_at(a, b, checked)
    from normcheck.isolation.forkserver import start_early

    start_early(checked.device)
    with imports.at_once():
        from normcheck.compare.run import compare as run_compare

    raise typer.Exit(run_compare(a, b, checked, tuple(sys.argv[1:])))
