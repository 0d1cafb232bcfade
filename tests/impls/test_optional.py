"""Packages that may not be installed, or may not work: what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from normcheck.impls._optional import not_working


def test_what_is_not_installed_is_said() -> None:
    assert not_working("normcheck_nowhere.norms", "nowhere") == "nowhere is not installed"


def test_what_does_not_work_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "normcheck_broken.py").write_text("raise OSError('no\\nsymbol')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    said = not_working("normcheck_broken.norms", "broken")
    assert said == "broken is installed but does not work: OSError: no symbol"
