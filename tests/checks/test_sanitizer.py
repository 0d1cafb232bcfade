"""What compute-sanitizer says, read; and on a GPU with the tool, a kernel that writes behind its output."""

from __future__ import annotations

import shutil

import pytest
import torch

from normcheck.cases.ops import OPS
from normcheck.checks import sanitizer
from normcheck.checks.cell import Cell
from normcheck.impls import discovery

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
WRITE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at store_kernel+0x1a0
=========     by thread (31,0,0) in block (0,0,0)
========= ERROR SUMMARY: 3 errors
"""
READ = WRITE.replace("write", "read")
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel+0x10 and Read access at kernel+0x20 [128 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("text", "kind"), [(WRITE, "out_of_bounds_write"), (READ, "out_of_bounds_read"), (RACE, "not_repeatable")]
)
def test_what_is_reported_is_a_problem(text: str, kind: str) -> None:
    problem, note = sanitizer.read("memcheck", text)
    assert problem is not None
    assert (problem.kind, note) == (kind, "")
    assert problem.message.startswith(("memcheck: Invalid __global__", "memcheck: Error: Race"))
    assert len(problem.frames) > 2


def test_nothing_reported_is_nothing() -> None:
    assert sanitizer.read("memcheck", CLEAN) == (None, "")
    assert sanitizer.read("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == (
        None,
        "",
    )


def test_a_tool_that_did_not_work_is_said() -> None:
    problem, note = sanitizer.read("memcheck", "No attachable process found\n")
    assert problem is None
    assert note == "memcheck did not work: No attachable process found"
    assert sanitizer.read("memcheck", "") == (None, "memcheck did not work: no output")


def cell_of(name: str, spec: str) -> Cell:
    (implementation,) = (i for i in discovery.select(spec, ("layernorm",)) if i.name == name)
    return Cell(OPS["layernorm"], implementation, "fp16", spec)


def test_an_absent_tool_is_a_stated_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    case, problems, note = sanitizer.examine(cell_of("torch", "torch"))
    assert (case, problems) == (None, ())
    assert note == "compute-sanitizer was not run: it is not on the PATH"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_on_a_gpu() -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    case, problems, _ = sanitizer.examine(
        cell_of("store-rows.triton", "normcheck.audit.mutants.triton_grid:store-rows.triton")
    )
    assert case is not None
    assert [p.kind for p in problems] == ["out_of_bounds_write"]
    case, problems, note = sanitizer.examine(cell_of("triton", "triton"))
    assert (case, problems) == (None, ())
    assert note == "compute-sanitizer (memcheck, racecheck) ran on 2 cases"
