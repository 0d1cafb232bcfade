"""Where a file can be written: found out before a run, which would be lost otherwise, and nothing is left of it."""

from __future__ import annotations

import os
from pathlib import Path

from normcheck.files import writable


def test_what_can_be_written_and_what_cannot(tmp_path: Path) -> None:
    old, new, leads, circle = (str(tmp_path / name) for name in ("old", "new", "leads", "circle"))
    Path(old).write_text("as it was", encoding="utf-8")
    os.symlink("to a file that is not there yet", leads)
    os.symlink("circle", circle)
    before = sorted(os.listdir(tmp_path))
    assert [path for path in (old, new, leads, "/dev/null") if not writable(path)] == []
    refused = (circle, str(tmp_path), f"{old}/below", f"{tmp_path}/no folder/x", "/proc/x", "a" * 300, "a\0b")
    assert [path for path in refused if writable(path)] == []
    assert (sorted(os.listdir(tmp_path)), Path(old).read_text(encoding="utf-8")) == (before, "as it was")
