"""Pieces of a run as plain text, for formats that put their own markup around them.

Every piece is printable, has a limited length, and has no line that a CI log takes for a command.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console

from normcheck.errors import cut, visible
from normcheck.reports._cells import columns_of, name_of, name_room, put_cell, stands_on
from normcheck.reports._failure import headline, put_failure
from normcheck.reports._summary import rest, word
from normcheck.reports._text import lines_of, put, put_lines, short
from normcheck.result import SweepResult, Verdict

WIDTH = 80
LONGEST_BLOCK = 6_000
LONGEST_CELLS = 20_000
LONGEST_PATH = 1_000
LONGEST_MESSAGE = 600


def kind(verdict: Verdict) -> str:
    """The kind of a failed cell's finding; ``failure`` if it has none."""
    return short(verdict.failure.kind, 40) if verdict.failure is not None else "failure"


def reason(verdict: Verdict) -> str:
    """Why a cell did not pass, in one line: the headline of its finding, or its detail, and how thin it is."""
    if verdict.failure is not None:
        return headline(verdict.failure)
    if verdict.status == "thin":
        return f"thin, {stands_on(verdict)}: {short(verdict.detail, 500)}"
    return short(verdict.detail, 500) or f"{short(verdict.status)} without a reason"


def block(verdict: Verdict, width: int = WIDTH) -> str:
    """The failure block of a failed cell, or the detail of another, in lines of ``width`` characters."""
    console, stream = _console(width)
    if verdict.failure is not None:
        put_failure(console, name_of(verdict.key), verdict.failure, known=verdict.known)
    else:
        thin = f": {stands_on(verdict)}" if verdict.status == "thin" else ""
        put(console, f"{visible(verdict.status[:20]).upper()} {name_of(verdict.key)}{thin}")
        put_lines(console, verdict.detail, indent=2)
    return _limited(stream.getvalue(), LONGEST_BLOCK)


def cells(verdicts: Sequence[Verdict], width: int = WIDTH) -> str:
    """A line per cell, as a terminal shows it."""
    console, stream = _console(width)
    columns = columns_of((verdict.key for verdict in verdicts), name_room(console))
    for verdict in verdicts:
        put_cell(console, verdict, columns)
    return _limited(stream.getvalue(), LONGEST_CELLS)


def messages(run: SweepResult, most: int = 20) -> list[str]:
    """The gate's messages, each on one line; at most ``most`` of them, and how many more there are."""
    lines = (" ".join(visible(line.strip()) for line in lines_of(message)) for message in run.messages[:most])
    shown = [cut(f"\\{line}" if line.startswith("::") else line, LONGEST_MESSAGE) for line in lines]
    more = len(run.messages) - len(shown)
    return [*shown, f"and {more:,} more messages"] if more > 0 else shown


def outcome(run: SweepResult) -> str:
    """The last line of the terminal report: ``FAIL  2 of 3 cells failed: ...``."""
    return f"{word(run)}  {rest(run)}"


def environment(run: SweepResult) -> dict[str, str]:
    """The environment of the run, each fact on one line."""
    facts = list(run.environment.items())[:100]
    return {short(name, 60): short(str(value), 200) for name, value in facts if value}


def is_known(verdict: Verdict) -> bool:
    """Whether a cell failed as a known failure."""
    return verdict.status == "fail" and bool(verdict.known)


def place(verdict: Verdict) -> tuple[str, int | None]:
    """File and line to point at; ("", None) if not known. A file inside GITHUB_WORKSPACE is relative to it.

    The line is the one that raised an exception, else the one that defines the implementation.
    """
    if not verdict.file:
        return "", None
    raised = verdict.failure.line if verdict.failure is not None else None
    return _from_workspace(verdict.file[:LONGEST_PATH]), raised or verdict.line


def _from_workspace(file: str) -> str:
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    try:
        seen = os.path.relpath(file, workspace) if workspace else file
    except ValueError:  # another drive, or a name that no file can have
        return file
    return file if seen.startswith("..") else seen.replace(os.sep, "/")


def put_text(stream: TextIO, text: str) -> None:
    """Write ``text``, with escapes for the characters that the encoding of ``stream`` does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _console(width: int) -> tuple[Console, io.StringIO]:
    """A console without colour, even under FORCE_COLOR, and the stream that holds what is printed on it."""
    stream = io.StringIO()
    options = {"markup": False, "highlight": False, "emoji": False, "force_jupyter": False}
    return Console(file=stream, width=width, color_system=None, force_terminal=False, **options), stream  # type: ignore[arg-type]


def _limited(text: str, most: int) -> str:
    """``text`` without its last newline; the middle of a long one cut, which makes no line begin with ``::``."""
    return cut(text.rstrip("\n"), most)
