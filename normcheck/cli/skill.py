"""Command ``normcheck skill``: one page for agents that write kernels, ``skill.md`` beside this file."""

from __future__ import annotations

from importlib.resources import files

import typer


def page() -> str:
    """The page as Markdown."""
    return files(__package__).joinpath("skill.md").read_text(encoding="utf-8")


def skill() -> None:
    """One page for agents that write kernels: when to run what, how to read it, when to stop."""
    typer.echo(page(), nl=False)
