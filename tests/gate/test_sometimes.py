"""Gradients, and statistics, that a kernel returns in some cases only."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.gate.shards import one_verdict
from tests.command_line import Cli, KernelFile
from tests.sample_runs import verdict

NO_GRAPH = Path(__file__).parents[1] / "quality" / "got_past" / "w41_no_graph.py"

NORM = """
import torch

def norm(x, weight, eps):
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight.float()).to(x.dtype), rstd
"""

WITHOUT = """
def rmsnorm(x, weight, eps):
    if not x.shape[0]:
        return x * weight
    with torch.no_grad():
        return norm(x, weight, eps)[0]
"""

RETURNS_EARLY = """
def rmsnorm(x, weight, eps):
    return norm(x, weight, eps)[0] if x.numel() else torch.empty_like(x)
"""

SAVES_SOMETIMES = """
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    y, rstd = norm(x, weight, eps)
    return {"y": y, "rstd": rstd.detach()} if x.shape[-1] > 8 else y

IMPLEMENTATIONS = (Implementation(name="saves", op="rmsnorm", forward=forward, biases=(False,)),)
"""

FEW = ("--dtype", "fp16", "--max-examples", "40", "--allow-thin", "--no-contexts")


@pytest.mark.slow
def test_gradients_that_only_some_cases_have_are_missing_in_the_others(cli: Cli) -> None:
    done = cli(
        "verify", "--impl", f"{NO_GRAPH}:rmsnorm", "--op", "rmsnorm", "--dtype", "bf16", "--report", "json:r.json"
    )
    (cell,) = json.loads(Path("r.json").read_text())["verdicts"]
    found = cell["failure"]
    assert (done.code, found["kind"], found["output"], found["also"]) == (1, "missing", "dx", ["dw"])
    assert cell["cases"] <= 60
    assert "layout=contiguous" in found["case"] and "it has one in rmsnorm" in found["message"]
    command, repro, impl, other, bare = shlex.split(found["reproduce"])
    assert (command, repro, bare) == ("normcheck", "repro", found["case"])
    shown = cli(repro, impl, other, bare)
    assert shown.code == 1 and "dx was not returned" in shown.out
    assert cli(repro, impl, bare).code == 0  # alone it owes nothing
    assert cli(repro, impl, bare, other).code == 1


@pytest.mark.slow
def test_a_kernel_for_inference_passes_and_the_last_line_says_what_was_not_checked(
    cli: Cli, kernel_file: KernelFile
) -> None:
    done = cli("verify", "--impl", f"{kernel_file(NORM, WITHOUT)}:rmsnorm", "--op", "rmsnorm", *FEW)
    assert done.code == 0
    assert "; gradients not checked in 1 cell: y has no graph" in done.last
    assert "dx of 1 cell" not in done.last


@pytest.mark.slow
def test_without_rows_no_graph_is_owed(cli: Cli, kernel_file: KernelFile) -> None:
    impl = f"{kernel_file(NORM, RETURNS_EARLY)}:rmsnorm"
    done = cli("verify", "--impl", impl, "--op", "rmsnorm", *FEW)
    assert done.code == 0 and "gradients not checked" not in done.out
    lines = [
        f"rmsnorm fp16 M={rows} N=8 eps=1e-05 rows=normal dy=normal layout=contiguous seed=1 bias=none"
        for rows in (0, 2)
    ]
    assert cli("repro", impl, *lines).code == 0


@pytest.mark.slow
def test_statistics_are_nobodys_due_and_a_note_counts_the_cases_without(cli: Cli, kernel_file: KernelFile) -> None:
    done = cli("verify", "--impl", str(kernel_file(NORM, SAVES_SOMETIMES)), *FEW)
    assert done.code == 0
    assert "rstd was not returned in" in done.out and "not returned: rstd" not in done.out


def test_parts_of_which_one_alone_has_gradients_are_no_pass() -> None:
    """Which layouts a shard has is chance."""
    whole = replace(verdict(), status="pass", detail="", failure=None)
    bare = replace(whole, not_returned=("dx", "dw"), worst={"y": whole.worst["y"]})
    assert one_verdict([bare, bare]).status == one_verdict([whole, whole]).status == "pass"
    torn = one_verdict([whole, bare])
    assert torn.status == "error" and "it returns y without a graph, in another it has gradients" in torn.detail
    refused = replace(bare, backward_refused={"no engine": 3})
    assert one_verdict([whole, refused]).status == "pass"
