"""Files that others wrote, read as data: a regular file of a size that is expected, or an OSError that says why not."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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
