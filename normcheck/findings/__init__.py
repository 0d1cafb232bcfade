"""A page for each kind of finding, KIND.md beside this file: what it means, an example, the example mended."""

from __future__ import annotations

from importlib.resources import files

from normcheck.result import KINDS


def page(kind: str) -> str:
    """The page of one of ``KINDS`` as Markdown. Its first line is ``# KIND: a summary``."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind}: expected one of {KINDS}")
    return files(__package__).joinpath(f"{kind}.md").read_text(encoding="utf-8")


def summary(kind: str) -> str:
    """What the kind means, in a few words: the first line of its page."""
    return page(kind).partition("\n")[0].partition(": ")[2]
