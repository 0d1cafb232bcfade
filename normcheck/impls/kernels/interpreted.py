"""Whether Triton kernels are interpreted. Quick to import, so that any command can ask."""

from __future__ import annotations

import os


def enabled() -> bool:
    """Whether kernels defined from now on are interpreted (``TRITON_INTERPRET``)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
