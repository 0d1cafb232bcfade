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
from normcheck.cases.op import Op
from normcheck.cases.ops import (
    FUSED_ADD,
    GATED,
    GROUPED,
    LENGTHS,
    MODULATED,
    MODULATED_ADD,
    OPS,
    QUANTISED,
    ROTARY,
    TABLE,
)

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
VERIFY = (
    "verify",
    "--no-contexts",
    "--impl",
    "torch",
    "--impl",
    "triton",
    "--dtype",
    "fp16",
    "--max-examples",
    "12",
    "--allow-thin",
)
FAULT = ("verify", "--impl", TIES_PASS, "--dtype", "fp32", "--max-examples", "12", "--no-contexts")
BENCH = ("bench", "--impl", "torch", "--dtype", "fp32", "--sizes", "8,64")
FAULTS = ("mF18", "mB12")
"""One of RMSNorms and one of bits, which a recipe is asked for as well."""
AUDIT = ("audit", *(word for id in FAULTS for word in ("--mutant", id)), "--dtype", "fp32", "--workers", "1")
RECIPE = ("audit", "--mutant", "mB12", "--dtype", "fp32", "--workers", "1", "--recipe", "atol=1e-3,rtol=1e-3")
ABOUT_IT = ("--op", NEW, "--device", "cpu", "--report", "json:-")
SCRIPT = """
import io, json, sys
from contextlib import redirect_stdout
from normcheck.cli import app

def done(argv):
    sys.argv = ["normcheck", *argv]
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            app.main()
        except SystemExit as stopped:
            return stopped.code, out.getvalue()

found = [done(argv) for argv in json.loads(sys.argv[1])]
from normcheck.audit.trial import Trial, start, run_trial
start("cpu")
cell = {"op": sys.argv[sys.argv.index("--op") + 1], "dtype": "fp16", "profile": "quick", "seed": 0, "device": "cpu"}
print(json.dumps([found, str(run_trial(Trial(name="pairwise_fma", **cell, control=True)))]))
"""
"""Each command, and a correct kernel's trial, in one process: to import torch for each takes half a minute."""


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


@pytest.mark.slow
def test_it_is_listed_verified_timed_and_audited(folder: Path) -> None:
    """By those who compute it; a fault that is planted in it is found, and a correct kernel of it is not accused."""
    commands = [("list",), *((*command, *ABOUT_IT) for command in (VERIFY, FAULT, BENCH, AUDIT, RECIPE))]
    listed, *reports, trial = in_a_process(folder, commands)
    assert listed[0] == 0
    found = {line.split()[0] for line in listed[1].splitlines() if line.split()[1:2] == [NEW]}
    assert found == {"torch", "torch_compile", "triton"}
    (verified, run), (fault, faulty), (timed, bench), (audited, audit), (_, recipe) = (
        (code, json.loads(out)) for code, out in reports
    )
    assert verified == 0, run
    assert len(run["verdicts"]) == 2
    for cell in run["verdicts"]:
        assert (cell["status"], cell["cases"] >= 12) == ("thin", True)
        assert {"y", "bitmask", "dx", "dw", "db"} <= set(cell["worst"])
    assert fault == 1
    (cell,) = faulty["verdicts"]
    assert (cell["status"], cell["failure"]["output"]) == ("fail", "bitmask")
    assert cell["failure"]["case"].startswith(f"{NEW} fp32 ")
    assert timed == 0
    speeds = [(speed["op"], speed["direction"], speed["status"]) for speed in bench["speeds"]]
    assert speeds == [(NEW, "forward", "measured"), (NEW, "backward", "measured")]
    assert audited == 0
    assert {(m["id"], m["status"]) for m in audit["mutants"]} == {(id, "killed") for id in FAULTS}
    assert [(m["status"], m["output"]) for m in recipe["mutants"]] == [("killed", "bitmask")]
    assert trial.count("accused=False") == 1
    assert "error=True" not in trial
    assert "cases=30" in trial


def in_a_process(folder: Path, commands: list[tuple[str, ...]]) -> list[Any]:
    """Exit code and standard output of each command in ``folder``, on the CPU, and the trial of a correct kernel."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"}
    argv = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    found, trial = json.loads(done.stdout)
    return [*found, trial]


@pytest.mark.parametrize("fact", ["centered", "zero_centered", "clamped", "quantises"])
def test_a_row_without_a_bound_is_refused(fact: str) -> None:
    fields = {"name": "new", "centered": False, "rounds_xhat": True, "biases": (False,), "formula": "", "source": ""}
    assert Op(**fields).of_models  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op=new: expected rounds_xhat=True with no centered"):
        Op(**{**fields, fact: True})  # type: ignore[arg-type]
    for more in ("adds_residual", "quantises"):
        with pytest.raises(ValueError, match="op=new: expected clamped=True with no adds_residual, quantises"):
            Op(**{**fields, "rounds_xhat": False, "clamped": True, more: True})  # type: ignore[arg-type]


def test_every_row_has_a_name_of_its_own() -> None:
    tables = TABLE, FUSED_ADD, QUANTISED, GATED, LENGTHS, MODULATED, MODULATED_ADD, GROUPED, ROTARY
    assert len(OPS) == sum(map(len, tables))
