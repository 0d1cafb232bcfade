"""A record from somebody else: whatever is in its folder, it is one line and exit code 2, or it is the record."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from normcheck.audit.mutants.correct import CONTROLS
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES, Plan
from normcheck.golden import manifest as manifests
from normcheck.golden import store
from normcheck.golden.record import record_plan
from normcheck.golden.sealed_json import parsed, sealed
from normcheck.golden.verify import verify_folder
from tests.command_line import Cli
from tests.some import some

NAME = "pairwise_fma"
FILE = f"{NAME}.safetensors"
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of one cell of the op that has most."""
    op = OPS["layernorm_relu_bitmask"]
    own = next(c for c in CONTROLS if (c.name, c.op) == (NAME, op.name))
    plan = Plan((Cell(op, own, "fp16", NAME),), PROFILES["quick"], 0, "cpu", 60.0)
    folder = tmp_path_factory.mktemp("golden") / "record"
    store.write(record_plan(plan, lambda number, cell: None), folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "record"))


def manifest_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return data


def put_manifest(folder: Path, data: Mapping[str, Any]) -> None:
    """Write a manifest whose seal is right."""
    (folder / "manifest.json").write_text(json.dumps(sealed(data)), encoding="utf-8")


def put_tensors(folder: Path, content: bytes) -> None:
    """Write a file of tensors whose checksum is right."""
    (folder / FILE).write_bytes(content)
    data = manifest_of(folder)
    data["files"][FILE] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    put_manifest(folder, data)


def loaded(folder: Path) -> dict[str, Tensor]:
    return store.load((folder / FILE).read_bytes(), "test")


def complaint(folder: Path) -> str:
    """What reading and judging it says; it has to complain, in one line that names a file of it."""
    with pytest.raises(UsageError) as refused:
        verify_folder(str(folder), ())
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


# every bit and every byte


@pytest.mark.slow
def test_every_flipped_bit_of_a_tensor_is_refused_by_its_name(folder: Path) -> None:
    """Somewhere in every tensor, whatever its checksum would be."""
    content = (folder / FILE).read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    assert len(header) > 50
    for number, described in enumerate(header.values()):
        first, last = described["data_offsets"]
        at = size + first + number % (last - first)
        changed = bytearray(content)
        changed[at] ^= 1 << number % 8
        (folder / FILE).write_bytes(changed)
        assert FILE in complaint(folder)
        assert "it was changed" in complaint(folder)


@pytest.mark.slow
def test_every_flipped_bit_of_the_manifest_is_refused(folder: Path) -> None:
    """But for a blank that becomes another, and the case of a letter of an escape."""
    content = (folder / "manifest.json").read_bytes()
    for at in range(0, len(content), 7):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        (folder / "manifest.json").write_bytes(changed)
        if chr(content[at]).isspace():
            continue
        assert "manifest.json" in complaint(folder)


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_a_truncated_file_is_refused_by_its_name(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 3):
        (folder / name).write_bytes(content[:size])
        assert name in complaint(folder)
    (folder / name).write_bytes(content + b"x")
    assert name in complaint(folder)
    (folder / name).unlink()
    assert name in complaint(folder)


# what is not a plain file


def test_links_pipes_and_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    for name in (FILE, "manifest.json"):
        kept = (folder / name).read_bytes()
        (tmp_path / "elsewhere").write_bytes(kept)
        for make in (
            lambda path: path.symlink_to(tmp_path / "elsewhere"),
            os.mkfifo,
            os.mkdir,
            lambda path: path.symlink_to("/dev/zero"),
        ):
            (folder / name).unlink()
            make(folder / name)
            assert name in complaint(folder)
            (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
            (folder / name).write_bytes(kept)
    verify_folder(str(folder), ())


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        ".safetensors",
        "x.SAFETENSORS",
        "x",
        "\x00.safetensors",
        "",
    ],
)
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    data = manifest_of(folder)
    data["files"] = {name: data["files"][FILE]}
    for entry in data["entries"]:
        entry["file"] = name
    put_manifest(folder, data)
    assert "manifest.json: files[" in complaint(folder)


def test_files_that_nobody_recorded_are_refused(folder: Path) -> None:
    (folder / "more.pt").write_bytes(b"")
    assert "more.pt: is not in the manifest" in complaint(folder)
    for number in range(100):
        (folder / str(number)).write_bytes(b"")
    assert "too many files" in complaint(folder)


@pytest.mark.parametrize("name", ["", "nowhere", "a\x00b", "x" * 5000, "/dev/null"])
def test_what_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        verify_folder(name, ())
    assert len(str(refused.value)) < 500


def test_huge_files_are_not_read(folder: Path) -> None:
    """Sparse ones: their sizes are looked at before their contents."""
    for name in (FILE, "manifest.json"):
        os.truncate(folder / name, 1 << 40)
        assert f"{name}: has 1099511627776 bytes" in complaint(folder)


