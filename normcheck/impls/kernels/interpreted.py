"""Whether Triton kernels are interpreted, and whether one was. Quick to import, so that any command can ask."""

from __future__ import annotations

import os

_noted: set[str] = set()


def enabled() -> bool:
    """Whether kernels defined from now on are interpreted (``TRITON_INTERPRET``)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def note_launch() -> None:
    """Note that a kernel was interpreted in this process."""
    _noted.add("launch")


def launched() -> bool:
    """Whether a kernel was interpreted in this process. Triton's interpreter runs one at a time: it patches modules."""
    return bool(_noted)
