"""What is told of a wrong kernel is the fault, and not what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from normcheck.reports import json_reader
from normcheck.result import Finding
from tests.command_line import Cli, KernelFile
from tests.inner_loop import parametrize

KERNEL = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    FORWARD
    y = (wide * rstd[:, None] * weight.float()).to(x.dtype)
    Y
    return {"y": y, "rstd": rstd}

def backward(dy, x, weight, bias, saved, *, eps):
    SAVED
    xhat = x.float() * rstd[:, None]
    wd = dy.float() * weight.float()
    dx = (rstd[:, None] * (wd - xhat * (wd * xhat).mean(-1, keepdim=True))).to(x.dtype)
    dw = (dy.float() * xhat).sum(0).to(weight.dtype)
    BACKWARD
    return {"dx": dx, "dw": dw}

IMPLEMENTATIONS = (Implementation(name="mine", op="rmsnorm", forward=forward, backward=backward, biases=(False,)),)
"""
FEW = ("--dtype", "fp16", "--max-examples", "12", "--allow-thin", "--no-contexts", "--device", "cpu")

pytestmark = pytest.mark.usefixtures("unshrunk")  # what is told is told of the first case as of a smaller one


def finding_of(cli: Cli, kernel_file: KernelFile, folder: Path, **lines: str) -> Finding:
    text = KERNEL
    all_lines = {"forward": "pass", "y": "pass", "backward": "pass", "saved": "rstd = saved['rstd']", **lines}
    for place, line in all_lines.items():
        text = text.replace(f"    {place.upper()}\n", f"    {line}\n")
    done = cli("verify", "--impl", str(kernel_file(text)), *FEW, "--report", "json:report.json")
    assert done.code == ExitCode.FOUND, done.out + done.err
    (verdict,) = json_reader.read(str(folder / "report.json")).verdicts
    assert verdict.failure is not None
    return verdict.failure


MISSING = {
    "y=None beside statistics of NaN": ("y", {"y": "y, rstd = None, rstd * float('nan')"}),
    "statistics elsewhere beside a y of NaN": ("rstd", {"y": "y, rstd = y * float('nan'), rstd.to('meta')"}),
    "rstd=None, which the backward reads": ("rstd", {"y": "rstd = None"}),
    "rstd of another name, which the backward reads": ("rstd", {"y": "return {'y': y, 'inverse': rstd}"}),
    "dx=None beside a dw of NaN": ("dx", {"backward": "dx, dw = None, dw * float('nan')"}),
    "no dw": ("dw", {"backward": "return {'dx': dx}"}),
}


@parametrize("name", MISSING, inner=1)
def test_what_is_missing_is_told_first(name: str, cli: Cli, kernel_file: KernelFile, tmp_path: Path) -> None:
    output, lines = MISSING[name]
    found = finding_of(cli, kernel_file, tmp_path, **lines)
    assert (found.kind, found.output) == ("missing", output), found.message


def test_another_error_of_a_backward_is_not_told_as_missing(cli: Cli, kernel_file: KernelFile, tmp_path: Path) -> None:
    """It computes rstd anew, so that it may be missing; then it takes a bias for granted."""
    saved = "rstd = torch.rsqrt(x.float().square().mean(-1) + eps)\n    bias.sum()"
    found = finding_of(cli, kernel_file, tmp_path, y="return y", saved=saved)
    assert (found.kind, found.output) == ("exception", "")
    assert "'NoneType' object has no attribute 'sum'" in found.message


UNWRITTEN = {
    "no y at all": ("y", {"y": "y = torch.empty_like(x)"}),
    "half of the rows of y": ("y", {"y": "h = len(y) // 2; y = torch.cat([y[:h], torch.empty_like(y[h:])])"}),
    "the last column of y": ("y", {"y": "y = torch.cat([y[:, :-1], torch.empty_like(y[:, -1:])], 1)"}),
    "rstd, from which y comes": ("rstd", {"forward": "rstd = torch.cat([rstd[:-1], torch.empty_like(rstd[-1:])])"}),
    "scratch memory, of which y is a sum": ("y", {"y": "y = y + torch.empty_like(y)[:1] * 0"}),
    "the last row of dx": ("dx", {"backward": "dx = torch.cat([dx[:-1], torch.empty_like(dx[-1:])])"}),
    "no dw at all": ("dw", {"backward": "dw = torch.empty_like(dw)"}),
}


@parametrize("name", UNWRITTEN, inner=1)
def test_what_is_unwritten_is_told_before_its_values(
    name: str, cli: Cli, kernel_file: KernelFile, tmp_path: Path
) -> None:
    output, lines = UNWRITTEN[name]
    found = finding_of(cli, kernel_file, tmp_path, **lines)
    assert (found.kind, found.output) == ("unwritten", output), found.message
