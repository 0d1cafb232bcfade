"""The documents of flashinfer-bench and SOL-ExecBench: a definition, a solution and workloads, read as data.

They come from outside: a size limit before anything is parsed, then pydantic, which limits how deep they nest. Keys
that are not needed here are ignored.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from normcheck.errors import UsageError, one_line, shown
from normcheck.files import contents

MOST_BYTES = 4 << 20
"""The largest document; definitions and solutions have some 10 kB."""

MOST_WORKLOADS, MOST_SOURCES = 1000, 64
_LONGEST_AXIS = 1 << 31
_DEEPEST = 8  # parts of a source's path: TileGym's lie six folders deep

_COMPILED = ("c++", "cpp", "cuda", "cuda_cpp")  # languages of sources that are built first, whatever calls them

T = TypeVar("T", bound="_Document")

Name = Annotated[str, Field(min_length=1, max_length=200)]
Length = Annotated[int, Field(ge=1, le=_LONGEST_AXIS)]


class _Document(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Axis(_Document):
    """A dimension by name: ``const`` has its length, ``var`` gets one from each workload."""

    type: Literal["const", "var"]
    value: Length | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> Axis:
        if (self.value is None) == (self.type == "const"):
            raise ValueError('expected a value with type "const", and none with "var"')
        return self


class Tensor(_Document):
    """A tensor of named axes, or a number if ``shape`` is null."""

    shape: list[Name] | None
    dtype: Name


class Definition(_Document):
    """What is computed: axes, inputs and outputs in the order of a call, and a reference in Python."""

    name: Name
    op_type: Name = "unknown"
    axes: dict[Name, Axis] = Field(max_length=16)
    inputs: dict[Name, Tensor] = Field(min_length=1, max_length=16)
    outputs: dict[Name, Tensor] = Field(min_length=1, max_length=16)
    reference: Annotated[str, Field(min_length=1, max_length=1 << 20)]

    @model_validator(mode="after")
    def _is_whole(self) -> Definition:
        for name, tensor in {**self.inputs, **self.outputs}.items():
            for axis in tensor.shape or ():
                if axis not in self.axes:
                    raise ValueError(f"{shown(name)} has axis {shown(axis)}: expected one of axes")
        try:
            tree = ast.parse(self.reference)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"reference: expected Python, {type(error).__name__}") from None
        if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            raise ValueError("reference: expected a function named run in it")
        return self


class Source(_Document):
    """A file of a solution."""

    path: Annotated[str, Field(min_length=1, max_length=200)]
    content: Annotated[str, Field(max_length=MOST_BYTES)]

    @model_validator(mode="after")
    def _stays_inside(self) -> Source:
        parts = self.path.split("/")
        plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", part) for part in parts)
        if not plain or ".." in parts or len(parts) > _DEEPEST:
            raise ValueError(f"path={shown(self.path)}: expected a relative path of plain names, without ..")
        return self


class Spec(_Document):
    """What a solution is written in, under either effort's key, and how it is called."""

    language: Name = "python"
    languages: list[Name] = Field(default=[], max_length=16)
    entry_point: Annotated[str, Field(pattern=r"^[^:]+::[A-Za-z_][A-Za-z0-9_]*$", max_length=400)]
    destination_passing_style: bool = True

    @model_validator(mode="after")
    def _needs_no_compiler(self) -> Spec:
        for language in (self.language, *self.languages):
            if language.lower() in _COMPILED:
                raise ValueError(
                    f"language={shown(language)}: expected one that Python runs, since nothing is built here"
                )
        return self


def _joined(content: Any) -> Any:
    """The lines of a file as its text; what is no list of text as it is, which is then refused."""
    if not (isinstance(content, list) and all(isinstance(line, str) for line in content)):
        return content
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in content)


class Solution(_Document):
    """A kernel as text: its files, and which function of which file is called."""

    name: Name
    definition: Name
    spec: Spec
    sources: list[Source] = Field(min_length=1, max_length=MOST_SOURCES)

    @field_validator("sources", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """TileGym has a map of each path to the lines of its file."""
        if not isinstance(value, dict):
            return value
        return [{"path": path, "content": _joined(content)} for path, content in value.items()]

    @model_validator(mode="after")
    def _has_its_entry(self) -> Solution:
        paths = [source.path for source in self.sources]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"sources: {shown(path)} is there twice")
            if any(other.startswith(f"{path}/") for other in paths):
                raise ValueError(f"sources: {shown(path)} is a file and a folder")
        if self.entry_file not in paths:
            raise ValueError(f"entry_point={shown(self.spec.entry_point)}: expected a file of sources")
        if PurePosixPath(self.entry_file).suffix != ".py":
            raise ValueError(f"entry_point={shown(self.spec.entry_point)}: expected FILE.py::NAME, no other language")
        return self

    @property
    def entry_file(self) -> str:
        """The file that is imported."""
        return self.spec.entry_point.partition("::")[0]


class Given(_Document):
    """How an input of a workload is made. Only numbers have a value here; tensors get data of ours."""

    type: Name
    value: float | int | bool | None = None


class Workload(_Document):
    """The lengths of the variable axes, and the values of numbers."""

    axes: dict[Name, Length] = Field(max_length=16)
    inputs: dict[Name, Given] = Field(default_factory=dict, max_length=16)
    uuid: Name


class _Line(_Document):
    """A line of a file of workloads: a workload, or a trace that holds one."""

    workload: Workload | None = None


def definition_of(path: str) -> Definition:
    """The definition in the file ``path``. Raises UsageError."""
    return _parsed(Definition, _read(path, "definition"), f"definition={one_line(path, 200)}")


def solution_of(path: str) -> Solution:
    """The solution in the file ``path``. Raises UsageError."""
    return _parsed(Solution, _read(path, "solution"), f"solution={one_line(path, 200)}")


def workloads_of(path: str) -> tuple[Workload, ...]:
    """The workloads in the file ``path``, one a line, bare or each in a trace. Raises UsageError."""
    lines = [line for line in _read(path, "workload").split(b"\n") if line.strip()]
    where = f"workload={one_line(path, 200)}"
    if not 1 <= len(lines) <= MOST_WORKLOADS:
        raise UsageError(f"{where}: has {len(lines)} lines, expected 1 to {MOST_WORKLOADS} workloads")
    found = []
    for number, line in enumerate(lines, 1):
        at = f"{where}, line {number}"
        found.append(_parsed(_Line, line, at).workload or _parsed(Workload, line, at))
    return tuple(found)


def _read(path: str, option: str) -> bytes:
    try:
        return contents(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{option}={one_line(path, 200)}: {one_line(str(reason), 200)}; expected a JSON file of at most 4 MiB"
        ) from None


_WHAT: Mapping[type[Any], str] = {
    Definition: "a definition: name, axes, inputs, outputs, reference",
    Solution: "a solution: name, definition, spec, sources",
    Workload: "a workload: uuid, axes, inputs",
    _Line: "a workload, or a trace with one",
}


def _parsed(kind: type[T], data: bytes, where: str) -> T:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        wrong = f"{one_line(at, 120)}: " * bool(at) + one_line(str(first["msg"]), 300)
        raise UsageError(f"{where}: {wrong}; expected {_WHAT[kind]}") from None
