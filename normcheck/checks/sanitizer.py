"""Run NVIDIA's compute-sanitizer on small cases: it finds what neither values nor guard bands can show.

It watches ``python -m normcheck.checks.sanitizer SPEC NAME 'CASE LINE'``: a forward and a backward on plain tensors,
without guard bands, so that it sees an access to the first element outside. Only memcheck and racecheck are run: under
synccheck cuDNN's own norm kernels are known to raise barrier reports (cuDNN 9.9 and 9.18 release notes).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from normcheck.cases.beyond import telling
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.contract import Problem
from normcheck.impls import discovery
from normcheck.runner import call

TOOLS = ("memcheck", "racecheck")
_SHAPES = ((5, 7), (33, 1000))
_SECONDS = 240
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_KINDS = (
    ("Invalid __global__ read", "out_of_bounds_read"),
    ("Invalid __global__ write", "out_of_bounds_write"),
    ("Invalid __shared__", "out_of_bounds_write"),
    ("hazard", "not_repeatable"),
)


def examine(cell: Cell) -> tuple[Case | None, tuple[Problem, ...], str]:
    """Run the sanitizer on small cases of ``cell`` -> the first case with problems, or None; these; or a note."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return None, (), "compute-sanitizer was not run: it is not on the PATH"
    cases = _cases(cell)
    unclear: list[str] = []
    for case in cases:
        for name in TOOLS:
            problem, note = _examined(tool, name, cell, case)
            if problem is not None:
                return case, (problem,), ""
            unclear += [note] if note else []
    done = f"compute-sanitizer ({', '.join(TOOLS)}) ran on {len(cases)} cases"
    return None, (), "; ".join([done, *dict.fromkeys(unclear)])


def _cases(cell: Cell) -> list[Case]:
    first = next(iter(telling(cell.claims, 0)))
    shapes: Sequence[tuple[int, int]] = cell.implementation.shapes or _SHAPES
    smallest = sorted(shapes, key=lambda shape: shape[0] * shape[1])[: len(_SHAPES)]
    return [cell.claims.nearest(replace(first, M=m, N=n)) for m, n in smallest]


def _examined(tool: str, name: str, cell: Cell, case: Case) -> tuple[Problem | None, str]:
    own = [sys.executable, "-m", "normcheck.checks.sanitizer", cell.spec, cell.implementation.name, str(case)]
    command = [tool, "--tool", name, "--report-api-errors", "no", "--print-limit", "3", *own]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor gets a block of its own
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return None, f"{name} gave no result after {_SECONDS} s"
    return read(name, done.stdout + done.stderr)


def read(tool: str, text: str) -> tuple[Problem | None, str]:
    """The sanitizer's output as a problem, or as a note why it says nothing; neither if all is well."""
    counts = [int(count) for count in _SUMMARY.findall(text)]
    if not counts:
        lines = [line for line in text.splitlines() if line.strip()]
        return None, f"{tool} did not work: {lines[-1].strip()[:120] if lines else 'no output'}"
    if not sum(counts):
        return None, ""
    lines = [line.strip("= ").rstrip() for line in text.splitlines() if line.startswith("=========")]
    findings = [line for line in lines if any(words in line for words, _ in _KINDS)] or lines
    kind = next((kind for words, kind in _KINDS if words in findings[0]), "crash")
    return Problem(kind, "", f"{tool}: {findings[0]}", tuple(lines[:12])), ""


def main(spec: str, name: str, line: str) -> None:
    """The process under the sanitizer: run one forward and one backward on plain tensors."""
    case = parsed(line)
    implementation = next(i for i in discovery.select(spec, (case.op,)) if i.name == name)
    inputs = make(case, OPS[case.op], "cuda").each(lambda t: t.clone())
    plain = call.Unwatched()
    if implementation.backward is None:
        leaves = call.differentiable(inputs)
        call.autograd(call.forward(implementation, case, leaves, plain), leaves, plain)
    else:
        call.backward(implementation, case, inputs, call.forward(implementation, case, inputs, plain), plain)


if __name__ == "__main__":
    main(*sys.argv[1:])
