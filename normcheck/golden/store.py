"""A record on disk: a folder with a manifest and one safetensors file for each implementation, and nothing else.

The folder is written beside its place and then renamed, so that it is there whole or not at all. The reader trusts
nothing: every file must be a plain one of a limited size, with its checksum, and hold exactly the tensors that the
manifest names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.errors import UsageError, one_line, shown
from normcheck.files import contents, write_new
from normcheck.golden import manifest as text
from normcheck.golden.early import names_in
from normcheck.golden.manifest import Manifest, key_of
from normcheck.golden.schema import Record, geometries

MOST_BYTES = 1 << 26
"""The largest total of a record's files of tensors: 64 MiB. Records of ours should stay under 5 MB."""

_EXPECTED = "; expected the file as it was recorded: copy or record it again"


def write(record: Record, folder: Path) -> int:
    """Write ``record`` into the new ``folder``; returns its bytes. Raises UsageError if the folder exists."""
    content = _contents(record)
    write_new(folder, content, "out", read)  # reads it again: a folder that cannot be read is no record
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
    content = {file: dump(own) for file, own in tensors.items()}
    files = {file: (len(data), hashlib.sha256(data).hexdigest()) for file, data in content.items()}
    manifest = Manifest(record, files, tuple(places))
    return {**content, text.NAME: text.written(manifest).encode("ascii")}


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """``tensors`` as the bytes of a safetensors file; the same tensors give the same bytes."""
    from safetensors.torch import save

    return bytes(save({name: tensors[name].contiguous().clone() for name in sorted(tensors)}))


def _file_of(implementation: str, record: Record) -> str:
    """``triton.safetensors``; a name that is not plain gets a number, so that no two share a file."""
    names = list(dict.fromkeys(entry.implementation for entry in record.entries))
    plain = re.sub(r"[^a-z0-9_-]+", "-", implementation.lower()).strip("-_")[:40]
    number = "" if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,39}", implementation) else f"-{names.index(implementation)}"
    return f"{plain or 'implementation'}{number}.safetensors"


def read(folder: Path) -> Record:
    """The record in ``folder``. Raises UsageError, with the name of the file, for anything wrong with it."""
    names = names_in(folder)
    if text.NAME not in names:
        raise UsageError(
            f"golden={_shown(folder)}: {text.NAME} is missing; expected a folder of normcheck golden record"
        )
    who = f"golden={_shown(folder / text.NAME)}"
    manifest = text.read(_content(folder / text.NAME, text.MOST_BYTES), who)
    for name in sorted(names - {text.NAME} - manifest.files.keys()):
        raise UsageError(f"golden={_shown(folder / name)}: is not in the manifest, expected nothing else")
    total = sum(size for size, _ in manifest.files.values())
    if total > MOST_BYTES:
        raise UsageError(f"{who}: files of {total} bytes: expected at most {MOST_BYTES}")
    loaded = {name: _loaded(folder / name, *promise) for name, promise in manifest.files.items()}
    for file, tensors in loaded.items():
        _check_tensors(manifest, file, tensors, f"golden={_shown(folder / file)}")
    return text.with_tensors(manifest, loaded)


def _content(path: Path, most: int) -> bytes:
    """The bytes of a plain file of at most ``most`` bytes. Refuses links and pipes, and never blocks."""
    try:
        return contents(path, most, follow_links=False)
    except OSError as error:
        reason = "is a link" if path.is_symlink() else error.strerror or "cannot be read"
        raise UsageError(f"golden={_shown(path)}: {reason}{_EXPECTED}") from None


def _loaded(path: Path, size: int, digest: str) -> dict[str, Tensor]:
    content = _content(path, MOST_BYTES)
    who = f"golden={_shown(path)}"
    if len(content) != size:
        raise UsageError(
            f"{who}: has {len(content)} bytes, {size} were recorded: it was changed or truncated{_EXPECTED}"
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise UsageError(
            f"{who}: sha256={hashlib.sha256(content).hexdigest()}: it was changed, {digest} was recorded{_EXPECTED}"
        )
    return load(content, who)


def load(content: bytes, who: str) -> dict[str, Tensor]:
    """The tensors in ``content`` by name, of any dtype and shape.

    Raises UsageError, which begins with ``who``. safetensors refuses gaps, overlaps and sizes that do not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    try:
        return dict(read(content))
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise UsageError(f"{who}: expected safetensors: {one_line(str(error), 200)}") from None


def _check_tensors(manifest: Manifest, file: str, tensors: Mapping[str, Tensor], who: str) -> None:
    """Refuse a file with tensors that its entries do not name, or with a dtype or shape that they cannot have."""
    expected: set[str] = set()
    for number, (own, names) in enumerate(manifest.places):
        if own == file:
            expected |= {key_of(number, name) for name in names}
            _check_geometry(number, manifest.record.entries[number].case, names, tensors, who)
    for key in sorted(tensors.keys() - expected):
        raise UsageError(f"{who}: tensor {shown(key, 60)} is not in the manifest{_EXPECTED}")


def _check_geometry(number: int, case: Case, names: tuple[str, ...], tensors: Mapping[str, Tensor], who: str) -> None:
    allowed = geometries(OPS[case.op], case)
    for name in names:
        key = key_of(number, name)
        if key not in tensors:
            raise UsageError(f"{who}: tensor {key!r} is missing{_EXPECTED}")
        dtype, shape = tensors[key].dtype, tuple(tensors[key].shape)
        if (dtype, shape) not in allowed[name]:
            expected = " or ".join(f"{dtype} {shape}" for dtype, shape in allowed[name])
            raise UsageError(f"{who}: tensor {key!r} is {dtype} {shown(shape, 100)}: expected {expected}")


def _shown(path: Path) -> str:
    return one_line(str(path), 200)
