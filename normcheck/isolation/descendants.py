"""Processes and what they started: found by who is whose parent, in whatever session they are now, and killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_descendants(root: int) -> None:
    """Kill what a process started, in whatever session that is now; the process itself is stopped and stays."""
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGSTOP)
    for _ in range(20):  # new ones may come while the old ones are looked for
        parent_of = parents()
        kin, before = {root}, 0
        while len(kin) != before:
            before = len(kin)
            kin |= {pid for pid, parent in parent_of.items() if parent in kin}
        if kin == {root}:
            return
        for pid in kin - {root}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def parents() -> dict[int, int]:
    """Process -> its parent, of all that are alive, as far as the system tells."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry.parent.name)] = int(parent)
    return found
