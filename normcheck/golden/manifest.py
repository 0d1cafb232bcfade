"""The manifest of a record, as JSON: everything but the tensors. These are in one file for each implementation, under
the number of their entry: ``12.y``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed as parsed_case
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.checks.contract import Problem
from normcheck.errors import UsageError, one_line, shown
from normcheck.golden.judge import model_of
from normcheck.golden.schema import (
    AUTOGRAD,
    BITMASK,
    FED,
    GIVEN,
    OWN,
    STATISTICS,
    Record,
    RecordedCase,
    Skipped,
    geometries,
    owed,
)
from normcheck.golden.sealed_json import SEAL, parsed, sealed
from normcheck.json_types import Count, Only, one_of
from normcheck.reports.document import checked, plain
from normcheck.result import KINDS

SCHEMA = "normcheck-golden/1"
NAME = "manifest.json"
MOST_BYTES = 1 << 23
"""Bytes of a manifest: 8 MiB."""

_FILE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\.safetensors")
_MOST_ELEMENTS = 1 << 16
"""The largest M * (N + gap) of a recorded case: the list of cases has at most 1536."""


def _at_most(count: int) -> Only:
    return Only(f"at most {count}", check=lambda items: len(items) <= count)


def _digits(count: int) -> Only:
    return Only(f"{count} hexadecimal digits", check=lambda text: bool(re.fullmatch(rf"[0-9a-f]{{{count}}}", text)))


_LONGEST = 2_000
_MaybeText = Annotated[str, Only(f"text of at most {_LONGEST} characters", check=lambda t: len(t) <= _LONGEST)]
_Text = Annotated[str, Only(f"text of at most {_LONGEST} characters", check=lambda t: 0 < len(t) <= _LONGEST)]
_CLOSED = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of tensors: its size and its checksum."""

    __pydantic_config__: ClassVar = _CLOSED
    bytes: Count
    sha256: Annotated[str, _digits(64)]


@dataclass(frozen=True, kw_only=True)
class SkippedCell:
    """A cell of which nothing could be recorded, as in the file."""

    __pydantic_config__: ClassVar = _CLOSED
    op: Annotated[str, one_of(*OPS)]
    implementation: _Text
    dtype: Annotated[str, one_of(*DTYPES)]
    reason: _Text


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recorded case, as in the file, which leaves out empty fields after ``inputs``."""

    __pydantic_config__: ClassVar = _CLOSED
    implementation: _Text
    case: _Text
    backward: Annotated[str, one_of(OWN, AUTOGRAD)]
    inputs: Annotated[Mapping[_Text, Annotated[str, _digits(32)]], _at_most(4)]
    declared: Mapping[str, Any] = field(default_factory=dict)
    reads: Annotated[tuple[Annotated[str, one_of(STATISTICS, BITMASK)], ...], _at_most(2)] = ()
    refused: _MaybeText = ""
    gradients_refused: _MaybeText = ""
    problems: Annotated[tuple[tuple[Annotated[str, one_of(*KINDS)], _MaybeText, _MaybeText], ...], _at_most(16)] = ()
    file: _MaybeText = ""
    tensors: Annotated[tuple[_Text, ...], _at_most(16)] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """The keys of the file, in its order."""

    __pydantic_config__: ClassVar = _CLOSED
    schema: Annotated[str, one_of(SCHEMA)] = SCHEMA
    device: Annotated[str, one_of("cpu", "cuda")]
    environment: Annotated[Mapping[_Text, _Text], _at_most(64)]
    files: Annotated[Mapping[str, File], _at_most(64)]
    skipped: Annotated[tuple[SkippedCell, ...], _at_most(4096)]
    entries: Annotated[tuple[Entry, ...], _at_most(4096)]


@dataclass(frozen=True)
class Manifest:
    """A record without its tensors. ``files``: name -> (bytes, sha256); ``places``: for each entry its file and the
    names of its tensors; the file is "" if it has none."""

    record: Record
    files: Mapping[str, tuple[int, str]]
    places: tuple[tuple[str, tuple[str, ...]], ...]


def key_of(number: int, name: str) -> str:
    """The name of an entry's tensor in its file."""
    return f"{number}.{name}"


def written(manifest: Manifest) -> str:
    """The manifest as text: a line for each entry, sealed."""
    record = manifest.record
    document = plain(
        Document(
            device=record.device,
            environment=record.environment,
            files={name: File(bytes=size, sha256=digest) for name, (size, digest) in manifest.files.items()},
            skipped=tuple(SkippedCell(**vars(skipped)) for skipped in record.skipped),
            entries=tuple(_entry_of(*pair) for pair in zip(record.entries, manifest.places, strict=True)),
        )
    )
    document["entries"] = [
        {name: value for name, value in entry.items() if value or name in _ALWAYS} for entry in document["entries"]
    ]
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in sealed(document).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"


_ALWAYS = ("implementation", "case", "backward", "inputs")


