"""Whether the files that judge are still those with which the run began: this package's, torch's and Triton's Python,
and what was compiled of this package's C.

A kernel that could change one would be judged by it, in this run or the next. Who may write them is held by the
sandbox; where there is none, this shows that it was done.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Self

from normcheck import c_library
from normcheck.files import digest

PACKAGES = ("normcheck", "torch", "triton")
_OWN = "normcheck"
_NO_PYTHON = ("__pycache__", "include")  # folders; nor can one be imported that has a dot in its name
_SHOWN = 3  # changed files that a message names

Stamp = tuple[int, ...]


class Files:
    """The Python files of ``packages``, by default PACKAGES, as they are when this is made.

    Of each the stamp is kept, and the digest if its installer did not: of torch's 46 MB pip has recorded them.
    """

    def __init__(self, packages: tuple[str, ...] = ()) -> None:
        packages = packages or PACKAGES
        self._packages, self._compiled = packages, c_library.kept()
        self._stamps = {path: _stamp(path) for path in self._paths()}
        own = tuple(package for package in packages if not _is_recorded(package))
        self._digests = {path: digest(path) for path in (*_files(own), *self._compiled)}

    def _paths(self) -> Iterator[str]:
        yield from _files(self._packages)
        yield from self._compiled  # what is compiled later has no earlier state

    @classmethod
    def soon(cls, packages: tuple[str, ...] = ()) -> Future[Self]:
        """These files, looked at by another thread, beside the import of torch."""
        with ThreadPoolExecutor(1, "normcheck-files") as pool:
            future = pool.submit(cls, packages)
            pool.shutdown(wait=False)
        return future

    def changed(self) -> str:
        """Which of them are others now, in words; "" if none is. A file is read only if its stamp has changed."""
        now = {path: _stamp(path) for path in self._paths()}
        touched = [path for path, stamp in self._stamps.items() if now.get(path) != stamp]
        known = {**_recorded(self._packages), **self._digests} if touched else {}
        found = [*(now.keys() - self._stamps.keys()), *(p for p in touched if digest(p) != known.get(p))]
        if not found:
            return ""
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        names = ", ".join(sorted(found)[:_SHOWN]) + more
        return f"while it ran, {names} changed: expected the files that judge to stay; install them anew, run again"


def _files(packages: tuple[str, ...]) -> Iterator[str]:
    for package in packages:
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            yield from _below(root)


def _below(root: str) -> Iterator[str]:
    """Not ``os.walk``, which takes three times as long: it lists names of which one in six is asked for."""
    folders = [root]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # it may have been deleted since
            for entry in entries:
                if entry.name.endswith((".py", ".toml", ".c")):
                    yield entry.path
                elif "." not in entry.name and entry.name not in _NO_PYTHON and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


@cache
def _is_recorded(package: str) -> bool:
    """Whether the installer of a package has kept the digests of its files; of normcheck it may be an editable one."""
    try:
        return package != _OWN and distribution(package).read_text("RECORD") is not None
    except PackageNotFoundError:
        return False


def _recorded(packages: tuple[str, ...]) -> dict[str, str]:
    """File -> its digest as the installer has kept it."""
    found = {}
    for package in filter(_is_recorded, packages):
        for file in distribution(package).files or ():
            if file.hash is not None and file.hash.mode == "sha256" and file.suffix == ".py":
                found[str(file.locate())] = base64.urlsafe_b64decode(file.hash.value + "=").hex()
    return found


def _stamp(path: str) -> Stamp:
    """What changes with a file's content, and cannot be set back by who may only write it: () if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
