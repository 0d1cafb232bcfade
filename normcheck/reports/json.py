"""The JSON report, schema ``normcheck-report/1``: every number of a run, for machines and for later.

Strict JSON: NaN and the infinities, which JSON does not have, are the strings "NaN", "Infinity" and "-Infinity";
what is not known is null. Keys are only ever added, after those that are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import metadata
from typing import TextIO, TypeVar

from normcheck.reports.report import Report
from normcheck.result import Coverage, Finding, Run, Steadiness, Uncheckable, Vacuity, Verdict, Where, Worst

SCHEMA = "normcheck-report/1"

OUTPUTS = ("y", "mean", "rstd", "bitmask", "dx", "dw", "db")
"""The order of outputs, whatever the order in which a sweep met them."""

Json = dict[str, object]
T = TypeVar("T")


def write(run: Run, stream: TextIO) -> None:
    """Write ``run`` as one JSON object and a newline, in ASCII, so that no encoding of ``stream`` can refuse it."""
    stream.write(json.dumps(document(run), indent=2, allow_nan=False) + "\n")


def document(run: Run) -> Json:
    """Everything in ``run`` as plain JSON values, in the order of the schema."""
    return {
        "schema": SCHEMA,
        "normcheck": _version(run),
        "argv": list(run.argv),
        "seed": run.seed,
        "profile": run.profile,
        "seconds": _number(run.seconds),
        "environment": dict(run.environment),
        "status": run.status,
        "exit_code": run.exit_code,
        "verdicts": [_verdict(verdict) for verdict in run.verdicts],
        "messages": list(run.messages),
        "complete": run.complete,
        "budget": {name: _number(value) for name, value in run.budget.items()},
        "shard": run.shard,
        "required": list(run.required),
        "part": run.part,
    }


def _version(run: Run) -> str:
    if "normcheck" in run.environment:
        return run.environment["normcheck"]
    try:
        return metadata.version("normcheck")
    except metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that was never installed


def _verdict(verdict: Verdict) -> Json:
    return {
        "op": verdict.op,
        "implementation": verdict.implementation,
        "dtype": verdict.dtype,
        "device": verdict.device,
        "status": verdict.status,
        "detail": verdict.detail,
        "cases": verdict.cases,
        "seconds": _number(verdict.seconds),
        "worst": {output: _worst(worst) for output, worst in _ordered(verdict.worst)},
        "not_returned": list(verdict.not_returned),
        "failure": None if verdict.failure is None else _failure(verdict.failure),
        "uncheckable": {output: _uncheckable(counts) for output, counts in _ordered(verdict.uncheckable)},
        "skipped": dict(verdict.skipped),
        "model": dict(verdict.model),
        "notes": list(verdict.notes),
        "vacuity": {output: _vacuity(counts) for output, counts in _ordered(verdict.vacuity)},
        "repeats": {output: _steadiness(counts) for output, counts in _ordered(verdict.repeats)},
        "invariance": {output: _steadiness(counts) for output, counts in _ordered(verdict.invariance)},
        "known": verdict.known,
        "failed_at": verdict.failed_at,
        "file": verdict.file,
        "line": verdict.line,
        "backward_refused": dict(verdict.backward_refused),
        "undeclared": {output: _worst(worst) for output, worst in _ordered(verdict.undeclared)},
        "core": None if verdict.core is None else _core(verdict.core),
    }


def _core(core: Coverage) -> Json:
    return {
        "planned": core.planned,
        "run": core.run,
        "missed": list(core.missed),
        "left_out": core.left_out,
        "refused": _number(core.refused),
        "building": _number(core.building),
    }


def _worst(worst: Worst) -> Json:
    return {
        "ratio": _number(worst.ratio),
        "max_abs": _number(worst.max_abs),
        "max_ulp": _number(worst.max_ulp),
        "case": worst.case,
    }


def _uncheckable(counts: Uncheckable) -> Json:
    return {"count": counts.count, "total": counts.total, "share": _number(counts.share)}


def _vacuity(counts: Vacuity) -> Json:
    shares = {"zeros": counts.zeros, "total": counts.total, "share": _number(counts.share)}
    return {**shares, "empty": counts.empty, "checks": counts.checks}


def _steadiness(counts: Steadiness) -> Json:
    return {"differ": counts.differ, "cases": counts.cases}


def _failure(finding: Finding) -> Json:
    return {
        "kind": finding.kind,
        "output": finding.output,
        "case": finding.case,
        "index": None if finding.index is None else [int(i) for i in finding.index],
        "actual": _number(finding.actual),
        "expected": _number(finding.expected),
        "error": _number(finding.error),
        "bound": _number(finding.bound),
        "ratio": _number(finding.ratio),
        "max_ulp": _number(finding.max_ulp),
        "mismatched": finding.mismatched,
        "numel": finding.numel,
        "message": finding.message,
        "reproduce": finding.reproduce,
        "check": finding.check,
        "terms": [{"name": name, "value": _number(value)} for name, value in finding.terms],
        "where": None if finding.where is None else _where(finding.where),
        "also": list(finding.also),
        "advice": finding.advice,
        "traceback": list(finding.traceback),
        "line": finding.line,
        "cause": finding.cause,
    }


def _where(where: Where) -> Json:
    return {
        "rows": where.rows,
        "columns": where.columns,
        "grid": [[_number(share) for share in row] for row in where.grid],
        "summary": where.summary,
    }


def _ordered(outputs: Mapping[str, T]) -> list[tuple[str, T]]:
    """The items of ``outputs`` in the order of OUTPUTS, then any others by name."""
    known = {output: position for position, output in enumerate(OUTPUTS)}
    return sorted(outputs.items(), key=lambda item: (known.get(item[0], len(known)), item[0]))


def _number(value: float | None) -> float | str | None:
    """A number as strict JSON can hold it."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


REPORT = Report(name="json", write=write, summary="every number of the run, schema normcheck-report/1")
