"""What can be wrong with a record's folder, as far as it shows before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from normcheck.errors import UsageError, one_line

_MOST_FILES = 80  # of a folder: reading stops there


def looked_at(folders: Iterable[str]) -> None:
    """Raise UsageError for the first of ``folders`` that is none, or cannot be that of a record."""
    for folder in folders:
        names_in(Path(folder))


def names_in(folder: Path) -> set[str]:
    """The names of the files in ``folder``. Raises UsageError if it is none, or has too many of them."""
    shown = one_line(str(folder), 200)
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry, _ in zip(entries, range(_MOST_FILES), strict=False)}
    except (OSError, ValueError):
        raise UsageError(f"golden={shown}: expected a folder of normcheck golden record") from None
    if len(names) == _MOST_FILES:
        raise UsageError(f"golden={shown}: has too many files; expected those of normcheck golden record")
    return names
