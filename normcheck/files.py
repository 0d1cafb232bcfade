"""Reading foreign files safely, and writing new folders completely or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from normcheck.errors import UsageError, one_line, shown


def contents(path: str | Path, most: int, *, follow_links: bool = True) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes, which is no link unless ``follow_links``.

    Raises OSError if the file is larger, or not a regular file: reading a pipe may block, and a device has no end.
    Raises ValueError for a name that no file can have.
    """
    follow = 0 if follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        data = file.read(most + 1) if status.st_size <= most else b""
    size = max(status.st_size, len(data))  # it may have grown
    if size > most:
        raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {most:,} bytes")
    return data


def module_of(spec: str) -> str:
    """The file, or the module, that the ``--impl`` of a user's kernel names; "" if it is one of normcheck's own."""
    return spec if spec.endswith(".py") else spec.rpartition(":")[0]


def digest(path: str) -> str:
    """The SHA-256 of a file in hexadecimal; "" if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except (OSError, ValueError):
        return ""


def resolved(path: str) -> str:
    """The absolute path without symbolic links; ``path`` itself if no file can have that name."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path


def writable(path: str) -> bool:
    """Whether a file can be written at ``path``: by trying, since modes do not say it of /proc, or of a full disk.

    What is there keeps its content, and what was not is not there afterwards.
    """
    try:
        if os.path.isfile(path):
            open(path, "ab").close()
        elif os.path.exists(path):  # such as /dev/null, or a pipe
            return not os.path.isdir(path) and os.access(path, os.W_OK)
        else:
            place = os.path.realpath(path)  # a link may lead to what is not there yet
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            os.unlink(place)
    except (OSError, ValueError):  # also a name that no file can have
        return False
    return True


def _takes_folders(folder: Path) -> bool:
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".normcheck-", dir=folder))
    except OSError:
        return False
    return True


def refuse_existing(folder: Path, option: str = "out") -> None:
    """Raise UsageError if ``folder`` exists, or if the nearest existing folder above it is not writable.

    ``option``: the name of the command line's option, for the message.
    """
    named = f"{option}={one_line(str(folder), 200)}"
    try:
        if os.path.lexists(folder):
            raise UsageError(f"{named}: exists; expected a new folder, so remove it first")
        around = next(parent for parent in folder.resolve().parents if os.path.lexists(parent))
        if not _takes_folders(around):
            where = one_line(str(around), 200)
            raise UsageError(f"{named}: expected a folder around it that is writable, {where} is not")
    except (OSError, ValueError):  # a name that no file can have
        raise UsageError(f"{option}={shown(str(folder), 200)}: expected a path of a new folder") from None


def write_new(
    folder: Path, content: Mapping[str, bytes], option: str, check: Callable[[Path], object] | None = None
) -> None:
    """Write files, name -> bytes, into the new ``folder``: all of them, or none and no folder. Raises UsageError.

    ``check`` gets the finished folder before it has its name. ``option``: the command line's option, for messages.
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