# manifests whose seal is right


def edit(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        if value is DELETE:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value

    return change


DELETE = object()
LINE = "layernorm_relu_bitmask fp16 M={M} N={N} eps=1e-05 rows=normal dy=normal layout=contiguous seed=1"
CLIPS = "lower_clip=-0.5 upper_clip=2.0"
EDITS = {
    "schema": edit("schema", value="normcheck-golden/2"),
    "device": edit("device", value="tpu"),
    "an unknown key": edit("more", value=1),
    "an unknown key of an entry": edit("entries", 0, "more", value=1),
    "entries": edit("entries", value={}),
    "an entry": edit("entries", 0, value=[]),
    "no case": edit("entries", 0, "case", value=DELETE),
    "another case": edit("entries", 0, "case", value=f"{LINE.format(M=5, N=8)} {CLIPS}"),
    "a huge case": edit("entries", 0, "case", value=f"{LINE.format(M=100000, N=100000)} {CLIPS}"),
    "no rows": edit("entries", 0, "case", value=f"{LINE.format(M=0, N=8)} {CLIPS}"),
    "a case in other words": edit("entries", 0, "case", value=f"{LINE.format(M='05', N=7)} {CLIPS}"),
    "a case of no op": edit("entries", 0, "case", value="softmax fp16 M=1 N=1"),
    "a case that is a number": edit("entries", 0, "case", value=3),
    "the same case twice": lambda data: data["entries"].append(data["entries"][0]),
    "no tensors": lambda data: [data["entries"][0].pop(key) for key in ("tensors", "file")],
    "a tensor left out": lambda data: data["entries"][0]["tensors"].remove("dw"),
    "the stage left out": lambda data: data["entries"][0]["tensors"].remove("given.dx"),
    "a statistic left out": lambda data: data["entries"][0]["tensors"].remove("fed.rstd"),
    "a tensor twice": lambda data: data["entries"][0]["tensors"].append("y"),
    "a tensor of no name": lambda data: data["entries"][0]["tensors"].append("z"),
    "refused, and yet run": edit("entries", 0, "refused", value="why"),
    "gradients refused, and yet there": edit("entries", 0, "gradients_refused", value="why"),
    "a backward of no kind": edit("entries", 0, "backward", value="numeric"),
    "autograd that reads": edit("entries", 0, "backward", value="autograd"),
    "reads nonsense": edit("entries", 0, "reads", value=["everything"]),
    "reads no statistics": edit("entries", 0, "reads", value=["bitmask"]),
    "another file": edit("entries", 0, "file", value="other.safetensors"),
    "inputs": edit("entries", 0, "inputs", "x", value="0" * 32),
    "no bias": edit("entries", 0, "inputs", "bias", value=DELETE),
    "short digests": edit("entries", 0, "inputs", "x", value="0"),
    "a model of no kind": edit("entries", 0, "declared", value={"chain": "endless"}),
    "a model with more": edit("entries", 0, "declared", value={"__class__": "x"}),
    "a model as a list": edit("entries", 0, "declared", value=["chain"]),
    "a problem of no kind": edit("entries", 0, "problems", value=[["bad luck", "", ""]]),
    "a problem of two words": edit("entries", 0, "problems", value=[["exception", ""]]),
    "no name": edit("entries", 0, "implementation", value=""),
    "a long name": edit("entries", 0, "implementation", value="x" * 100_000),
    "files": edit("files", value=[]),
    "a size": edit("files", FILE, "bytes", value=True),
    "a huge size": edit("files", FILE, "bytes", value=10**14),
    "a negative size": edit("files", FILE, "bytes", value=-1),
    "no sha256": edit("files", FILE, "sha256", value="yes"),
    "a file without entries": edit("files", "x.safetensors", value={"bytes": 0, "sha256": "0" * 64}),
    "environment": edit("environment", value={"torch": 2}),
    "skipped": edit("skipped", value=[{"op": "x"}]),
    "skipped, of no op": edit("skipped", value=[{"op": "x", "implementation": "y", "dtype": "fp16", "reason": "z"}]),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_says_what_it_may_not_is_refused(folder: Path, what: str) -> None:
    data = manifest_of(folder)
    EDITS[what](data)
    put_manifest(folder, data)
    complaint(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"[]", b"null", b"{", b'{"a": 1, "a": 1}', b'{"a": NaN}', b'{"a": 1.5}', b'{"a": 1e999}',
        b'{"a": ' + b"9" * 100_000 + b"}", b"[" * 1_000_000, b'{"a":' * 200_000, b'{"sha256": {}}', b'{"a": "\\ud800"}',
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    assert "manifest.json" in complaint(folder)


# tensors whose checksum is right


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FILES = {
    "empty": b"",
    "no header": file_of({}),
    "no JSON": file_of(b"\xff{"),
    "a list": file_of([]),
    "deep": file_of(b"[" * 100_000),
    "a huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "a huge shape": file_of({"0.y": {**F32, "shape": [1 << 60]}}, b"\0" * 4),
    "a huge product": file_of({"0.y": {**F32, "shape": [1 << 26, 1 << 26]}}, b"\0" * 4),
    "many dimensions": file_of({"0.y": {**F32, "shape": [1] * 1000}}, b"\0" * 4),
    "a negative shape": file_of({"0.y": {**F32, "shape": [-1]}}, b"\0" * 4),
    "a fraction": file_of({"0.y": {**F32, "shape": [1.0]}}, b"\0" * 4),
    "true": file_of({"0.y": {**F32, "shape": [True]}}, b"\0" * 4),
    "infinity": file_of(b'{"0.y": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}', b"\0" * 4),
    "another dtype": file_of({"0.y": {**F32, "dtype": "F64"}}, b"\0" * 8),
    "a dtype of no kind": file_of({"0.y": {**F32, "dtype": ["F32"]}}, b"\0" * 4),
    "too few bytes": file_of({"0.y": F32}, b"\0" * 3),
    "too many bytes": file_of({"0.y": F32}, b"\0" * 5),
    "a gap": file_of({"0.y": {**F32, "data_offsets": [4, 8]}}, b"\0" * 8),
    "an overlap": file_of({"0.y": F32, "1.y": F32}, b"\0" * 4),
    "backwards": file_of({"0.y": {**F32, "data_offsets": [4, 0]}}, b"\0" * 4),
    "metadata": file_of({"__metadata__": {"a": "b"}, "0.y": F32}, b"\0" * 4),
    "a foreign tensor": file_of({"z": F32}, b"\0" * 4),
    "a pickle": b"\x80\x04cos\nsystem\n(S'false'\ntR.",
}


@pytest.mark.parametrize("what", FILES)
def test_what_is_no_file_of_these_tensors_is_refused(folder: Path, what: str) -> None:
    put_tensors(folder, FILES[what])
    assert FILE in complaint(folder)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dtype", "shape", "transposed", "missing", "more"])
def test_tensors_of_another_kind_are_refused(folder: Path, what: str) -> None:
    """One after another, every tensor that there is."""
    kept = loaded(folder)
    for name in some(list(kept)[:: 1 if what in ("dtype", "shape") else 9]):
        t = kept[name]
        other = {
            "dtype": {name: t.to(torch.float32 if t.dtype != torch.float32 else torch.float16)},
            "shape": {name: t.flatten()[:-1]},
            "transposed": {name: t.unsqueeze(0) if t.dim() == 1 else t.T},
            "more": {f"{name}.again": t},
        }.get(what, {})
        changed = {k: v for k, v in kept.items() if what != "missing" or k != name} | other
        put_tensors(folder, store.dump(changed))
        assert name in complaint(folder)


# anything

ONE_LINE = r"\Ax: [^\n]+\Z"


def told(read: Callable[[], object]) -> None:
    """Call it; if it complains, then in one line."""
    message = ""
    try:
        read()
    except UsageError as refused:
        message = str(refused)
    assert not message or re.match(ONE_LINE, message)


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    for read in (
        lambda: parsed(content, "x"),
        lambda: manifests.read(content, "x"),
        lambda: store.load(content, "x"),
    ):
        with pytest.raises(UsageError, match=r"\Ax: ") as refused:
            read()
        assert "\n" not in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_a_manifest_with_anything_anywhere_is_refused_or_holds(original: Path, data: st.DataObject) -> None:
    """One value of it, at any depth, replaced by any other and sealed again: one line, or the record."""
    manifest = manifest_of(original)
    inner: Any = manifest
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(inner[key], dict | list) and inner[key] and data.draw(st.booleans())):
            break
        inner = inner[key]
    inner[key] = data.draw(JSON)
    try:
        content = json.dumps(sealed(manifest)).encode()
    except ValueError:  # NaN and infinity, which no seal is made for
        content = json.dumps(manifest).encode()
    told(lambda: manifests.read(content, "x"))


@FUZZ
@given(data=st.data())
def test_a_tensor_file_with_any_change_is_refused_or_loads(original: Path, data: st.DataObject) -> None:
    content = bytearray((original / FILE).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    told(lambda: store.load(bytes(content), "x"))


@pytest.mark.parametrize("command", [("verify", "{}"), ("diff", "{}", "{}")])
def test_the_command_line_says_it_in_one_line(folder: Path, command: tuple[str, ...], cli: Cli) -> None:
    (folder / FILE).write_bytes(b"\x1b[2J")
    done = cli("golden", *(word.format(folder) for word in command))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"normcheck: golden={folder}/{FILE}: has 4 bytes")
    assert len(done.err.splitlines()) == 1
