"""Reader of JSON reports: ``read`` gives the SweepResult that a report was written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from normcheck.errors import UsageError, one_line
from normcheck.reports.document import checked, load
from normcheck.reports.json import SCHEMA
from normcheck.result import SweepResult

_OF_A_VERDICT = ("detail", "cases", "seconds", "worst", "not_returned", "failure")
_OF_A_FAILURE = ("index", "actual", "expected", "error", "bound", "ratio", "max_ulp", "mismatched", "numel")
_OF_A_CORE = ("missed", "left_out", "refused", "building")
"""Keys that every report has, although the types have defaults for them. Older reports lack the other keys."""


def read(file: str) -> SweepResult:
    """The run in a report. Raises UsageError for any other file. Keys of later versions are ignored."""
    report, where = load(file, SCHEMA), one_line(file, 200)
    run = checked(SweepResult, report, where)
    for name in _missing(report):
        raise UsageError(f"{where}: {name} is missing: expected it")
    return run


def _missing(report: Mapping[str, Any]) -> Iterator[str]:
    for number, cell in enumerate(report["verdicts"]):
        parts = (("", cell, _OF_A_VERDICT), (".failure", cell.get("failure"), _OF_A_FAILURE))
        for place, value, names in (*parts, (".core", cell.get("core"), _OF_A_CORE)):
            yield from (f"verdicts[{number}]{place}.{name}" for name in names if value and name not in value)
