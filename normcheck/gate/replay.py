"""Cases that failed in earlier runs, which the next run tries first: a folder with a file of case lines for each cell.

Hypothesis' own database does not serve: it keeps the choices that led to a case, which lead to another one after any
change of the strategies, and a case of the core was never drawn. A case line means the same in every version and can be
read in a CI artifact. A line that does not parse is left out, with a note.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from normcheck.cases.case import Case
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, one_line
from normcheck.files import contents
from normcheck.gate.plan import Replay
from normcheck.result import CellKey, Verdict

MOST = 20
"""Cases kept for a cell, the newest first."""

LARGEST_BYTES = 1 << 16
"""Bytes that the file of a cell may have at most."""

_KEPT_NOTES = 3


def replays(folder: str, cells: Iterable[Cell], parse: Callable[[str], Case]) -> dict[CellKey, Replay]:
    """Cell -> its stored cases, read by ``parse``. Makes the folder; raises UsageError if it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"database={one_line(folder, 200)}: expected a folder that can be written ({reason})"
        ) from error
    keys = dict.fromkeys(cell.key for cell in cells)
    found = {key: _replay(_file(folder, key), key, parse) for key in keys}
    return {key: replay for key, replay in found.items() if replay.cases or replay.notes}


def keep(folder: str, verdict: Verdict) -> str:
    """Store the case that failed in front of the cell's other ones. Returns why that was impossible, or ""."""
    if verdict.failure is None or not verdict.failure.case:
        return ""
    path = _file(folder, verdict.key)
    lines, _ = _lines(path)
    lines = list(dict.fromkeys((verdict.failure.case, *lines)))[:MOST]
    name = one_line(str(verdict.key), 300)
    new = path.with_suffix(".new")
    try:
        new.write_text("\n".join((f"# cases by which {name} failed, the latest first", *lines, "")), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        return f"database={one_line(str(path), 200)}: cannot be written ({error.strerror or error})"
    return ""


def _file(folder: str, key: CellKey) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", key.implementation)[-60:]
    number = zlib.crc32("\n".join(key.words).encode("utf-8", "backslashreplace"))
    return Path(folder) / f"{key.op}-{name}-{key.dtype}-{number:08x}.txt"


def _lines(path: Path) -> tuple[list[str], str]:
    """The case lines of a file, and why it cannot be used, or ""."""
    try:
        text = contents(path, LARGEST_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        return [], ""
    except UnicodeDecodeError:
        return [], "expected text in UTF-8"
    except OSError as error:
        return [], f"cannot be read ({error.strerror or error})"
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")], ""


def _replay(path: Path, key: CellKey, parse: Callable[[str], Case]) -> Replay:
    lines, trouble = _lines(path)
    notes = [f"nothing is replayed, {one_line(path.name, 120)}: {trouble}"] if trouble else []
    cases = []
    for line in lines[:MOST]:
        try:
            case = parse(line)
            if (case.op, case.dtype) != (key.op, key.dtype):
                raise UsageError(f"expected a case of {key.op} {key.dtype}, not of {case.op} {case.dtype}")
        except UsageError as error:
            notes.append(f"not replayed, {one_line(path.name, 120)}: {one_line(str(error), 200)}")
        else:
            cases.append(case)
    return Replay(tuple(cases), tuple(notes[:_KEPT_NOTES]))
