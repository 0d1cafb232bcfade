"""GitHub's workflow commands: read as the runner reads them, and the summary that goes beside them."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from normcheck.errors import visible
from normcheck.reports import github, markdown
from normcheck.result import SweepResult
from tests.hostile_text import HARM
from tests.sample_runs import (
    RUNS,
    errors,
    exception,
    failed,
    failing,
    finding,
    hostile,
    known,
    large,
    passing,
    required,
    run,
    verdict,
)

ALL = {**RUNS, "hostile": hostile, "large": large}
COMMAND = re.compile(r"::(\w+)(?: ([^:\n\r]*))?::([^\n\r]*)")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may themselves run in a workflow."""
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Command:
    name: str
    properties: dict[str, str]
    message: str


def text_of(a_run: SweepResult) -> str:
    stream = io.StringIO()
    github.REPORT.write(a_run, stream)
    return stream.getvalue()


def undone(text: str, *more: tuple[str, str]) -> str:
    """What the runner undoes, in its order."""
    for escaped, character in (("%0D", "\r"), ("%0A", "\n"), *more, ("%25", "%")):
        text = text.replace(escaped, character)
    return text


def read(line: str) -> Command:
    found = COMMAND.fullmatch(line)
    assert found, line[:200]
    pairs = (each.split("=", 1) for each in found[2].split(",")) if found[2] else ()
    properties = {name: undone(value, ("%3A", ":"), ("%2C", ",")) for name, value in pairs}
    return Command(found[1], properties, undone(found[3]))


def commands(a_run: SweepResult) -> list[Command]:
    lines = text_of(a_run).removesuffix("\n").split("\n")
    return [read(line) for line in lines]


@pytest.mark.parametrize("name", ALL)
def test_every_line_is_one_command(name: str) -> None:
    told = commands(ALL[name]())
    assert {each.name for each in told} <= {"error", "warning", "notice"}
    assert all(set(each.properties) <= {"file", "line", "title"} for each in told)
    assert told[0].name == ("error" if ALL[name]().exit_code else "notice")
    assert any(each.name == "error" for each in told) == bool(ALL[name]().exit_code)
    assert len([each for each in told if "file" in each.properties]) <= 8


def test_a_failure_is_at_its_file_and_line() -> None:
    _, wrong, raised, *_ = commands(failing())
    assert wrong.properties == {
        "file": "kernels/mine.py",
        "line": "12",
        "title": "rmsnorm mine.py fp16: dx is wrong (given the reference's statistics)",
    }
    assert "Mismatched elements: 3 / 387 (0.8%)" in wrong.message
    assert wrong.message.endswith("Reproduce: " + finding().reproduce)
    assert raised.properties["line"] == "15"


def test_cells_of_one_place_share_an_annotation() -> None:
    cells = [failed(finding(), dtype=f"k{i}") for i in range(6)]
    (shared,) = (c for c in commands(run(*cells, status="fail", exit_code=1)) if "file" in c.properties)
    assert shared.properties["title"].endswith("and 5 cells more")
    assert all(f"rmsnorm mine.py k{i}: dx is wrong" in shared.message for i in range(6))


def test_more_places_than_github_shows_are_counted() -> None:
    cells = [failed(finding(), line=i + 1) for i in range(30)]
    messages = tuple(f"drift {number}" for number in range(15))
    all_told = commands(run(*cells, messages=messages, status="fail", exit_code=1))
    *told, gate = [each for each in all_told if each.name == "error"]
    assert len(told) == 9
    assert gate.message.split("\n") == list(messages)  # one more annotation, and not a line of it lost
    assert told[-1].message.startswith("23 more places")


def test_known_failures_warn() -> None:
    assert [c.name for c in commands(known()) if "file" in c.properties] == ["warning"]


def test_what_is_said_of_the_run() -> None:
    assert any(c.name == "error" and "required=cudnn did not run" in c.message for c in commands(required()))
    assert any(c.name == "error" and "MemoryError" in c.message for c in commands(errors()))
    (only,) = commands(passing())
    assert only.message.startswith("PASS  3 cells passed")


def test_files_are_named_from_the_workspace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert commands(failing())[1].properties["file"] == "sub/kernels/mine.py"
    outside = run(failed(finding(), file="/elsewhere/mine.py"), status="fail", exit_code=1)
    assert commands(outside)[1].properties["file"] == "/elsewhere/mine.py"


def test_the_summary_is_the_markdown_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    text_of(failing())
    assert path.read_text(encoding="utf-8") == "before\n" + markdown.text_of(failing())


def test_a_summary_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "summary.md", "a\x00b"):
        monkeypatch.setattr(github.os, "environ", {"GITHUB_STEP_SUMMARY": str(path)})
        last = commands(failing())[-1]
        assert last.name == "warning"
        assert "cannot be written" in last.message


@pytest.mark.parametrize("text", [*HARM, "%0A::error::x", "a,line=9", "a:b", "%", "x" * 1_000_000])
def test_harmful_text(text: str) -> None:
    failure = exception(message=text, advice=text, traceback=(text,), output=text, line=3)
    cell = verdict(op=text, implementation=text, status="fail", failure=failure, file=text, line=3)
    a_run = run(cell, messages=(text,), status="fail", exit_code=1)
    assert len(text_of(a_run)) < 60_000
    for each in commands(a_run):
        assert set(each.properties) <= {"file", "line", "title"}
        assert all(line.isprintable() for line in each.message.split("\n"))
    (annotated,) = (each for each in commands(a_run) if "file" in each.properties)
    assert annotated.properties["line"] == "3"
    assert annotated.properties["file"] == visible(text[:1000])


def test_a_stream_that_knows_no_blocks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    github.REPORT.write(failing(), stream)
    assert b"\\u2592" in raw.getvalue()
