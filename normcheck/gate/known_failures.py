"""Known failures: a file of cells that fail, with reasons. They do not fail the run; an entry out of date does.

Each line has a cell as the terminal report prints it, and a reason, which is required::

    rmsnorm mine fp16  # dw sums in fp16, https://example.org/issues/7
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normcheck.cases.dtypes import DTYPES, named
from normcheck.cases.ops import OPS
from normcheck.errors import UsageError, one_line, one_of
from normcheck.files import contents
from normcheck.result import CellKey, Verdict

LARGEST_BYTES = 1 << 20
"""Bytes that a file of known failures may have at most."""


@dataclass(frozen=True)
class Known:
    """An entry: the cell (on any device), why it fails, and the entry's place as FILE:LINE."""

    cell: CellKey
    reason: str
    where: str


def read(file: str) -> tuple[Known, ...]:
    """The entries of a file. Raises UsageError, with the file's name and the line's number, for a wrong line."""
    where = one_line(file, 200)
    try:
        text = contents(file, LARGEST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"known_failures={where}: expected text in UTF-8 (byte {error.start} is not)") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"known_failures={where}: expected a file that can be read ({reason})") from error
    entries: dict[CellKey, Known] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            entry = _entry(line.strip(), f"{where}:{number}")
            if entry.cell in entries:
                raise UsageError(f"{entry.where}: {entries[entry.cell].where} has this cell as well, expected once")
            entries[entry.cell] = entry
    return tuple(entries.values())


def _entry(line: str, where: str) -> Known:
    said = one_line(line, 120)
    cell, *comment = re.split(r"\s+#", line, maxsplit=1)
    words = cell.split()
    if len(words) < 3:
        raise UsageError(f"{where}: {said!r}: expected 'OP IMPLEMENTATION DTYPE  # reason'")
    op, implementation, dtype, reason = words[0], " ".join(words[1:-1]), named(words[-1]), "".join(comment).strip()
    if op not in OPS:
        raise UsageError(f"{where}: op={one_line(op, 60)}: expected {one_of(OPS)}")
    if dtype not in DTYPES:
        raise UsageError(f"{where}: dtype={one_line(dtype, 60)}: expected {one_of(DTYPES)}")
    if not reason:
        raise UsageError(f"{where}: {said!r}: expected a reason behind it: # why it fails, and a link")
    return Known(CellKey(op, implementation, dtype), one_line(reason, 500), where)


def marked(verdict: Verdict, entries: Sequence[Known]) -> Verdict:
    """``verdict``; if it failed and has an entry, with the entry's reason."""
    reason = next((entry.reason for entry in entries if entry.cell == verdict.key), "")
    return replace(verdict, known=reason) if reason and verdict.status == "fail" else verdict


def stale(entries: Sequence[Known], verdicts: Sequence[Verdict], *, part: bool = False) -> tuple[str, ...]:
    """A message for each entry that is out of date: its cell passes, or is not among the cells.

    ``part``: the run has only some of the entries' cells, so that one may be missing.
    """
    messages = []
    for entry in entries:
        cells = [v for v in verdicts if entry.cell == v.key]
        line = f"{entry.where}: known failure {str(entry.cell)!r}"
        if any(v.status == "pass" for v in cells):
            messages.append(f"{line} passes now: remove the line")
        elif not cells and not part:
            messages.append(f"{line} matches no cell of this run: remove the line")
    return tuple(messages)
