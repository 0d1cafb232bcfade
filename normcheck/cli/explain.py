"""Command ``normcheck explain``: the page of a kind of finding."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated

import typer

from normcheck.errors import UsageError, one_line, one_of
from normcheck.findings import page, summary
from normcheck.result import KINDS

_LINK = re.compile(r"\[([^]\n]+)\]\([\w./-]+\.md\)")
"""A link to another page, of which a terminal shows the text."""


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def explain(
    kind: Annotated[
        str | None,
        typer.Argument(help="As a report names it, such as mismatch. Default: a list of all.", autocompletion=_kinds),
    ] = None,
) -> None:
    """What a kind of finding means, its usual cause, a kernel that shows it and the same one mended."""
    if kind is None:
        width = max(map(len, KINDS))
        typer.echo("\n".join(f"{known:<{width}}  {summary(known)}" for known in KINDS))
        typer.echo("\nNext: normcheck explain KIND")
        return
    name = kind.lower().replace("-", "_").replace(" ", "_")
    if name not in KINDS:
        near = [known for known in KINDS if name and name in known] or get_close_matches(name, KINDS)
        expected = f"did you mean {' or '.join(near)}?" if near else f"expected {one_of(KINDS)}"
        raise UsageError(f"kind={one_line(kind, 60)}: no such kind of finding; {expected}")
    typer.echo(_LINK.sub(r"\1", page(name)), nl=False)
