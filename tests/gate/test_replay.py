"""The database of failures: what failed last is run first, and a file of it is data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES, Plan, Replay
from normcheck.gate.replay import LARGEST_BYTES, MOST, keep, replays
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.result import CellKey
from tests.sample_runs import CASE, failed, finding, verdict

KEY = CellKey("rmsnorm", "mine.py", "fp16")
CELL: Any = SimpleNamespace(key=KEY)


def stored(folder: Path) -> tuple[str, ...]:
    return tuple(str(case) for case in read(folder).cases)


def read(folder: Path) -> Replay:
    return replays(str(folder), [CELL], parsed).get(KEY, Replay(()))


def line(seed: int) -> str:
    return str(replace(parsed(CASE), seed=seed))


def test_the_latest_is_first_and_the_oldest_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert stored(folder) == ()
    for seed in range(MOST + 3):
        assert keep(str(folder), failed(finding(case=line(seed)))) == ""
    assert stored(folder) == tuple(line(seed) for seed in range(MOST + 2, 2, -1))
    keep(str(folder), failed(finding(case=line(5))))
    assert stored(folder)[:2] == (line(5), line(MOST + 2))
    assert len(stored(folder)) == MOST
    keep(str(folder), verdict())
    keep(str(folder), failed(finding(case="")))
    assert len(list(folder.iterdir())) == 1


def test_each_cell_has_a_file_whatever_its_name(tmp_path: Path) -> None:
    names = ("a", "a/b", "a-b", "../../etc/x", "\x1b[31m\n", "x" * 200, "\udc80", "")
    for name in names:
        assert keep(str(tmp_path), failed(finding(case=CASE), implementation=name)) == ""
    files = list(tmp_path.iterdir())
    assert len(files) == len(names)
    assert all(file.name.isascii() and file.name.isprintable() and len(file.name) < 120 for file in files)


def test_files_that_are_wrong_are_notes(tmp_path: Path) -> None:
    keep(str(tmp_path), failed(finding(case=CASE)))
    (file,) = tmp_path.iterdir()
    for content, cases, note in (
        (f"{CASE}\nnonsense\n# {CASE}\n\n".encode(), (CASE,), "expected 'OP DTYPE M=... N=... name=value ...'"),
        (CASE.replace("fp16", "bf16").encode(), (), "expected a case of rmsnorm fp16, not of rmsnorm bf16"),
        (CASE.replace("rows=offset", "rows=\x1b[31m").encode(), (), r"rows=\x1b[31m in the case line"),
        (b"\xff", (), "expected text in UTF-8"),
        (b"#" * (LARGEST_BYTES + 1), (), "expected at most 65,536 bytes"),
    ):
        file.write_bytes(content)
        replay = read(tmp_path)
        assert tuple(map(str, replay.cases)) == cases
        assert len(replay.notes) == 1
        assert note in replay.notes[0]
        assert replay.notes[0].isprintable()
    file.write_text("x\n" * 100, encoding="utf-8")
    assert len(read(tmp_path).notes) <= 3


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "nul\0"):
        with pytest.raises(UsageError, match="expected a folder that can be written"):
            replays(str(wrong), [CELL], parsed)


def test_what_failed_is_run_first() -> None:
    torch.set_num_threads(1)
    seen = []

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
        seen.append(tuple(x.shape))
        return (y if bias is None else y + bias.float()).to(x.dtype)

    implementation = Implementation(name="mine.py", op="rmsnorm", forward=forward)
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "tests")
    replay = {KEY: Replay((replace(parsed(CASE), M=13, N=37),), ("a note",))}
    profile = replace(PROFILES["quick"], max_examples=4, seconds=600.0)
    first = run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0, replays=replay), lambda cases, worst: None)
    assert seen[0] == (13, 37)
    assert (first.cases, first.notes[0]) == (5, "a note")
    seen.clear()
    second = run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0, (2, 2), replay), lambda cases, worst: None)
    assert (13, 37) not in seen
    assert second.cases == 2
