"""C sources of this package, compiled by the C compiler that is there, once on a machine, and loaded.

Where there is none, or nothing that it makes can be loaded, the caller does without. What is compiled lies in a folder
of the user's, under the digest of all that it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

from normcheck.errors import NormcheckError
from normcheck.lock import locked

FLAGS = (
    "-std=gnu11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared",
    "-fPIC",
)  # fmt: skip
"""Nothing that changes a result: every machine finds the same bits. No trap is asked for, and no errno is read."""

_LEVELS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x86-64-v4": frozenset(
            ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"]
        ),
        "x86-64-v3": frozenset(["avx2", "fma", "bmi2"]),
    }
)
"""Levels of the architecture, the best first, and what Linux lists of a processor that has one."""

_SECONDS = 120.0


@cache
def loaded(source: Path, before: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library of a C ``source``, compiled behind the lines ``before``; None if it cannot be made here."""
    compiler = _compiler()
    if compiler is None or sys.byteorder != "little":
        return None
    text = whole(source, before)
    flags = (*FLAGS, *_of_this_processor())
    key = hashlib.sha256("\0".join((text, _build(compiler), *flags)).encode()).hexdigest()
    try:
        kept = _own_folder() / f"{source.parent.name}-{source.stem}-{key[:32]}.so"
        if not kept.is_file():
            with locked(kept.name, _SECONDS):  # judges that begin side by side ask for the same
                if not kept.is_file():
                    _compile((compiler, *flags), text, kept)
        _refuse_others(kept)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError, NormcheckError):
        return None


def kept() -> tuple[str, ...]:
    """The paths of what was compiled before, by whatever version."""
    with suppress(OSError):
        return tuple(sorted(str(path) for path in _folder().glob("*.so")))
    return ()


def whole(source: Path, before: Iterable[str]) -> str:
    """The text that is compiled."""
    return "\n".join(["#include <stdint.h>", *before, source.read_text(encoding="utf-8")])


def definitions(numbers: Mapping[str, int | float]) -> tuple[str, ...]:
    """Python's numbers by name, for C: a float to the bit."""
    return tuple(f"#define {name} ({n.hex() if isinstance(n, float) else f'{n}LL'})" for name, n in numbers.items())


def structure(name: str, fields: Sequence[str]) -> str:
    """A struct whose fields are all integers of 64 bits, of which some are addresses."""
    return f"struct {name} {{ int64_t {', '.join(fields)}; }};"


def call(library: ctypes.CDLL, name: str, values: Sequence[int]) -> None:
    """Call a function that gets a pointer to a struct with these values. Raises MemoryError if it returns 1."""
    if getattr(library, name)((ctypes.c_int64 * len(values))(*values)):
        raise MemoryError(name)


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)


def _build(compiler: str) -> str:
    """What tells one build of a compiler from another: where it is, its size and its time."""
    path = os.path.realpath(compiler)
    of = os.stat(path)
    return f"{path} {of.st_size} {of.st_mtime_ns}"


def _of_this_processor() -> tuple[str, ...]:
    """The flag by which a compiler uses all of this processor; none if that is not known."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        has = set(next(line for line in lines if line.startswith("flags")).split())
        return tuple(f"-march={level}" for level, needs in _LEVELS.items() if needs <= has)[:1]
    return ()


def _folder() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache_home) / "normcheck"


def _own_folder() -> Path:
    """The folder of what was compiled, which nobody else may write. Raises OSError and NormcheckError."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_others(folder)
    return folder


def _refuse_others(path: Path) -> None:
    """Raise NormcheckError if somebody else could have written what is at ``path``."""
    of = path.lstat()
    if of.st_uid != os.geteuid() or stat.S_ISLNK(of.st_mode) or of.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NormcheckError(f"path={path}: expected a file or folder of your own that nobody else may write")


def _compile(command: Sequence[str], text: str, into: Path) -> None:
    """Compile ``text`` to the library ``into``, which is there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        made = Path(folder) / into.name
        subprocess.run(
            [*command, "-x", "c", "-", "-o", str(made), "-lm"],
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=True,
        )
        made.chmod(0o700)
        os.replace(made, into)
