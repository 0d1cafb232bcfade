"""JSON report, schema ``normcheck-report/1``: every number of a run, for machines and for later.

It is strict JSON: NaN and the infinities, which JSON does not have, are the strings "NaN", "Infinity" and "-Infinity".
An unknown value is null. New versions only add keys, after the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, TextIO

from normcheck.reports._next import next_step
from normcheck.reports.document import plain, text_of
from normcheck.reports.report import Report
from normcheck.result import OUTPUTS, SweepResult

SCHEMA = "normcheck-report/1"

_BY_OUTPUT = ("worst", "uncheckable", "vacuity", "repeats", "invariance", "undeclared")


def write(run: SweepResult, stream: TextIO) -> None:
    """Write ``run`` as one JSON object and a newline."""
    stream.write(text_of(document(run)))


def document(run: SweepResult) -> dict[str, Any]:
    """Everything in ``run`` as plain JSON values, in the order of the schema; outputs are in the order of OUTPUTS."""
    found: dict[str, Any] = {"schema": SCHEMA, "normcheck": _version(run), **plain(run)}
    for verdict, of_run in zip(found["verdicts"], run.verdicts, strict=True):
        verdict |= {name: _ordered(verdict[name]) for name in _BY_OUTPUT}
        verdict["next"] = next_step(of_run, run)
    return found


def _version(run: SweepResult) -> str:
    if "normcheck" in run.environment:
        return run.environment["normcheck"]
    try:
        return metadata.version("normcheck")
    except metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that was never installed


def _ordered(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """``outputs`` in the order of OUTPUTS, then any others by name."""
    known = {output: position for position, output in enumerate(OUTPUTS)}
    return dict(sorted(outputs.items(), key=lambda item: (known.get(item[0], len(known)), item[0])))


REPORT = Report(name="json", write=write, summary="every number of the run, schema normcheck-report/1")
