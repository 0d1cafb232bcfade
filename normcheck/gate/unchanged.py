"""Whether the files that judge are still those with which the run began: this package's, torch's and Triton's Python.

A kernel that could change one would be judged by it, in this run or the next. Who may write them is held by the
sandbox; where there is none, this shows that it was done.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Self

PACKAGES = ("normcheck", "torch", "triton")
_SHOWN = 3  # changed files that a message names

Stamp = tuple[int, ...]


class Files:
    """The Python files of ``packages`` as they are when this is made: the digest and the stamp of each."""

    def __init__(self, packages: tuple[str, ...] = PACKAGES) -> None:
        self._packages = packages
        self._begun = {path: (_stamp(path), _digest(path)) for path in _files(packages)}

    @classmethod
    def soon(cls) -> Future[Self]:
        """These files, read by another thread: 46 MB, beside the import of torch."""
        with ThreadPoolExecutor(1, "normcheck-files") as pool:
            future = pool.submit(cls)
            pool.shutdown(wait=False)
        return future

    def changed(self) -> str:
        """Which of them are others now, in words; "" if none is. A file is read only if its stamp has changed."""
        now = {path: _stamp(path) for path in _files(self._packages)}
        found = sorted(path for path in now.keys() - self._begun.keys())
        for path, (stamp, digest) in self._begun.items():
            if now.get(path) != stamp and _digest(path) != digest:
                found.append(path)
        if not found:
            return ""
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        names = ", ".join(found[:_SHOWN]) + more
        return f"while it ran, {names} changed: expected the files that judge to stay; install them anew, run again"


def _files(packages: tuple[str, ...]) -> Iterator[str]:
    for package in packages:
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for folder, _, names in os.walk(root):
                yield from (os.path.join(folder, name) for name in names if name.endswith((".py", ".toml")))


def _stamp(path: str) -> Stamp:
    """What changes with a file's content, and cannot be set back by who may only write it: () if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(path: str) -> bytes:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return b""
