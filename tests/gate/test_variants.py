"""Variants of an implementation: each is judged in a process of its own, which has its environment."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import normcheck
from normcheck import Implementation
from normcheck.errors import UsageError
from normcheck.impls.discovery import validated
from tests.command_line import Cli

KERNEL = """
import os
import torch
from normcheck import Implementation

WAY = os.environ.get("MINE_WAY", "usual")

def forward(x, weight, bias, *, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 0.1 if WAY == "quick" else eps)

IMPLEMENTATIONS = [
    Implementation(name="mine", op="rmsnorm", forward=forward, biases=(False,), weight_dtypes=("io",),
                   variants={"slow": {"MINE_WAY": "slow"}, "quick": {"MINE_WAY": "quick"}})
]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(KERNEL, encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_each_variant_is_judged_in_a_process_with_its_environment(mine: Path, cli: Cli) -> None:
    few = ("--dtype", "fp32", "--device", "cpu", "--max-examples", "12", "--allow-thin", "--no-contexts")
    done = cli("verify", "--impl", str(mine), *few, "--report", "json:report.json")
    assert done.code == 1, done.out
    verdicts = json.loads(Path("report.json").read_text(encoding="utf-8"))["verdicts"]
    failed = {verdict["implementation"]: verdict["status"] == "fail" for verdict in verdicts}
    assert failed == {"mine": False, "mine[slow]": False, "mine[quick]": True}
    (found,) = [verdict["failure"] for verdict in verdicts if verdict["failure"]]
    again = shlex.split(found["reproduce"])
    assert again[2] == f"{mine}:mine[quick]" and cli(*again[1:]).code == 1
    assert cli("repro", f"{mine}:mine", found["case"]).code == 0


def test_without_a_process_of_its_own_a_variant_is_skipped(mine: Path, cli: Cli) -> None:
    case = "rmsnorm fp32 M=3 N=5 eps=1e-05 rows=normal dy=normal layout=contiguous seed=1 bias=none"
    done = cli("repro", f"{mine}:mine[quick]", "--no-isolation", case)
    assert done.code == 5 and "its environment takes a process of its own" in " ".join(done.out.split())


@pytest.mark.parametrize(
    "environment",
    [{"LD_PRELOAD": "x.so"}, {"PATH": "."}, {"PYTHONPATH": "."}, {"NORMCHECK_X": "1"}, {"a b": "1"}, {"A": 1}, ["A"]],
)
def test_a_variable_that_its_process_depends_on_is_refused(environment: object) -> None:
    for field in ({"variants": {"one": environment}}, {"environment": environment}):
        declared = Implementation(name="mine", op="rmsnorm", forward=lambda: None, **field)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"expected a dict of .*, such as PATH or LD_PRELOAD"):
            validated(declared, "mine.py")


def test_a_call_of_verify_has_no_process_for_a_variant() -> None:
    declared = Implementation(name="mine", op="rmsnorm", forward=lambda: None, variants={"one": {"A": "1"}})
    with pytest.raises(UsageError, match="expected neither in this process"):
        normcheck.verify(declared)
