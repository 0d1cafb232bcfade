"""How much faster a second GPU makes a run: `python tests/quality/two_gpus.py RECORD.json`. A figure, not a test.

The same cells are judged by Dask workers on one GPU of this machine, and on two: the ci profile with as many cases in
each cell, so that both runs have the same work. A run before them tells what cells take, so that both begin with the
longest. The verdicts must be the same, but for who gave them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

CELLS_A_GPU = 8
CASES = 400
KERNELS = ("torch", "torch_native", "torch_token_int8", "torch_block128")
"""Those that wait for no compiler: its seconds are the cores', not a GPU's."""
COMMAND = (
    "verify",
    *(argument for name in KERNELS for argument in ("--impl", name)),
    *("--profile", "ci", "--max-examples", str(CASES), "--allow-thin"),
)


def run(gpus: int, report: Path, *more: str) -> tuple[dict[str, Any], float]:
    """The report of a run on so many GPUs, and its seconds of wall time."""
    how = ("--scheduler", "local", "--workers", str(CELLS_A_GPU * gpus), "--report", f"json:{report}", *more)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "normcheck", *COMMAND, *how], env=environment, check=False)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 5):
        raise SystemExit(f"gpus={gpus}: exit code {done.returncode}; expected 0, or 5 for thin cells")
    return json.loads(report.read_text(encoding="utf-8")), seconds


def told(verdict: dict[str, Any]) -> list[Any]:
    """What must be the same on any machine: the cell, its status, its cases and shapes."""
    return [verdict[name] for name in ("op", "implementation", "dtype", "status", "cases", "shapes")]


def longest(report: dict[str, Any]) -> float:
    """The seconds of the cell that took longest: no number of GPUs makes a run shorter than that."""
    return round(max(float(verdict["seconds"]) for verdict in report["verdicts"]), 1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before.json"
        run(2, before)
        timings = ("--timings", str(before))
        (one, alone), (two, both) = (run(gpus, Path(folder) / f"{gpus}.json", *timings) for gpus in (1, 2))
    pairs = zip(map(told, one["verdicts"]), map(told, two["verdicts"]), strict=True)
    by_gpu = Counter(verdict["machine"]["uuid"] for verdict in two["verdicts"])
    record = {
        "schema": "normcheck-two-gpus/1",
        "command": list(COMMAND),
        "environment": two["environment"],
        "cells": len(two["verdicts"]),
        "cases": sum(v["cases"] for v in two["verdicts"]),
        "seconds": {"one": round(alone, 1), "two": round(both, 1)},
        "speed_up": round(alone / both, 2),
        "longest_cell": {"one": longest(one), "two": longest(two)},
        "cells_of_each_gpu": sorted(by_gpu.values()),
        "differing": [pair for pair in pairs if pair[0] != pair[1]],
        "verdicts": [told(v) for v in two["verdicts"]],
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print({name: value for name, value in record.items() if name not in ("environment", "verdicts")})


if __name__ == "__main__":
    main()
