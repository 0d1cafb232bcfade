"""The report files of a bench: ``csv``, a line per speed; ``json``, everything; ``png`` and ``html``, to look at.

The CSV's header is ``COLUMNS``; columns are only ever added, at its end. ``status`` is measured, fail (a finding: no
number), skip or error. Times are in milliseconds and GB/s in 1e9 bytes a second, both to six digits. Unknown values are
empty.

The JSON, schema ``normcheck-bench/1``:

    {"schema": "normcheck-bench/1", "normcheck": "0.1.0", "argv": [...], "suite": NAME or null, "source": TEXT or null,
     "device": "cuda", "environment": {name: version, "device": the card's name}, "method": TEXT,
     "counting": {"forward": TEXT, "backward": TEXT}, "seconds": 12.3, "exit_code": 0, "complete": true,
     "speeds": [{"op", "implementation", "dtype", "weight_dtype", "bias", "eps", "M", "N", "direction", "status",
                 "detail", "note", "bytes", "gb_per_s", "ms", "ms_q20", "ms_q80",
                 "copy": {"gb_per_s", "ms", "ms_q20", "ms_q80"} or null, "share_of_copy",
                 "verified_rows", "cases",
                 "failure": null or {"kind", "output", "case", "message", "reproduce", "ratio"}}]}

``weight_dtype`` is a dtype's name. Keys are only ever added.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TextIO

from normcheck.bench import html, plot
from normcheck.bench.speed import Bench, Speed, Times
from normcheck.reports.document import text_of
from normcheck.reports.targets import Target, unwritten, written
from normcheck.result import Finding

SCHEMA = "normcheck-bench/1"

COLUMNS = (
    "suite", "op", "implementation", "dtype", "weight_dtype", "bias", "eps", "M", "N", "direction", "status",
    "gb_per_s", "copy_gb_per_s", "share_of_copy", "ms", "ms_q20", "ms_q80", "copy_ms", "bytes", "verified_rows",
    "cases", "device", "versions", "detail", "note",
)  # fmt: skip

Json = dict[str, object]

_NOT_VERSIONS = ("device", "platform", "compute_capability")


def write(bench: Bench, target: Target) -> str:
    """Write one report; returns the reason if that failed, else ""."""
    if target.format == "png":
        return unwritten(target, lambda: plot.save(bench, target.path))
    return written(target, partial(_WRITERS[target.format], bench))


def write_csv(bench: Bench, stream: TextIO) -> None:
    """Write a header and a line per speed."""
    rows = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    rows.writeheader()
    versions = "; ".join(f"{name} {value}" for name, value in bench.environment.items() if name not in _NOT_VERSIONS)
    common = {"suite": bench.suite, "device": bench.environment.get("device", ""), "versions": versions}
    rows.writerows({**_line(speed), **common} for speed in bench.speeds)


def _line(speed: Speed) -> dict[str, object]:
    entry = _entry(speed)
    detail = speed.detail if speed.failure is None else f"{speed.failure.kind}: {speed.failure.message}"
    copy_ms = _six(speed.copy_times.median) if speed.copy_times is not None else None
    derived = {"detail": " ".join(detail.split()), "copy_ms": copy_ms, "copy_gb_per_s": _six(speed.copy_gb_per_s)}
    return {name: value for name, value in {**entry, **derived}.items() if name in COLUMNS}


def write_html(bench: Bench, stream: TextIO) -> None:
    """Write a page to look at."""
    html.write(bench, document(bench), stream)


def write_json(bench: Bench, stream: TextIO) -> None:
    """Write ``bench`` as one JSON object and a newline."""
    stream.write(text_of(document(bench)))


def document(bench: Bench) -> Json:
    """Everything in ``bench`` as plain JSON values, in the order of the schema."""
    return {
        "schema": SCHEMA,
        "normcheck": bench.environment.get("normcheck", "unknown"),
        "argv": list(bench.argv),
        "suite": bench.suite or None,
        "source": bench.source or None,
        "device": bench.device,
        "environment": dict(bench.environment),
        "method": bench.method,
        "counting": dict(bench.counting),
        "seconds": bench.seconds,
        "exit_code": bench.exit_code,
        "complete": bench.complete,
        "speeds": [_entry(speed) for speed in bench.speeds],
    }


def _entry(speed: Speed) -> Json:
    point = speed.point
    copy = {"gb_per_s": _six(speed.copy_gb_per_s), **_times(speed.copy_times)} if speed.copy_times else None
    return {
        "op": point.op,
        "implementation": speed.implementation,
        "dtype": point.dtype,
        "weight_dtype": point.dtype if point.weight_dtype == "same" else point.weight_dtype,
        "bias": point.bias,
        "eps": point.eps,
        "M": point.M,
        "N": point.N,
        "direction": speed.direction,
        "status": speed.status,
        "detail": speed.detail,
        "note": speed.note,
        "bytes": speed.bytes,
        "gb_per_s": _six(speed.gb_per_s),
        **_times(speed.times),
        "copy": copy,
        "share_of_copy": _six(speed.share_of_copy),
        "verified_rows": speed.verified_rows,
        "cases": speed.cases,
        "failure": None if speed.failure is None else _failure(speed.failure),
    }


def _times(times: Times | None) -> Json:
    if times is None:
        return {"ms": None, "ms_q20": None, "ms_q80": None}
    return {"ms": _six(times.median), "ms_q20": _six(times.low), "ms_q80": _six(times.high)}


def _six(value: float | None) -> float | None:
    """``value`` to six digits; no time is repeatable to so many."""
    return None if value is None else float(f"{value:.6g}")


def _failure(finding: Finding) -> Json:
    return {name: getattr(finding, name) for name in ("kind", "output", "case", "message", "reproduce", "ratio")}


_WRITERS: Mapping[str, Callable[[Bench, TextIO], None]] = MappingProxyType(
    {"csv": write_csv, "html": write_html, "json": write_json}
)