def _entry_of(entry: RecordedCase, place: tuple[str, tuple[str, ...]]) -> Entry:
    return Entry(
        implementation=entry.implementation,
        case=str(entry.case),
        backward=entry.backward,
        inputs=entry.inputs,
        declared=entry.declared,
        reads=entry.reads,
        refused=entry.refused,
        gradients_refused=entry.gradients_refused,
        problems=tuple((p.kind, p.output, one_line(p.message)) for p in entry.problems),
        file=place[0],
        tensors=place[1],
    )


def read(content: bytes, who: str) -> Manifest:
    """The manifest in ``content``. Raises UsageError, which begins with ``who``, if anything in it is not allowed."""
    data = parsed(content, who)
    del data[SEAL]  # parsed has checked it
    document = checked(Document, data, who)
    for name in document.files:
        if not _FILE.fullmatch(name):
            where = f"{who}: files[{shown(name, 80)}]"
            raise UsageError(f"{where}: expected a plain name like triton.safetensors, without a folder")
        if all(entry.file != name for entry in document.entries):
            raise UsageError(f"{who}: files[{name!r}]: expected an entry with tensors in it")
    entries: list[RecordedCase] = []
    seen: set[tuple[str, str]] = set()
    for number, item in enumerate(document.entries):
        where = f"{who}: entries[{number}]"
        entry = _recorded(item, where, document.files)
        if entry.key in seen:
            raise UsageError(f"{where}: its implementation and case are there twice: expected once")
        seen.add(entry.key)
        _in_the_table(entry, document.device, where)
        entries.append(entry)
    record = Record(
        device=document.device,
        environment=document.environment,
        entries=tuple(entries),
        skipped=tuple(Skipped(**vars(skipped)) for skipped in document.skipped),
    )
    files = {name: (file.bytes, file.sha256) for name, file in document.files.items()}
    return Manifest(record, files, tuple((entry.file, entry.tensors) for entry in document.entries))


def _recorded(item: Entry, who: str, files: Mapping[str, File]) -> RecordedCase:
    if bool(item.file) != bool(item.tensors) or (item.file and item.file not in files):
        raise UsageError(f"{who}.file={shown(item.file, 60)}: expected one of files where there are tensors, else none")
    entry = RecordedCase(
        implementation=item.implementation,
        case=_case(item.case, f"{who}.case"),
        backward=item.backward,
        inputs=item.inputs,
        declared=item.declared,
        reads=item.reads,
        refused=item.refused,
        gradients_refused=item.gradients_refused,
        problems=tuple(Problem(*problem) for problem in item.problems),
    )
    _complete(entry, item.tensors, who)
    return entry


def _case(line: str, who: str) -> Case:
    """The case of a line. Refuses a line that normcheck would write otherwise, and a case that is not small."""
    try:
        case = parsed_case(line)
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    if str(case) != line:
        raise UsageError(f"{who}={shown(line, 80)}: expected it as it is printed: {str(case)!r}")
    if not case.M or case.room > _MOST_ELEMENTS:
        raise UsageError(f"{who}: M={case.M} N={case.N} gap={case.gap}: expected 1 to {_MOST_ELEMENTS} elements")
    return case


def _complete(entry: RecordedCase, names: tuple[str, ...], who: str) -> None:
    """Refuse an entry that lacks tensors that it must have, or has tensors that it may not have."""
    op, present = OPS[entry.case.op], set(names)
    for name in names:
        if name not in geometries(op, entry.case) or names.count(name) > 1:
            raise UsageError(f"{who}.tensors: {shown(name, 60)} expected only what it may have, and once")
    if entry.refused and (names or entry.gradients_refused or entry.problems):
        raise UsageError(f"{who}.refused: expected nothing beside it: a case that did not run has no outputs")
    if entry.refused or entry.problems:
        return  # a case that did not run has no tensors, and one with problems fails anyway
    gradients, required = set(owed(entry.case)), {"y"}
    extra = {name for name in names if name.startswith((GIVEN, FED))}
    if not entry.gradients_refused:
        required |= gradients
    elif present & gradients or extra:
        raise UsageError(f"{who}.gradients_refused: expected no gradients beside it")
    staged = STATISTICS in entry.reads
    if staged:
        required |= {*op.statistics, *(FED + n for n in op.statistics), *(GIVEN + n for n in gradients)}
    elif extra:
        raise UsageError(f"{who}.tensors: {min(extra)}: expected {STATISTICS} in reads")
    if entry.backward == AUTOGRAD and entry.reads:
        raise UsageError(f"{who}.reads: expected none where gradients come from autograd")
    for name in sorted(required - present):
        raise UsageError(f"{who}.tensors: expected {name} among them")


def _in_the_table(entry: RecordedCase, device: str, who: str) -> None:
    try:
        model_of(entry, device)
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None


def with_tensors(manifest: Manifest, tensors: Mapping[str, Mapping[str, Any]]) -> Record:
    """The record with the tensors of its files; ``tensors``: file -> name in the file -> tensor."""
    entries = [
        replace(entry, tensors={name: tensors[file][key_of(number, name)] for name in names})
        for number, (entry, (file, names)) in enumerate(zip(manifest.record.entries, manifest.places, strict=True))
    ]
    return replace(manifest.record, entries=tuple(entries))
