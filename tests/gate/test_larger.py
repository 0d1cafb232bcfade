"""A red report draws a larger case beside the smallest one, if that hides a pattern."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from normcheck.reports import json_reader
from normcheck.result import Finding
from tests.command_line import Cli, Done, KernelFile

KERNEL = """
import torch

def rmsnorm(x, weight, eps):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    CHANGE
    return y.to(x.dtype)
"""


def failing(change: str, kernel_file: KernelFile, cli: Cli, folder: Path) -> tuple[Done, Finding]:
    file = kernel_file(KERNEL.replace("CHANGE", change))
    done = cli("verify", "--impl", str(file), "--dtype", "fp16", "--device", "cpu", "--report", "json:report.json")
    assert done.code == ExitCode.FOUND
    (verdict,) = json_reader.read(str(folder / "report.json")).verdicts
    assert verdict.failure is not None
    return done, verdict.failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "small", "large"),
    [
        ("y = torch.cat([y[:64], 1.5 * y[64:]])", "only row 64 of 65 (the last)", "only rows >= 64 of 130"),
        (
            "y = y * (1 + (torch.arange(y.shape[1]) % 8 == 7))",
            "only column 7 of 8 (the last)",
            "the last column of each 8",
        ),
    ],
    ids=["rows", "columns"],
)
def test_a_pattern_is_seen_in_the_larger_case(
    change: str, small: str, large: str, kernel_file: KernelFile, cli: Cli, tmp_path: Path
) -> None:
    done, found = failing(change, kernel_file, cli, tmp_path)
    assert f"  Where: {small}\n" in done.out
    assert f": {large}" in done.out.partition("\n  Larger case, ")[2].splitlines()[0]
    assert found.where is not None
    assert found.larger is not None
    assert found.where.summary.startswith(small)
    assert found.larger.where.summary.startswith(large)
    assert f"    Case: {found.larger.case}\n" in done.out
    assert cli("repro", str(next(tmp_path.glob("*.py"))), found.larger.case, "--device", "cpu").code == ExitCode.FOUND


@pytest.mark.slow
def test_no_pattern_is_not_drawn(kernel_file: KernelFile, cli: Cli, tmp_path: Path) -> None:
    scattered = "y = y + (y.abs() * 1000).frac().gt(0.9)"
    done, found = failing(scattered, kernel_file, cli, tmp_path)
    assert found.larger is None
    assert "Larger case" not in done.out
    (verdict,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["verdicts"]
    assert verdict["failure"]["larger"] is None
