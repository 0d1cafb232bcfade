"""Linux's Landlock: a process gives up the right to change files outside some folders, for itself and what it starts.

The kernel enforces it, for root as well, and nobody can take it back. A process under it can neither debug nor read
the memory of one that is not. Facts are from the kernel's documentation, userspace-api/landlock.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import suppress

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every processor
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_WRITE_FILE, _MAKE_CHAR, _MAKE_BLOCK, _REFER, _TRUNCATE = 1 << 1, 1 << 6, 1 << 11, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | 0x1FF0  # with the rights to remove and to make anything
_SINCE = {2: _REFER, 3: _TRUNCATE}  # version of the interface -> the right that came with it
_OF_FILES = _WRITE_FILE | _TRUNCATE
_SIGNALS_SINCE, _SIGNALS = 6, 1 << 1


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def version() -> int:
    """The version of Landlock's interface, 0 if the kernel has none or has it switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))))


def restrict(writable: Iterable[str]) -> None:
    """From now on this thread, and what it starts, changes only what lies in ``writable``: files and folders.

    Where the kernel can, signals reach only processes under the same restriction. Nothing happens if there is no
    Landlock. The thread must have no new privileges. Raises OSError if the kernel refuses.
    """
    present = version()
    if not present:
        return
    files = _CHANGES
    for since, right in _SINCE.items():
        files |= right if present >= since else 0
    scoped = _SIGNALS if present >= _SIGNALS_SINCE else 0
    size = ctypes.sizeof(_Ruleset) if scoped else 8  # an older kernel knows only the first field
    rules = _called(
        _CREATE_RULESET, ctypes.byref(_Ruleset(files, 0, scoped)), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    try:
        for path in writable:
            with suppress(FileNotFoundError, PermissionError, NotADirectoryError):
                _allow(rules, path, files)
        _called(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, files: int) -> None:
    allowed = files & ~(_MAKE_CHAR | _MAKE_BLOCK) if os.path.isdir(path) else files & _OF_FILES
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        beneath = ctypes.byref(_Beneath(allowed, folder))
        _called(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), beneath, ctypes.c_uint32(0))
    finally:
        os.close(folder)


def _called(number: int, *arguments: object) -> int:
    """The result of a system call. Raises OSError."""
    libc = _libc()
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
