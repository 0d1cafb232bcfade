"""What a report is: a name, one line about it, and a function that writes a run to a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from normcheck.result import Run


@dataclass(frozen=True, kw_only=True)
class Report:
    """A format of ``--report NAME:PATH``; a module of this package declares one as ``REPORT``."""

    name: str
    write: Callable[[Run, TextIO], None]
    summary: str
