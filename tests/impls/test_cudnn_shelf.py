"""The shelf of cuDNN's plans: what one process puts there another gets as it is, and what is not there is built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normcheck.impls import _cudnn_shelf
from normcheck.impls._cudnn_shelf import FOLDER, StoredPlan, exists, keep, kept, shelf

PLAN = StoredPlan({"x": 3, "y": 1}, bytes(range(256)) + b"\n{}\n")


def test_a_plan_comes_back_as_it_is() -> None:
    with shelf():
        keep("one", PLAN)
        keep("other", StoredPlan({}, b""))
        assert kept("one") == PLAN
        assert kept("other") == StoredPlan({}, b"")
        assert kept("a third") is None


def test_a_shelf_ends_with_its_block() -> None:
    with shelf():
        assert exists()
        keep("one", PLAN)
        folder = Path(os.environ[FOLDER])
        assert len([*folder.iterdir()]) == 1  # nothing unfinished is left
    assert not exists()
    assert not folder.exists()
    keep("one", PLAN)
    assert kept("one") is None


def test_a_full_shelf_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cudnn_shelf, "MOST", 2)
    with shelf():
        for name in ("one", "two", "three"):
            keep(name, PLAN)
        assert [kept(name) is not None for name in ("one", "two", "three")] == [True, True, False]


def test_a_folder_is_made_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "plans"))
    assert kept("one") is None
    keep("one", PLAN)
    assert kept("one") == PLAN


def test_what_cannot_be_written_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    keep("one", PLAN)
    assert kept("one") is None
