"""A file that judges and was edited while a run went on is named; one that only looks edited is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from normcheck import c_library
from normcheck.files import digest
from normcheck.gate import unchanged
from normcheck.gate.unchanged import PACKAGES, Files, _recorded


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "some_package_of_a_test"
    (folder / "deep").mkdir(parents=True)
    for name in ("__init__.py", "judge.py", "deep/__init__.py", "table.toml", "kernel.c", "library.so"):
        (folder / name).write_text("as it was\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def edited_and_dated_back(path: Path) -> None:
    """Same size, same time of the last change: what an editor can set."""
    before = path.stat()
    path.write_text("as it is!\n", encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda folder: None, ""),
        (lambda folder: (folder / "judge.py").touch(), ""),
        (lambda folder: (folder / "judge.py").write_text("as it was\n", encoding="utf-8"), ""),
        (lambda folder: (folder / "library.so").write_text("another", encoding="utf-8"), ""),
        (lambda folder: (folder / "judge.py").write_text("more", encoding="utf-8"), "judge.py"),
        (lambda folder: edited_and_dated_back(folder / "judge.py"), "judge.py"),
        (lambda folder: (folder / "table.toml").write_text("more", encoding="utf-8"), "table.toml"),
        (lambda folder: (folder / "kernel.c").write_text("more", encoding="utf-8"), "kernel.c"),
        (lambda folder: (folder / "deep" / "__init__.py").unlink(), "deep/__init__.py"),
        (lambda folder: (folder / "new.py").touch(), "new.py"),
    ],
)
def test_what_has_changed(package: Path, act: Callable[[Path], object], named: str) -> None:
    files = Files((package.name,))
    act(package)
    said = files.changed()
    assert said.startswith(f"while it ran, {package / named} changed: expected") if named else said == ""


def test_what_was_compiled_of_c_is_looked_at(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled while the run goes on is no change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "normcheck").mkdir()
    library = tmp_path / "normcheck" / "judge.so"
    library.write_text("as it was\n", encoding="utf-8")
    files = Files((package.name,))
    library.with_name("another.so").touch()
    assert files.changed() == ""
    edited_and_dated_back(library)
    assert files.changed().startswith(f"while it ran, {library} changed: expected")


def test_of_many_some_are_named(package: Path) -> None:
    files = Files((package.name,))
    for number in range(5):
        (package / f"new_{number}.py").touch()
    assert "new_2.py and 2 more changed" in files.changed()


def test_what_judges_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run has it, without ``few_files_that_judge``."""
    monkeypatch.setattr(unchanged, "PACKAGES", PACKAGES)
    files = Files.soon().result()
    names = {Path(path).name for path in files._stamps}
    assert PACKAGES == ("normcheck", "torch", "triton")
    assert {"compare.py", "tolerances.toml", "functional.py", "jit.py"} <= names
    assert files.changed() == ""


def test_what_pip_has_recorded_is_read_only_if_it_was_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another hard link to a file, as an installer makes it, touches it: that is no change."""
    monkeypatch.setattr(c_library, "kept", lambda: ())
    files = Files(("torch",))
    assert files._digests == {}
    path = next(iter(files._stamps))
    files._stamps[path] = (0, 0, 0, 0)
    assert files.changed() == ""
    assert _recorded(("torch",))[path] == digest(path) != ""
