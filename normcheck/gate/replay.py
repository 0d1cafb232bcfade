"""Cases that failed in earlier runs, to be run first in the next: a folder with a text file a cell, a case line each.

Not Hypothesis' own database: that keeps the choices that led to a case, which mean another case after any change of
what may be drawn, and a failure of the core was never drawn. A case line means the same in every version, can be
read in a CI artifact, and is data: what does not parse is left out, and said.
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
from normcheck.result import Verdict

MOST = 20
"""Cases that are kept of a cell, the newest first."""

LARGEST = 1 << 16
"""Bytes that a file of a cell may have."""

_KEPT_NOTES = 3


def replays(folder: str, cells: Iterable[Cell], parse: Callable[[str], Case]) -> dict[tuple[str, str, str], Replay]:
    """What is stored of each cell. The folder is made where it is missing; UsageError where that is not possible."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"database={one_line(folder, 200)}: expected a folder that can be written ({reason})"
        ) from error
    keys = dict.fromkeys((cell.op.name, cell.implementation.name, cell.dtype) for cell in cells)
    found = {key: _replay(_file(folder, *key), key, parse) for key in keys}
    return {key: replay for key, replay in found.items() if replay.cases or replay.notes}


def keep(folder: str, verdict: Verdict) -> str:
    """Store the case by which a cell failed, before those that are there; returns why it could not, or ""."""
    if verdict.failure is None or not verdict.failure.case:
        return ""
    path = _file(folder, verdict.op, verdict.implementation, verdict.dtype)
    lines, _ = _lines(path)
    lines = list(dict.fromkeys((verdict.failure.case, *lines)))[:MOST]
    name = one_line(f"{verdict.op} {verdict.implementation} {verdict.dtype}", 300)
    new = path.with_suffix(".new")
    try:
        new.write_text("\n".join((f"# cases by which {name} failed, the latest first", *lines, "")), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        return f"database={one_line(str(path), 200)}: cannot be written ({error.strerror or error})"
    return ""


def _file(folder: str, op: str, implementation: str, dtype: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", implementation)[-60:]
    number = zlib.crc32(f"{op}\n{implementation}\n{dtype}".encode("utf-8", "backslashreplace"))
    return Path(folder) / f"{op}-{name}-{dtype}-{number:08x}.txt"


def _lines(path: Path) -> tuple[list[str], str]:
    """The case lines of a file, and why there are none where it cannot be used."""
    try:
        text = contents(path, LARGEST).decode("utf-8-sig")
    except FileNotFoundError:
        return [], ""
    except UnicodeDecodeError:
        return [], "expected text in UTF-8"
    except OSError as error:
        return [], f"cannot be read ({error.strerror or error})"
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")], ""


def _replay(path: Path, key: tuple[str, str, str], parse: Callable[[str], Case]) -> Replay:
    lines, trouble = _lines(path)
    notes = [f"nothing is replayed, {one_line(path.name, 120)}: {trouble}"] if trouble else []
    cases = []
    for line in lines[:MOST]:
        try:
            case = parse(line)
            if (case.op, case.dtype) != (key[0], key[2]):
                raise UsageError(f"expected a case of {key[0]} {key[2]}, not of {case.op} {case.dtype}")
        except UsageError as error:
            notes.append(f"not replayed, {one_line(path.name, 120)}: {one_line(str(error), 200)}")
        else:
            cases.append(case)
    return Replay(tuple(cases), tuple(notes[:_KEPT_NOTES]))
