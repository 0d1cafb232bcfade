"""The fused judge's kernels on a CPU: ``on_cpu.c``, compiled by the C compiler that is there, once on a machine.

Where there is no compiler, or nothing that it makes can be loaded, the plain judge judges.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from normcheck.errors import NormcheckError
from normcheck.oracle.fused import layout

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = (
    "-std=gnu11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC",
)  # fmt: skip
"""Nothing that changes a result: every machine finds the same bits. No trap is asked for, and no errno is read."""

_LEVELS = MappingProxyType(
    {
        "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"},
        "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"},
    }
)
"""Levels of the architecture, the best first, and what the kernel lists of a processor that has one."""

_SECONDS = 120.0

KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "forward_kernel": (
            "found_ptr", "x_ptr", "y_ptr", "weight_ptr", "bias_ptr", "own_mean_ptr", "own_rstd_ptr", "own_bits_ptr",
            "numbers_ptr", "rows_ptr", "mean_ptr", "rstd_ptr", "bits_ptr", "ties_ptr", "doubt_ptr",
            "M", "N", "x_stride", "y_stride", "bits_stride",
            "weight_offset", "CENTERED", "ANY_VARIANCE", "FOLDED", "CAST", "CLAMPED", "OWN", "PACKED", "ROUNDED",
            "STORED", "FLUSH",
        ),
        "dx_kernel": (
            "found_ptr", "x_ptr", "dy_ptr", "dx_ptr", "weight_ptr", "bits_ptr", "doubt_ptr", "rows_ptr", "numbers_ptr",
            "M", "N", "x_stride", "dy_stride", "dy_column", "dx_stride",
            "weight_offset", "CENTERED", "RAW", "IO_ROUNDED", "STORED", "FLUSH",
        ),
        "sums_kernel": (
            "x_ptr", "dy_ptr", "bits_ptr", "doubt_ptr", "rows_ptr", "numbers_ptr", "sums_ptr",
            "M", "N", "group_rows", "x_stride", "dy_stride", "dy_column",
            "BOTH", "RAW", "IO_ROUNDED", "FLUSH",
        ),
        "dw_db_kernel": (
            "found_ptr", "dw_ptr", "db_ptr", "sums_ptr", "numbers_ptr", "groups", "N",
            "GIVEN", "BOTH", "STORED", "FLUSH",
        ),
    }
)  # fmt: skip
"""Kernel -> its arguments in order: tensors, sizes, and facts of the case. Those of the Triton kernel of that name, but
for its tiles."""

_TYPES = MappingProxyType({torch.float16: 0, torch.bfloat16: 1, torch.float32: 2})
"""Dtype -> its number in ``on_cpu.c``; others are read as what they are."""


def launch(name: str, way: object, grid: object, *arguments: Tensor | int | None, **facts: object) -> None:
    """Call the kernel of this name, see ``launch.launch``; what only a GPU's kernel needs is left out.

    Raises MemoryError.
    """
    known = KERNELS[name]
    values: list[int] = []
    for argument, field in zip(arguments, known, strict=False):
        if field.endswith("_ptr"):
            assert not isinstance(argument, int)
            values += (0, -1) if argument is None else (argument.data_ptr(), _TYPES.get(argument.dtype, -1))
        else:
            assert isinstance(argument, int)
            values.append(argument)
    values += [int(facts[field]) for field in known[len(arguments) :]]  # type: ignore[call-overload]
    library = _library()
    assert library is not None
    if library[name]((ctypes.c_int64 * len(values))(*values)):
        raise MemoryError(name)


def works() -> bool:
    """Whether the kernels are there. Compiles them the first time on a machine."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None or sys.byteorder != "little":
        return None
    text = source()
    flags = (*FLAGS, *_of_this_processor())
    key = hashlib.sha256("\0".join((text, _version(compiler), *flags)).encode()).hexdigest()
    try:
        kept = _own_folder() / f"judge-{key[:32]}.so"
        if not kept.is_file():
            _compile((compiler, *flags), text, kept)
        _refuse_others(kept)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError, NormcheckError):
        return None


def source() -> str:
    """The whole text that is compiled: the arguments and places as C has them, and ``on_cpu.c``."""
    return "\n".join(["#include <stdint.h>", *_prelude(), SOURCE.read_text(encoding="utf-8")])


def _prelude() -> list[str]:
    names = [*(number.upper() for number in layout.NUMBERS)]
    lines = [f"enum {{ {', '.join(names)} }};", "enum { FP16, BF16, FP32 };"]
    places = {name: value for name, value in vars(layout).items() if name.isupper() and isinstance(value, int)}
    lines.append(f"enum {{ {', '.join(f'{name} = {value}' for name, value in places.items())} }};")
    for kernel, arguments in KERNELS.items():
        fields = [f"{a}, {a.removesuffix('_ptr')}_type" if a.endswith("_ptr") else a for a in arguments]
        lines.append(f"struct {kernel} {{ int64_t {', '.join(fields)}; }};")
    return lines


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)


def _of_this_processor() -> tuple[str, ...]:
    """The flag by which a compiler uses all of this processor; none if that is not known."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        has = set(next(line for line in lines if line.startswith("flags")).split())
        return tuple(f"-march={level}" for level, needs in _LEVELS.items() if needs <= has)[:1]
    return ()


def _version(compiler: str) -> str:
    """What tells one build of a compiler from another: where it is, its size and its time."""
    path = os.path.realpath(compiler)
    of = os.stat(path)
    return f"{path} {of.st_size} {of.st_mtime_ns}"


def _own_folder() -> Path:
    """The folder of what was compiled, which nobody else may write. Raises OSError."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(cache_home) / "normcheck"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_others(folder)
    return folder


def _refuse_others(path: Path) -> None:
    """Raise NormcheckError if somebody else could have written what is at ``path``."""
    of = path.lstat()
    if of.st_uid != os.geteuid() or stat.S_ISLNK(of.st_mode) or of.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NormcheckError(f"path={path}: expected a file or folder of your own that nobody else may write")


def _compile(compiler: Sequence[str], text: str, into: Path) -> None:
    """Compile ``text`` to the library ``into``, which is there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        made = Path(folder) / "judge.so"
        command = [*compiler, "-x", "c", "-", "-o", str(made), "-lm"]
        subprocess.run(
            command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_SECONDS, check=True
        )
        made.chmod(0o700)
        os.replace(made, into)
