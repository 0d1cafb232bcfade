"""A record on disk: a folder with a manifest and one safetensors file for each implementation, and nothing else.

It is written beside its place and then renamed, so that it is there whole or not at all. Reading it trusts nothing:
every file is a plain one of a limited size, has its checksum, and holds exactly the tensors that the manifest names.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from normcheck.errors import UsageError, one_line, shown
from normcheck.files import write_new
from normcheck.golden import manifest as text
from normcheck.golden import tensors as safe
from normcheck.golden.manifest import Manifest, key_of
from normcheck.golden.schema import Record, Recorded, geometries
from normcheck.impls import discovery

_EXPECTED = "; expected the file as it was recorded: copy or record it again"
_MOST_FILES = 80  # that a folder is looked through for


def write(record: Record, folder: Path) -> int:
    """Write ``record`` into the new ``folder``; returns its bytes. Raises UsageError where something is there."""
    content = _contents(record)
    write_new(folder, content, "out", read)  # what cannot be read again is no record
    return sum(map(len, content.values()))


def _contents(record: Record) -> dict[str, bytes]:
    """File name -> bytes."""
    tensors: dict[str, dict[str, Tensor]] = {}
    places = []
    for number, entry in enumerate(record.entries):
        file = _file_of(entry.implementation, record) if entry.tensors else ""
        places.append((file, tuple(entry.tensors)))
        for name, tensor in entry.tensors.items():
            tensors.setdefault(file, {})[key_of(number, name)] = tensor
    content = {file: safe.dump(own) for file, own in tensors.items()}
    files = {file: (len(data), hashlib.sha256(data).hexdigest()) for file, data in content.items()}
    manifest = Manifest(record, files, tuple(places))
    return {**content, text.NAME: text.written(manifest).encode("ascii")}


def _file_of(implementation: str, record: Record) -> str:
    """``triton.safetensors``; a number is added where a name, or another's, does not make a file of its own."""
    names = list(dict.fromkeys(entry.implementation for entry in record.entries))
    plain = re.sub(r"[^a-z0-9_-]+", "-", implementation.lower()).strip("-_")[:40]
    number = "" if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,39}", implementation) else f"-{names.index(implementation)}"
    return f"{plain or 'implementation'}{number}.safetensors"


def read(folder: Path) -> Record:
    """The record in ``folder``. Raises UsageError, with the name of the file, for whatever is wrong with it."""
    names = _names(folder)
    if text.NAME not in names:
        raise UsageError(
            f"golden={_shown(folder)}: {text.NAME} is missing; expected a folder of normcheck golden record"
        )
    who = f"golden={_shown(folder / text.NAME)}"
    manifest = text.read(_content(folder / text.NAME, text.MOST_BYTES), who)
    for name in sorted(names - {text.NAME} - manifest.files.keys()):
        raise UsageError(f"golden={_shown(folder / name)}: is not in the manifest, expected nothing else")
    total = sum(size for size, _ in manifest.files.values())
    if total > safe.MOST_BYTES:
        raise UsageError(f"{who}: files of {total} bytes: expected at most {safe.MOST_BYTES}")
    loaded = {name: _loaded(folder / name, *promise) for name, promise in manifest.files.items()}
    for file, tensors in loaded.items():
        _compare(manifest, file, tensors, f"golden={_shown(folder / file)}")
    return text.with_tensors(manifest, loaded)


def _names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as found:
            names = {entry.name for entry, _ in zip(found, range(_MOST_FILES), strict=False)}
    except (OSError, ValueError):
        raise UsageError(f"golden={_shown(folder)}: expected a folder of normcheck golden record") from None
    if len(names) == _MOST_FILES:
        raise UsageError(f"golden={_shown(folder)}: has too many files; expected those of normcheck golden record")
    return names


def _content(path: Path, most: int) -> bytes:
    """The bytes of a plain file of at most ``most``: no link, no pipe, nothing that waits."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"golden={_shown(path)}: expected a plain file")
            if status.st_size > most:
                raise UsageError(f"golden={_shown(path)}: has {status.st_size} bytes: expected at most {most}")
            return file.read(most)
    except OSError as error:
        reason = "is a link" if path.is_symlink() else error.strerror or "cannot be read"
        raise UsageError(f"golden={_shown(path)}: {reason}{_EXPECTED}") from None


def _loaded(path: Path, size: int, digest: str) -> dict[str, Tensor]:
    content = _content(path, safe.MOST_BYTES)
    who = f"golden={_shown(path)}"
    if len(content) != size:
        raise UsageError(
            f"{who}: has {len(content)} bytes, {size} were recorded: it was changed or truncated{_EXPECTED}"
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise UsageError(
            f"{who}: sha256={hashlib.sha256(content).hexdigest()}: it was changed, {digest} was recorded{_EXPECTED}"
        )
    return safe.load(content, who)


def _compare(manifest: Manifest, file: str, tensors: Mapping[str, Tensor], who: str) -> None:
    """Refuse a file that has other tensors, or tensors of another dtype or shape, than its entries can have."""
    expected: set[str] = set()
    for number, (own, names) in enumerate(manifest.places):
        if own == file:
            expected |= {key_of(number, name) for name in names}
            _geometry(manifest.record.entries[number], number, names, tensors, who)
    for key in sorted(tensors.keys() - expected):
        raise UsageError(f"{who}: tensor {shown(key, 60)} is not in the manifest{_EXPECTED}")


def _geometry(entry: Recorded, number: int, names: tuple[str, ...], tensors: Mapping[str, Tensor], who: str) -> None:
    allowed = geometries(discovery.ops()[entry.case.op], entry.case)
    for name in names:
        key = key_of(number, name)
        if key not in tensors:
            raise UsageError(f"{who}: tensor {key!r} is missing{_EXPECTED}")
        found = (tensors[key].dtype, tuple(tensors[key].shape))
        if found not in allowed[name]:
            wanted = " or ".join(f"{dtype} {shape}" for dtype, shape in allowed[name])
            raise UsageError(f"{who}: tensor {key!r} is {found[0]} {found[1]}: expected {wanted}")


def _shown(path: Path) -> str:
    return one_line(str(path), 200)
