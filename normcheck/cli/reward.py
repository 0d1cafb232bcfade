"""Command ``normcheck reward``: what a training loop learns of a file, as JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from normcheck.cli.options import Given, options
from normcheck.errors import ExitCode
from normcheck.training.options import RewardOptions

_CODES = {"right": ExitCode.PASS, "unjudged": ExitCode.BROKEN, "thin": ExitCode.NOTHING}


@options(RewardOptions)
def reward(
    file: Annotated[str, typer.Argument(help="FILE.py, or FILE.py:NAME.")],
    given: Given,
) -> None:
    """Judge a kernel written by a program: one line of JSON, whose score is 0 to 1.

    Exit code: 0 right; 1 wrong or cheating; 2 wrong command line; 3 it could not be judged; 5 nothing is wrong, but too
    little was judged.
    """
    from normcheck.training.reward import reward as reward_of

    found = reward_of(
        file,
        given["op"],
        given["seconds"],
        dtypes=given.get("dtype") or (),
        seed=given.get("seed"),
        device=given["device"],
    )
    typer.echo(found.json())
    raise typer.Exit(int(_CODES.get(found.kind, ExitCode.FOUND)))
