"""A private folder for what a loader writes: the files of a solution, and those that import it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from normcheck.errors import UsageError


class Folder:
    """A new folder that only this user can read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, files: Mapping[str, str], below: str = "") -> Path:
        """Write ``files``, relative path -> text, into the folder ``below`` of it; returns that. Raises UsageError.

        A path that leaves the folder is refused here as well, whoever has checked it before.
        """
        root = (self.path / below).resolve()
        for name, text in files.items():
            target = (root / name).resolve()
            if not target.is_relative_to(root) or target == root:
                raise UsageError(f"path={name[:200]!r}: expected a path inside the folder of its solution")
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.write_bytes(text.encode("utf-8", "surrogatepass"))
        return root


def told_of(error: UsageError, place: Path, named: str) -> UsageError:
    """``error``, with the option that a user gave in place of the file that was written to ``place``."""
    return type(error)(str(error).replace(f"impl={place}", named).replace(str(place), named))


@contextmanager
def private_folder() -> Iterator[Folder]:
    """A folder for the time of a run."""
    folder = Folder(Path(tempfile.mkdtemp(prefix="normcheck-loaded-")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
