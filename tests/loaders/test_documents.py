"""Documents that mean harm, or are something else: one line that says what was expected, and nothing is written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normcheck.errors import UsageError
from normcheck.loaders import documents
from normcheck.loaders.documents import definition_of, solution_of, workloads_of
from normcheck.loaders.folder import Folder, private_folder
from normcheck.loaders.signature import signature_of
from tests.hostile_text import HARM
from tests.loaders.samples import rmsnorm_definition, solution, tensor, workload

RIGHT = "def kernel(x, w, out):\n    out.copy_(normed(x, w, 1e-5))\n"


def refused(read: Callable[[str], object], path: Path, data: bytes) -> str:
    """The one line that ``read`` refuses a file with."""
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read(str(path))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1500, ascii(message[:500])
    assert "expected" in message
    return message


@pytest.mark.parametrize("read", [definition_of, solution_of, workloads_of])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe\x00",
        b'{"name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"name": 1' + b"0" * 100_000 + b"}",
        b'{"name": "' + b"x" * documents.MOST_BYTES + b'"}',
        b'{"name": "' + "\u202e\x1b[31m".encode() * 50 + b'"}',
        pickle.dumps({"name": "rms"}),
        json.dumps({"schema": "normcheck-report/1", "verdicts": []}).encode(),
    ],
)
def test_what_is_no_document_is_refused_in_one_line(read: Callable[[str], object], data: bytes, tmp_path: Path) -> None:
    refused(read, tmp_path / "it.json", data)


@pytest.mark.parametrize("read", [definition_of, solution_of, workloads_of])
@pytest.mark.parametrize("name", ["no/such/file", "", "nul\0nul", "/dev/zero", "."])
def test_what_is_no_file_is_refused_in_one_line(read: Callable[[str], object], name: str) -> None:
    with pytest.raises(UsageError, match="expected a JSON file"):
        read(name)


PATHS = [
    "../out.py",
    "a/../../out.py",
    "/tmp/out.py",
    "a//b.py",
    ".hidden.py",
    "C:\\x.py",
    "a\\..\\b.py",
    "x\0.py",
    "~/x.py",
    "",
    "a/b/c/d/e/f/g/h/i.py",
    "x" * 300,
    HARM,
]


@pytest.mark.parametrize("path", PATHS)
def test_a_source_stays_in_its_folder(path: str, tmp_path: Path) -> None:
    document = solution(RIGHT)
    document["sources"].append({"path": path, "content": "print('out')"})
    assert "sources" in refused(solution_of, tmp_path / "it.json", json.dumps(document).encode())


def test_a_folder_refuses_what_the_document_did_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "inner")
    folder.path.mkdir()
    (folder.path / "link").symlink_to(tmp_path)
    for name in ("../out.py", str(tmp_path / "out.py"), "link/out.py", "."):
        with pytest.raises(UsageError, match="inside the folder"):
            folder.write({name: "x"})
    assert not (tmp_path / "out.py").exists()
    with private_folder() as private:
        assert private.path.stat().st_mode & 0o077 == 0
        (private.path / "f").touch()
    assert not private.path.exists()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "language"), "cuda"),  # with an entry point in Python
        (("spec", "languages"), ["triton", "cuda_cpp"]),
        (("spec", "entry_point"), "src/main.py"),
        (("spec", "entry_point"), "src/other.py::kernel"),
        (("spec", "entry_point"), "src/main.py::__import__('os')"),
        (("spec", "entry_point"), "src/main.py::a\nb"),
        (("spec", "destination_passing_style"), "yes"),
        (("name",), 7),
        (("name",), ""),
        (("sources",), []),
        (("sources",), {}),
        (("sources", 0, "content"), ["x"]),
        (("sources", 1, "path"), "src/main.py"),
        (("sources", 1, "path"), "src"),
    ],
)
def test_a_solution_of_wrong_types_is_refused(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    document = solution(RIGHT)
    put(document, where, value)
    assert "expected a solution" in refused(solution_of, tmp_path / "it.json", json.dumps(document).encode())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("axes", "hidden", "value"), -1),
        (("axes", "hidden", "value"), True),
        (("axes", "hidden", "value"), 1 << 60),
        (("axes", "hidden", "value"), None),
        (("axes", "hidden", "type"), "maybe"),
        (("inputs", "weight", "shape"), ["nothing"]),
        (("inputs",), {}),
        (("outputs",), {}),
        (("reference",), "def run("),
        (("reference",), "def other(): pass"),
        (("reference",), "(" * 5000),
        (("reference",), "x\0"),
    ],
)
def test_a_definition_of_wrong_types_is_refused(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    document = rmsnorm_definition()
    put(document, where, value)
    assert "expected a definition" in refused(definition_of, tmp_path / "it.json", json.dumps(document).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", tensor("tokens")),
        ("weight", tensor("hidden", dtype="int8")),
        ("hidden_states", tensor("tokens", "hidden", dtype="float32")),
        ("third", tensor("tokens", "hidden")),
        ("scale", {"shape": None, "dtype": "float32"}),
    ],
)
def test_inputs_that_no_norm_has_are_named(name: str, value: dict[str, Any], tmp_path: Path) -> None:
    document = rmsnorm_definition()
    document["inputs"][name] = value
    if name == "third":
        document["inputs"]["fourth"] = value
    path = tmp_path / "it.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"definition='rms_h96'.*expected"):
        signature_of(definition_of(str(path)))


@pytest.mark.parametrize("axes", [{"tokens": 0}, {"tokens": -3}, {"tokens": "7"}, {"tokens": 1 << 40}, []])
def test_a_workload_of_wrong_lengths_is_refused(axes: Any, tmp_path: Path) -> None:
    lines = [workload("a", tokens=7), {"uuid": "b", "axes": axes, "inputs": {}}]
    text = "\n".join(map(json.dumps, lines))
    assert "line 2" in refused(workloads_of, tmp_path / "it.jsonl", text.encode())


def put(document: Any, where: tuple[Any, ...], value: Any) -> None:
    for key in where[:-1]:
        document = document[key]
    document[where[-1]] = value
