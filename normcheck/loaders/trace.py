"""Traces: the verdict on each workload in the schema that flashinfer-bench and SOL-ExecBench read, one line each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from normcheck.errors import one_line
from normcheck.loaders.asked import Judged
from normcheck.loaders.documents import Workload

_STATUS = {
    "": "PASSED",
    "shape": "INCORRECT_SHAPE",
    "dtype": "INCORRECT_DTYPE",
    "exception": "RUNTIME_ERROR",
    "crash": "RUNTIME_ERROR",
    "missing": "RUNTIME_ERROR",
    "import": "COMPILE_ERROR",
    "timeout": "TIMEOUT",
}
"""Kind of a finding -> status; every other kind is INCORRECT_NUMERICAL."""

_UNTIMED = {"latency_ms": 0.0, "reference_latency_ms": 0.0, "speedup_factor": 0.0}
"""The schema wants a performance with PASSED; nothing was timed."""


def traces(
    definition: str,
    solution: str,
    workloads: Sequence[Workload],
    judged: Sequence[Judged],
    environment: Mapping[str, str],
) -> str:
    """One JSON line for each workload. Of one that was not judged the line has no evaluation, as the schema allows."""
    hardware = environment.get("device", "unknown")
    libs = {name: text for name, text in environment.items() if name not in ("device", "platform")}
    now = datetime.now(UTC).isoformat()
    lines = []
    for workload, one in zip(workloads, judged, strict=True):
        line: dict[str, Any] = {"definition": definition, "workload": workload.model_dump(exclude_none=True)}
        line |= {"solution": None, "evaluation": None}
        if not one.left_out:
            line["solution"] = solution
            line["evaluation"] = _evaluation(one, {"hardware": hardware, "libs": libs}, now)
        lines.append(json.dumps(line, allow_nan=False))
    return "\n".join(lines) + "\n"


def _evaluation(one: Judged, environment: Mapping[str, Any], now: str) -> Mapping[str, Any]:
    status = _STATUS.get(one.kind, "INCORRECT_NUMERICAL")
    numbers = {"max_relative_error": _number(one.max_rel), "max_absolute_error": _number(one.max_abs)}
    extra = {"normcheck": {"cases": one.cases, "worst_ratio": _number(one.ratio)}}
    if one.failed is not None:
        extra["normcheck"] |= {"kind": one.kind, "case": str(one.failed)}
    return {
        "status": status,
        "environment": environment,
        "timestamp": now,
        "log": one_line(one.message, 2000),
        "correctness": {**numbers, "extra": extra} if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        "performance": _UNTIMED if status == "PASSED" else None,
    }


def _number(value: float) -> float | str:
    """A number as JSON has it; the schema reads "Infinity"."""
    return value if math.isfinite(value) else "Infinity"
