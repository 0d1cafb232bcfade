"""A run in pieces of plain text, for formats that put them between marks of their own.

Every text is printable, in lines that no CI log takes for a command, and of an end that is known.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console

from normcheck.reports._cells import columns_of, name_of, name_room, put_cell
from normcheck.reports._failure import headline, put_failure
from normcheck.reports._summary import rest, word
from normcheck.reports._text import cut, lines_of, put, put_lines, short, visible
from normcheck.result import Run, Verdict

WIDTH = 80
LONGEST_BLOCK = 6_000
LONGEST_CELLS = 20_000
LONGEST_PATH = 1_000
LONGEST_MESSAGE = 600


def cell(verdict: Verdict) -> str:
    """``rmsnorm mine.py fp16``."""
    return " ".join(short(word) for word in name_of(verdict))


def kind(verdict: Verdict) -> str:
    """The kind of a failed cell's finding; ``failure`` where none is told."""
    return short(verdict.failure.kind, 40) if verdict.failure is not None else "failure"


def said(verdict: Verdict) -> str:
    """One line about a cell: what is wrong of a failed one, why another was skipped or not judged."""
    if verdict.failure is not None:
        return headline(verdict.failure)
    return short(verdict.detail, 500) or f"{short(verdict.status)} without a reason"


def block(verdict: Verdict, width: int = WIDTH) -> str:
    """All that is told of a failed cell, or the detail of another, in lines of ``width`` characters."""
    console, stream = _console(width)
    if verdict.failure is not None:
        put_failure(console, cell(verdict), verdict.failure, known=verdict.known)
    else:
        put(console, f"{visible(verdict.status[:20]).upper()} {cell(verdict)}")
        put_lines(console, verdict.detail, indent=2)
    return _limited(stream.getvalue(), LONGEST_BLOCK)


def cells(verdicts: Sequence[Verdict], width: int = WIDTH) -> str:
    """A line per cell, as a terminal shows it."""
    console, stream = _console(width)
    columns = columns_of((name_of(verdict) for verdict in verdicts), name_room(console))
    for verdict in verdicts:
        put_cell(console, verdict, columns)
    return _limited(stream.getvalue(), LONGEST_CELLS)


def messages(run: Run, most: int = 20) -> list[str]:
    """What the gate says beside the cells, each on one line."""
    lines = (" ".join(visible(line.strip()) for line in lines_of(message)) for message in run.messages[:most])
    told = [cut(f"\\{line}" if line.startswith("::") else line, LONGEST_MESSAGE) for line in lines]
    more = len(run.messages) - len(told)
    return [*told, f"and {more:,} more messages"] if more > 0 else told


def outcome(run: Run) -> str:
    """The last line of the terminal report: ``FAIL  2 of 3 cells failed: ...``."""
    return f"{word(run)}  {rest(run)}"


def environment(run: Run) -> dict[str, str]:
    """Where the run was made, each fact on one line."""
    facts = list(run.environment.items())[:100]
    return {short(name, 60): short(str(value), 200) for name, value in facts if value}


def is_known(verdict: Verdict) -> bool:
    """Whether a failed cell is one that the gate knows of."""
    return verdict.status == "fail" and bool(verdict.known)


def place(verdict: Verdict) -> tuple[str, int | None]:
    """File and line to point at, "" where it is not known: the file as seen from GITHUB_WORKSPACE if it is inside.

    The line is where an exception was raised, else where the implementation is defined.
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
    """Write ``text``; what the encoding of ``stream`` does not have is escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _console(width: int) -> tuple[Console, io.StringIO]:
    """A console without colour, whatever NO_COLOR and FORCE_COLOR say, and what is printed on it."""
    stream = io.StringIO()
    options = {"markup": False, "highlight": False, "emoji": False, "force_jupyter": False}
    return Console(file=stream, width=width, color_system=None, force_terminal=False, **options), stream  # type: ignore[arg-type]


def _limited(text: str, most: int) -> str:
    """``text`` without its last newline; the middle of a long one cut, which never begins a line with ``::``."""
    return cut(text.rstrip("\n"), most)
