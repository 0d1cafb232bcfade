"""``normcheck doctor``."""

from __future__ import annotations

import os
import sys

import typer


def doctor() -> None:
    """Machine, drivers and versions; what runs here, and what does not, why, and what to do about it.

    Exit code: 0 something can be verified here; 5 nothing can.
    """
    from normcheck.doctor import examine

    raise typer.Exit(examine(sys.stdout, os.environ.get("TRITON_INTERPRET", "")))
