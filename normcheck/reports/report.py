"""Contract of a report: a name, one line about it, and a function that writes a run to a stream."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TextIO

from normcheck import reports as package
from normcheck.result import SweepResult


@dataclass(frozen=True, kw_only=True)
class Report:
    """A format of ``--report NAME:PATH``; a module of this package declares one as ``REPORT``.

    ``needs``: modules without which it cannot be written.
    """

    name: str
    write: Callable[[SweepResult, TextIO], None]
    summary: str
    needs: tuple[str, ...] = ()


@cache
def formats() -> dict[str, Report]:
    """Report name -> report, from each public module of this package that declares one."""
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    modules = [import_module(f"{package.__name__}.{name}") for name in sorted(names)]
    return {module.REPORT.name: module.REPORT for module in modules if hasattr(module, "REPORT")}
