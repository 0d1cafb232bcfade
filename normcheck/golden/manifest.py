"""The manifest of a record: what was recorded, as JSON. The tensors themselves are beside it, one file for each
implementation, and are found by the number of their entry: ``12.y``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.case import Case, parse
from normcheck.cases.data_kinds import DY_KINDS, ROW_KINDS, WEIGHT_KINDS
from normcheck.cases.dtypes import DTYPES
from normcheck.checks.contract import Problem
from normcheck.errors import UsageError, one_line, one_of, shown
from normcheck.golden.judge import model_of
from normcheck.golden.schema import (
    AUTOGRAD,
    BITMASK,
    FED,
    GIVEN,
    OWN,
    STATISTICS,
    Record,
    Recorded,
    Skipped,
    geometries,
    owed,
)
from normcheck.golden.sealed_json import keys_of, list_of, parsed, sealed, text_of, texts_of
from normcheck.impls import discovery
from normcheck.result import KINDS

SCHEMA = "normcheck-golden/1"
NAME = "manifest.json"
MOST_BYTES = 1 << 23
"""Bytes of a manifest: 8 MiB."""

_FILE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\.safetensors")
_HEX = re.compile(r"[0-9a-f]+")
_MOST_ENTRIES, _MOST_FILES, _MOST_SKIPPED = 4096, 64, 4096
_MOST_ELEMENTS = 1 << 16
"""M * (N + gap) of a recorded case: the list has at most 1536."""


@dataclass(frozen=True)
class Manifest:
    """A record without its tensors. ``files``: name -> (bytes, sha256); ``places``: of each entry its file, "" where
    it has no tensors, and the names of its tensors."""

    record: Record
    files: Mapping[str, tuple[int, str]]
    places: tuple[tuple[str, tuple[str, ...]], ...]


def key_of(number: int, name: str) -> str:
    """What a tensor of an entry is called in its file."""
    return f"{number}.{name}"


def written(manifest: Manifest) -> str:
    """The manifest as text: a line for each entry, sealed."""
    record = manifest.record
    pairs = zip(record.entries, manifest.places, strict=True)
    data = sealed(
        {
            "schema": SCHEMA,
            "device": record.device,
            "environment": dict(record.environment),
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in manifest.files.items()},
            "skipped": [vars(skipped) for skipped in record.skipped],
            "entries": [_entry_as_data(entry, *place) for entry, place in pairs],
        }
    )
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"


def _entry_as_data(entry: Recorded, file: str, names: tuple[str, ...]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "implementation": entry.implementation,
        "case": str(entry.case),
        "backward": entry.backward,
        "inputs": dict(entry.inputs),
    }
    more: dict[str, Any] = {
        "declared": dict(entry.declared),
        "reads": list(entry.reads),
        "refused": entry.refused,
        "gradients_refused": entry.gradients_refused,
        "problems": [[p.kind, p.output, one_line(p.message)] for p in entry.problems],
        "file": file,
        "tensors": list(names),
    }
    return data | {key: value for key, value in more.items() if value}


def read(content: bytes, who: str) -> Manifest:
    """The manifest in ``content``. Raises UsageError, which begins with ``who``, for anything that it may not hold."""
    data = parsed(content, who)
    if data.get("schema") != SCHEMA:
        raise UsageError(f"{who}: schema={shown(data.get('schema'), 60)}: expected {SCHEMA}")
    keys_of(data, who, ("schema", "device", "environment", "files", "skipped", "entries", "sha256"))
    if data["device"] not in ("cpu", "cuda"):
        raise UsageError(f"{who}: device={shown(data['device'], 60)}: expected cpu or cuda")
    files = _files(data["files"], who)
    skipped = tuple(_skipped(item, who) for item in list_of(data["skipped"], f"{who}: skipped", _MOST_SKIPPED))
    entries: list[Recorded] = []
    places: list[tuple[str, tuple[str, ...]]] = []
    seen: set[tuple[str, str]] = set()
    for number, item in enumerate(list_of(data["entries"], f"{who}: entries", _MOST_ENTRIES)):
        where = f"{who}: entries[{number}]"
        entry, place = _entry(item, where, files)
        if entry.key in seen:
            raise UsageError(f"{where}: its implementation and case are there twice: expected once")
        seen.add(entry.key)
        _in_the_table(entry, data["device"], where)
        entries.append(entry)
        places.append(place)
    for name in files:
        if all(file != name for file, _ in places):
            raise UsageError(f"{who}: files[{name!r}]: expected an entry with tensors in it")
    environment = texts_of(data["environment"], f"{who}: environment", 64)
    record = Record(device=data["device"], environment=environment, entries=tuple(entries), skipped=skipped)
    return Manifest(record, files, tuple(places))


def _files(data: object, who: str) -> dict[str, tuple[int, str]]:
    if not isinstance(data, dict) or len(data) > _MOST_FILES:
        raise UsageError(f"{who}: files={shown(data, 60)}: expected an object of at most {_MOST_FILES}")
    found = {}
    for name, item in data.items():
        where = f"{who}: files[{shown(name, 80)}]"
        if not _FILE.fullmatch(name):
            raise UsageError(f"{where}: expected a plain name like triton.safetensors, without a folder")
        described = keys_of(item, where, ("bytes", "sha256"))
        if type(described["bytes"]) is not int or described["bytes"] < 0:
            raise UsageError(f"{where}.bytes={shown(described['bytes'], 60)}: expected a size")
        found[name] = (described["bytes"], _hex(described["sha256"], f"{where}.sha256", 64))
    return found


def _skipped(data: object, who: str) -> Skipped:
    where = f"{who}: skipped"
    names = ("op", "implementation", "dtype", "reason")
    item = keys_of(data, where, names)
    op, implementation, dtype, reason = (text_of(item[name], f"{where}.{name}") for name in names)
    _one_of(op, f"{where}.op", tuple(discovery.ops()))
    _one_of(dtype, f"{where}.dtype", DTYPES)
    return Skipped(op=op, implementation=implementation, dtype=dtype, reason=reason)


_REQUIRED = ("implementation", "case", "backward", "inputs")
_OPTIONAL = ("declared", "reads", "refused", "gradients_refused", "problems", "file", "tensors")


def _entry(data: object, who: str, files: Mapping[str, Any]) -> tuple[Recorded, tuple[str, tuple[str, ...]]]:
    item = keys_of(data, who, _REQUIRED, _OPTIONAL)
    case = _case(item["case"], f"{who}.case")
    inputs = texts_of(item["inputs"], f"{who}.inputs", 4)
    for name, digest in inputs.items():
        _hex(digest, f"{who}.inputs.{one_line(name, 60)}", 32)
    reads = tuple(_one_of(v, f"{who}.reads", (STATISTICS, BITMASK)) for v in list_of(item.get("reads", []), who, 2))
    problems = list_of(item.get("problems", []), f"{who}.problems", 16)
    declared = item.get("declared", {})
    if not isinstance(declared, dict):
        raise UsageError(f"{who}.declared={shown(declared, 60)}: expected an object")
    entry = Recorded(
        implementation=text_of(item["implementation"], f"{who}.implementation"),
        case=case,
        backward=_one_of(item["backward"], f"{who}.backward", (OWN, AUTOGRAD)),
        inputs=inputs,
        declared=declared,
        reads=reads,
        refused=text_of(item.get("refused", ""), f"{who}.refused", empty=True),
        gradients_refused=text_of(item.get("gradients_refused", ""), f"{who}.gradients_refused", empty=True),
        problems=tuple(_problem(p, f"{who}.problems") for p in problems),
    )
    names = tuple(text_of(v, f"{who}.tensors") for v in list_of(item.get("tensors", []), f"{who}.tensors", 16))
    file = text_of(item.get("file", ""), f"{who}.file", empty=True)
    if bool(file) != bool(names) or (file and file not in files):
        raise UsageError(f"{who}.file={shown(file, 60)}: expected one of files where there are tensors, else none")
    _complete(entry, names, who)
    return entry, (file, names)


def _case(line: object, who: str) -> Case:
    """The case of a line that is written as normcheck writes it, and is small."""
    options = {name: op.options for name, op in discovery.ops().items()}
    kinds = {"rows": ROW_KINDS, "dy": DY_KINDS, "weights": WEIGHT_KINDS}
    try:
        case = parse(text_of(line, who), options=options, kinds=kinds)
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    if str(case) != line:
        raise UsageError(f"{who}={shown(line, 80)}: expected it as it is printed: {str(case)!r}")
    if not case.M or case.M * (case.N + case.gap) > _MOST_ELEMENTS:
        raise UsageError(f"{who}: M={case.M} N={case.N} gap={case.gap}: expected 1 to {_MOST_ELEMENTS} elements")
    if case.bias not in discovery.ops()[case.op].biases:
        raise UsageError(f"{who}: bias=none: expected a bias, {case.op} always has one")
    return case


def _problem(data: object, who: str) -> Problem:
    texts = list_of(data, who, 3)
    if len(texts) != 3:
        raise UsageError(f"{who}={shown(data, 60)}: expected kind, output and message")
    kind, output, message = (text_of(text, who, empty=True) for text in texts)
    return Problem(_one_of(kind, f"{who}.kind", KINDS), output, message)


def _complete(entry: Recorded, names: tuple[str, ...], who: str) -> None:
    """Refuse an entry that has fewer tensors than it was recorded with could have, or others."""
    op, there = discovery.ops()[entry.case.op], set(names)
    for name in names:
        if name not in geometries(op, entry.case) or names.count(name) > 1:
            raise UsageError(f"{who}.tensors: {shown(name, 60)} expected only what it may have, and once")
    if entry.refused and (names or entry.gradients_refused or entry.problems):
        raise UsageError(f"{who}.refused: expected nothing beside it: a case that did not run has no outputs")
    if entry.refused or entry.problems:
        return  # it does not hold anyway, or there is nothing that could
    gradients, wanted = set(owed(entry.case)), {"y"}
    extra = {name for name in names if name.startswith((GIVEN, FED))}
    if not entry.gradients_refused:
        wanted |= gradients
    elif there & gradients or extra:
        raise UsageError(f"{who}.gradients_refused: expected no gradients beside it")
    staged = STATISTICS in entry.reads
    if staged:
        wanted |= {*op.statistics, *(FED + n for n in op.statistics), *(GIVEN + n for n in gradients)}
    elif extra:
        raise UsageError(f"{who}.tensors: {min(extra)}: expected {STATISTICS} in reads")
    if entry.backward == AUTOGRAD and entry.reads:
        raise UsageError(f"{who}.reads: expected none where gradients come from autograd")
    for name in sorted(wanted - there):
        raise UsageError(f"{who}.tensors: expected {name} among them")


def _in_the_table(entry: Recorded, device: str, who: str) -> None:
    try:
        model_of(entry, device)
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None


def with_tensors(manifest: Manifest, tensors: Mapping[str, Mapping[str, Any]]) -> Record:
    """The record with the tensors of its files, by file and name."""
    entries = [
        replace(entry, tensors={name: tensors[file][key_of(number, name)] for name in names})
        for number, (entry, (file, names)) in enumerate(zip(manifest.record.entries, manifest.places, strict=True))
    ]
    return replace(manifest.record, entries=tuple(entries))


def _one_of(data: object, who: str, known: tuple[str, ...]) -> str:
    if not isinstance(data, str) or data not in known:
        raise UsageError(f"{who}={shown(data, 60)}: expected {one_of(known)}")
    return data


def _hex(data: object, who: str, digits: int) -> str:
    if not isinstance(data, str) or len(data) != digits or not _HEX.fullmatch(data):
        raise UsageError(f"{who}={shown(data, 80)}: expected {digits} hexadecimal digits")
    return data
