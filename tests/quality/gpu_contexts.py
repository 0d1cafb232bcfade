"""What comes on a GPU of kernels that are wrong in a context alone: `python -m tests.quality.gpu_contexts RECORD.json`.

On one small case in fp16, each wrong kernel in its context, each right one in all; ``device`` takes two GPUs, and the
kernel that hangs half a minute. The record is for golden/gpu, where `tests/golden/test_gpu.py` judges it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import normcheck
from normcheck import Implementation
from normcheck.contexts.catalogue import CONTEXTS as CONTEXTS_BY_NAME
from normcheck.contexts.catalogue import PROFILER
from normcheck.runner.environment import environment
from tests.quality import context_kernels, gpu_context_kernels

CASE = "rmsnorm fp16 M=40 N=33 eps=1e-05 rows=blend dy=normal layout=contiguous seed=3 bias=none"
CONTEXTS = ("stream", "graph", "device", "inference", "frozen", "again", "thread")
"""Those that right kernels are tried in: any that asks for one more has to be written for it."""

Kernel = Callable[..., Tensor] | Implementation
NEVER_RUNS = Implementation(
    name="never_runs", op="rmsnorm", forward=gpu_context_kernels.right, biases=(False,), expects_kernel="fused_norm"
)


def wrong() -> Iterator[tuple[str, Kernel, str, str]]:
    """Name, kernel, context and output of each that is wrong on a GPU."""
    both: dict[str, tuple[Callable[..., Tensor], str, str]] = {**gpu_context_kernels.WRONG, **context_kernels.WRONG}
    for name, (kernel, context, output) in both.items():
        if "cuda" in CONTEXTS_BY_NAME[context].devices:
            yield name, kernel, context, output
    yield NEVER_RUNS.name, NEVER_RUNS, PROFILER, ""


def judged(kernel: Kernel, *contexts: str) -> dict[str, Any]:
    """The status of the case, the finding if there is one, and how each context went."""
    (verdict,) = normcheck.verify(kernel, op="rmsnorm", case=CASE, device="cuda", context=contexts)
    found = verdict.failure
    told = {} if found is None else {"found": [found.kind, found.check, found.output]}
    return {"status": verdict.status, **told, "contexts": {name: how.status for name, how in verdict.contexts.items()}}


def main() -> None:
    record = {
        "schema": "normcheck-gpu-contexts/1",
        "environment": environment("cuda"),
        "gpus": torch.cuda.device_count(),
        "case": CASE,
        "wrong": {name: judged(kernel, context) for name, kernel, context, _ in wrong()},
        "right": {name: judged(kernel, *CONTEXTS) for name, kernel in gpu_context_kernels.RIGHT.items()},
    }
    Path(sys.argv[1]).write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    print({name: (each["status"], *each.get("found", ())) for name, each in record["wrong"].items()})
    print(record["right"])


if __name__ == "__main__":
    main()
