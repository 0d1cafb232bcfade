"""Files of others, read as data, and new folders, written all or not at all.

A file is a regular one of a size that is expected, or an OSError says why not.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from normcheck.errors import UsageError, one_line, shown


def contents(path: str | Path, most: int) -> bytes:
    """The bytes of a regular file, ``most`` at most.

    Raises OSError for what is no such file (a pipe would be waited for, a device has no end), and ValueError for a name
    that no file can have.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        read = file.read(most + 1)
    if len(read) > most:
        raise OSError(errno.EFBIG, f"expected at most {most:,} bytes")
    return read


def resolved(path: str) -> str:
    """The file that a path leads to; the path itself where no file can have that name."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path


def refuse_existing(folder: Path, option: str = "out") -> None:
    """Raise UsageError where nothing can be written: something is there, or the folder around it is not.

    ``option``: how the command line calls it.
    """
    named = f"{option}={one_line(str(folder), 200)}"
    try:
        if os.path.lexists(folder):
            raise UsageError(f"{named}: exists; expected a new folder, so remove it first")
        around = next(parent for parent in folder.resolve().parents if os.path.lexists(parent))
        if not around.is_dir() or not os.access(around, os.W_OK):
            where = one_line(str(around), 200)
            raise UsageError(f"{named}: expected a folder around it that is writable, {where} is not")
    except (OSError, ValueError):  # a name that no file can have
        raise UsageError(f"{option}={shown(str(folder), 200)}: expected a path of a new folder") from None


def write_new(
    folder: Path, content: Mapping[str, bytes], option: str, check: Callable[[Path], object] | None = None
) -> None:
    """Write files, name -> bytes, into the new ``folder``, all or none; ``check`` sees them before. Raises UsageError.

    ``option``: how the command line calls the folder.
    """
    refuse_existing(folder, option)
    try:
        folder.resolve().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name[:100]}.", dir=folder.resolve().parent) as around:
            beside = Path(around) / "new"
            beside.mkdir(mode=0o755)
            for name, data in content.items():
                (beside / name).write_bytes(data)
            if check:
                check(beside)
            refuse_existing(folder, option)
            beside.rename(folder)
    except OSError as error:
        named = f"{option}={one_line(str(folder), 200)}"
        raise UsageError(f"{named}: {error.strerror or error}; expected a folder that can be written") from None
