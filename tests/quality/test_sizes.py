"""More than 2^31 elements: a kernel that counts them in 32 bits is found, and a right one passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command_line import Cli

FILE = Path(__file__).with_name("size_kernels.py")
GIB = 1 << 30


def needs(gib: int) -> pytest.MarkDecorator:
    """A GPU with so much memory free."""
    if not torch.cuda.is_available():
        return pytest.mark.skipif(True, reason="needs an NVIDIA GPU; torch sees none here")
    free = torch.cuda.mem_get_info()[0]
    reason = f"needs {gib} GiB of a GPU's memory; {free / GIB:.0f} GiB are free here"
    return pytest.mark.skipif(free < gib * GIB, reason=reason)


def run(*arguments: str, program: tuple[str, ...] = ("-m", "normcheck")) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which leaves no memory in use."""
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=FILE.parents[2], check=False)


@pytest.mark.slow
def test_small_cases_do_not_show_the_fault(cli: Cli) -> None:
    """So the tests below show what only size shows."""
    done = cli(
        *("verify", "--impl", str(FILE), "--dtype", "fp16", "--device", "cpu", "--max-examples", "2"),
        *("--no-contexts", "--no-isolation"),
    )
    assert done.out.count("THIN  4 of 4 cells thin: ") == 1, done.out


@pytest.mark.gpu
@pytest.mark.slow
@needs(62)
@pytest.mark.parametrize(
    ("implementation", "line"),
    [
        ("triton", "rmsnorm fp16 M=32769 N=65536 seed=1"),
        ("triton", "layernorm bf16 M=524289 N=4096 seed=2"),
        (f"{FILE}:right", "rmsnorm fp16 M=524289 N=4096 seed=3"),
        (f"{FILE}:right_autograd", "rmsnorm bf16 M=524289 N=4096 seed=4 bias=none"),
    ],
)
def test_a_right_kernel_passes(implementation: str, line: str) -> None:
    done = run("repro", implementation, line, "--device", "cuda")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "dx" in done.stdout and "y" in done.stdout


WITHOUT_CORE = """
import sys
from dataclasses import replace
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.prepare import selected
from normcheck.gate.sweep import run_cell

(implementation,) = selected(sys.argv[1], ("rmsnorm",), "cuda", 120.0, isolation=True)
cell = Cell(OPS["rmsnorm"], implementation, "fp16", sys.argv[1])
profile = replace(PROFILES["ci"], core_seconds=0.0, seconds=5.0, shrink_seconds=5.0)
verdict = run_cell(cell, Plan((cell,), profile, 0, "cuda", 120.0), lambda *_: None, with_coverage=False)
print("VERDICT", verdict.status, verdict.failure and verdict.failure.kind, verdict.failure and verdict.failure.case)
"""
"""What ci asks of a cell after its core, which has nothing of this size."""


@pytest.mark.gpu
@pytest.mark.slow
@needs(62)
@pytest.mark.parametrize("name", ["narrow_forward", "narrow_backward"])
def test_ci_finds_offsets_in_32_bits(name: str) -> None:
    done = run(f"{FILE}:{name}", program=("-c", WITHOUT_CORE))
    assert "VERDICT fail" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "M=524289 N=" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@needs(118)
def test_more_than_2_to_the_32_elements() -> None:
    done = run("repro", "triton", "rmsnorm bf16 M=1048577 N=4096 seed=5", "--device", "cuda")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
