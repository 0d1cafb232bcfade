"""A new op of this family is one row of the table: it is then verified, benched and audited, and nothing else is told.

The row is added to a copy of the package, which every process of a command then imports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import normcheck
from normcheck.cases.ops import FUSED_ADD, OPS, TABLE, Op

NEW = "rmsnorm_relu_bitmask"
ROW = f"""
    Op(
        name="{NEW}",
        centered=False,
        clamped=True,
        biases=(False, True),
        formula="z = rmsnorm(x);  y = min(max(z, lower_clip), upper_clip);  bit = lower_clip < z < upper_clip",
        source="a test",
    ),
"""
TIES_PASS = "normcheck.audit.mutants.bits:mB01"
CORRECT = """
from normcheck.audit.trial import Trial, start, run_trial
start("cpu")
cell = {{"op": "{op}", "dtype": "fp16", "profile": "quick", "seed": 0, "device": "cpu"}}
print(run_trial(Trial(name="pairwise_fma", **cell, control=True)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose normcheck has the row."""
    folder = tmp_path_factory.mktemp("with_a_row")
    shutil.copytree(Path(normcheck.__file__).parent, folder / "normcheck")
    table = folder / "normcheck" / "cases" / "ops.py"
    before = table.read_text(encoding="utf-8")
    assert before.count("TABLE = (\n") == 1 and NEW not in OPS
    table.write_text(before.replace("TABLE = (\n", f"TABLE = ({ROW}"), encoding="utf-8")
    return folder


def python(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and standard output of Python in ``folder``, on the CPU."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def reported(folder: Path, command: str, *options: str) -> tuple[int, Any]:
    """Exit code and JSON report of a command about the new op."""
    words = ("-m", "normcheck", command, "--op", NEW, "--device", "cpu", "--report", "json:-", *options)
    code, out = python(folder, *words)
    return code, json.loads(out)


def test_it_is_listed_with_those_who_compute_it(folder: Path) -> None:
    code, out = python(folder, "-m", "normcheck", "list")
    assert code == 0
    found = {line.split()[0] for line in out.splitlines() if line.split()[1:2] == [NEW]}
    assert found == {"torch", "torch_compile", "triton"}


@pytest.mark.slow
def test_our_own_implementations_of_it_pass(folder: Path) -> None:
    some = ("--dtype", "fp16", "--max-examples", "12", "--allow-thin")
    code, run = reported(folder, "verify", "--impl", "torch", "--impl", "triton", *some)
    assert code == 0, run
    for cell in run["verdicts"]:
        assert (cell["status"], cell["cases"] >= 12) == ("thin", True)
        assert {"y", "bitmask", "dx", "dw", "db"} <= set(cell["worst"])


@pytest.mark.slow
def test_a_fault_planted_in_it_is_found(folder: Path) -> None:
    code, run = reported(folder, "verify", "--impl", TIES_PASS, "--dtype", "fp32", "--max-examples", "12")
    assert code == 1
    (cell,) = run["verdicts"]
    assert (cell["status"], cell["failure"]["output"]) == ("fail", "bitmask")
    assert cell["failure"]["case"].startswith(f"{NEW} fp32 ")


@pytest.mark.slow
def test_it_is_timed(folder: Path) -> None:
    code, bench = reported(folder, "bench", "--impl", "torch", "--dtype", "fp32", "--sizes", "8,64")
    assert code == 0
    speeds = [(speed["op"], speed["direction"], speed["status"]) for speed in bench["speeds"]]
    assert speeds == [(NEW, "forward", "measured"), (NEW, "backward", "measured")]


@pytest.mark.slow
def test_its_faults_are_killed_and_a_recipe_is_asked(folder: Path) -> None:
    """One of RMSNorms and one of bits, which a recipe is asked for as well."""
    ids = ("mF18", "mB12")
    chosen = [word for id in ids for word in ("--mutant", id)]
    code, audit = reported(folder, "audit", *chosen, "--dtype", "fp32", "--workers", "1")
    assert code == 0
    assert {(m["id"], m["status"]) for m in audit["mutants"]} == {(id, "killed") for id in ids}
    code, audit = reported(folder, "audit", "--mutant", "mB12", "--dtype", "fp32", "--recipe", "atol=1e-3,rtol=1e-3")
    assert [(m["status"], m["output"]) for m in audit["mutants"]] == [("killed", "bitmask")]


@pytest.mark.slow
def test_a_correct_kernel_of_it_is_not_accused(folder: Path) -> None:
    _, out = python(folder, "-c", CORRECT.format(op=NEW))
    assert out.count("accused=False") == 1
    assert "error=True" not in out
    assert "cases=30" in out


@pytest.mark.parametrize("fact", ["centered", "zero_centered", "clamped"])
def test_a_row_without_a_bound_is_refused(fact: str) -> None:
    fields = {"name": "new", "centered": False, "rounds_xhat": True, "biases": (False,), "formula": "", "source": ""}
    assert Op(**fields).of_models  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op=new: expected rounds_xhat=True with no centered"):
        Op(**{**fields, fact: True})  # type: ignore[arg-type]


def test_every_row_has_a_name_of_its_own() -> None:
    assert len(OPS) == len(TABLE) + len(FUSED_ADD)
