"""What a message says to install, from where this one came; and what an exception of normcheck's own is told as."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normcheck import errors
from normcheck.errors import is_of_memory, itself_failed, to_install


def test_in_a_checkout_it_is_the_checkout() -> None:
    root = Path(__file__).resolve().parents[1]
    assert shlex.split(to_install("plot")) == ["pip", "install", "-e", f"{root}[plot]"]


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, ""),
        ({"url": "file:///home/me/normcheck", "dir_info": {}}, " @ file:///home/me/normcheck"),
        ({"url": "https://a.b/n.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}, " @ git+https://a.b/n.git"),
        (
            {"url": "file:///tmp/n-0.1.0-py3-none-any.whl", "archive_info": {}},
            " @ file:///tmp/n-0.1.0-py3-none-any.whl",
        ),
    ],
)
def test_elsewhere_it_is_what_pip_noted(
    origin: dict[str, Any] | None, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(errors, "CHECKOUT", tmp_path)
    monkeypatch.setattr(errors, "distribution", lambda name: noted)
    assert shlex.split(to_install("plot")) == ["pip", "install", f"normcheck[plot]{source}"]


def test_what_pip_did_not_install_comes_from_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(errors, "CHECKOUT", tmp_path)
    monkeypatch.setattr(errors, "distribution", none)
    assert to_install("plot") == "pip install 'normcheck[plot]'"


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("CUDA error: out of memory"), True), (MemoryError(), True), (RuntimeError("no such key"), False)],
)
def test_memory_that_ran_out_is_told_from_other_failures(error: Exception, told: bool) -> None:
    try:
        raise error
    except Exception as raised:
        said = itself_failed(raised)
    assert said.startswith("normcheck itself failed: ")
    assert ("--workers 1" in said) is is_of_memory(error) is told
