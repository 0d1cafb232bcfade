"""Command ``normcheck export-case``: a case as files, for tests in other languages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normcheck.cli import imports
from normcheck.errors import UsageError, shown


def export_case(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case line, quoted: 'rmsnorm fp16 M=3 N=129 ...'.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for them.")],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="KEY=VALUE", help="What the kernel declares, such as sum=rounded; may repeat."),
    ] = None,
) -> None:
    """Inputs of a case, what each output must be, and its bounds: as .npz, and as raw bytes with a header in JSON.

    For tests in C++ and other languages. An element is right from value - below to value + bound.
    """
    declared = dict(map(_pair, model or ()))
    with imports.at_once():
        from normcheck.bounds.export import export

    written = export(case, folder, declared)
    outputs = ", ".join(each.name.removesuffix(".value") for each in written if each.role == "value")
    typer.echo(f"{folder}: {len(written)} tensors; outputs {outputs}")


def _pair(text: str) -> tuple[str, Any]:
    """Key and value of ``text``; a whole number, true and false are what they look like."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"model={shown(text)}: expected KEY=VALUE, such as sum=rounded")
    known = {"true": True, "false": False}
    return key, known[value] if value in known else int(value) if value.isdecimal() and len(value) < 12 else value
