"""Known failures: a file that says which cells fail, and why that is no news. An entry that is not true any more is.

A line each, the cell as the terminal report prints it, and a reason, which is required::

    rmsnorm mine fp16  # dw sums in fp16, https://example.org/issues/7
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normcheck.cases.dtypes import DTYPES
from normcheck.errors import UsageError, one_line, one_of
from normcheck.files import contents
from normcheck.impls.discovery import ops
from normcheck.result import Verdict

LARGEST = 1 << 20
"""Bytes that a file of known failures may have."""


@dataclass(frozen=True)
class Known:
    """An entry: the cell, why it fails, and the file and line that say so."""

    op: str
    implementation: str
    dtype: str
    reason: str
    where: str

    def holds(self, verdict: Verdict) -> bool:
        """Whether this is about the cell of ``verdict``."""
        return self.cell == (verdict.op, verdict.implementation, verdict.dtype)

    @property
    def cell(self) -> tuple[str, str, str]:
        """The op, the implementation and the dtype."""
        return self.op, self.implementation, self.dtype


def read(file: str) -> tuple[Known, ...]:
    """The entries of a file. Raises UsageError, with the file's name and the line's number, for what is not one."""
    where = one_line(file, 200)
    try:
        text = contents(file, LARGEST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"known_failures={where}: expected text in UTF-8 (byte {error.start} is not)") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"known_failures={where}: expected a file that can be read ({reason})") from error
    entries: dict[tuple[str, str, str], Known] = {}
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
    op, implementation, dtype, reason = words[0], " ".join(words[1:-1]), words[-1], "".join(comment).strip()
    if op not in ops():
        raise UsageError(f"{where}: op={one_line(op, 60)}: expected {one_of(ops())}")
    if dtype not in DTYPES:
        raise UsageError(f"{where}: dtype={one_line(dtype, 60)}: expected {one_of(DTYPES)}")
    if not reason:
        raise UsageError(f"{where}: {said!r}: expected a reason behind it: # why it fails, and a link")
    return Known(op, implementation, dtype, one_line(reason, 500), where)


def marked(verdict: Verdict, entries: Sequence[Known]) -> Verdict:
    """``verdict``, with the reason of its entry where it failed and has one."""
    reason = next((entry.reason for entry in entries if entry.holds(verdict)), "")
    return replace(verdict, known=reason) if reason and verdict.status == "fail" else verdict


def stale(entries: Sequence[Known], verdicts: Sequence[Verdict], *, part: bool = False) -> tuple[str, ...]:
    """What is not true any more, a message each: a cell that passes, or that is not among the cells.

    ``part``: the cells are not all that the entries are about, so that one may be missing.
    """
    messages = []
    for entry in entries:
        cells = [v for v in verdicts if entry.holds(v)]
        said = f"{entry.where}: known failure {' '.join(entry.cell)!r}"
        if any(v.status == "pass" for v in cells):
            messages.append(f"{said} passes now: remove the line")
        elif not cells and not part:
            messages.append(f"{said} matches no cell of this run: remove the line")
    return tuple(messages)
