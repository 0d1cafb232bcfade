"""The GitHub Action and the pre-commit hook: parsed, and their commands run here as a runner would run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from normcheck.cli.app import app

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
KERNEL = """
import torch

def right(x, weight, bias, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)

def wrong(x, weight, bias, eps):
    return right(x, weight, bias, eps) * 1.01
"""
OF_FEW_SHAPES = """
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    return right(x, weight, bias, eps)

SHAPES = ((5, 7), (20, 24), (3, 129))
IMPLEMENTATIONS = (Implementation(name="few", op="rmsnorm", forward=forward, shapes=SHAPES),)
"""
"""Its core is short."""
FEW = "--op rmsnorm --dtype fp16 --max-examples 4 --allow-thin --device cpu --no-isolation"


def expanded(text: str, inputs: dict[str, str]) -> str:
    """The value of an ``env`` entry, as the runner expands it; anything that is not known here is an error."""
    known = {f"inputs.{name}": value["default"] for name, value in ACTION["inputs"].items()}
    known |= {f"inputs.{name}": value for name, value in inputs.items()} | {"github.action_path": str(ROOT)}
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: known[match[1]], text)


def runner(step: dict[str, Any], folder: Path, **inputs: str) -> tuple[int, str, str]:
    """Run one step as a runner does; its exit code, its output, and what it set as outputs."""
    script = folder / "step.sh"
    script.write_text(step["run"], encoding="utf-8")
    output = folder / "output.txt"
    output.write_text("", encoding="utf-8")
    bin_ = folder / "bin"
    bin_.mkdir(exist_ok=True)
    if not (bin_ / "python").exists():
        (bin_ / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
        (bin_ / "python").chmod(0o755)
    env = {name: expanded(value, inputs) for name, value in step["env"].items()}
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
        cwd=folder,
        env={**os.environ, **env, "PATH": path, "PYTHONPATH": str(ROOT), "GITHUB_OUTPUT": str(output)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, output.read_text(encoding="utf-8")


def test_the_shape_of_a_composite_action() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert set(ACTION) == {"name", "description", "inputs", "outputs", "runs"}
    for step in ACTION["runs"]["steps"]:
        assert ("run" in step) != ("uses" in step)
        assert step.get("shell") == ("bash" if "run" in step else None)
    for value in ACTION["inputs"].values():
        assert set(value) == {"description", "default"}
        assert isinstance(value["default"], str)
    assert ACTION["outputs"]["exit-code"]["value"] == "${{ steps.verify.outputs.exit-code }}"
    assert STEPS["Verify"]["id"] == "verify"
    assert re.fullmatch(r"actions/upload-artifact@v\d+", STEPS["Keep the reports"]["uses"])
    assert STEPS["Keep the reports"]["if"].startswith("${{ always()")


def test_inputs_reach_no_script_but_by_the_environment() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == set(ACTION["inputs"])
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")


@pytest.mark.slow
def test_red(tmp_path: Path) -> None:
    """The test after this one is green."""
    (tmp_path / "mine.py").write_text(KERNEL, encoding="utf-8")
    reports = "json:out/report.json\n\nterminal:out/with blank/report.txt\n"
    code, output, said = runner(STEPS["Verify"], tmp_path, arguments=f"--impl mine.py:wrong  {FEW}\n", reports=reports)
    assert (code, said) == (1, "exit-code=1\n"), output
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["exit_code"] == 1
    assert (tmp_path / "out" / "with blank" / "report.txt").is_file()


@pytest.mark.slow
def test_what_is_configured_is_what_runs_without_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KERNEL + OF_FEW_SHAPES, encoding="utf-8")
    lines = ['impl = "mine.py:few"', 'op = "rmsnorm"', 'dtype = "bf16"', "time_budget = 0.1", 'device = "cpu"']
    config = "\n".join(("[tool.normcheck]", *lines, "isolation = false", ""))
    (tmp_path / "pyproject.toml").write_text(config, encoding="utf-8")
    code, output, said = runner(STEPS["Verify"], tmp_path)
    assert (code, said) == (0, "exit-code=0\n"), output
    report = json.loads((tmp_path / "normcheck-report" / "report.json").read_text(encoding="utf-8"))
    assert [cell["dtype"] for cell in report["verdicts"]] == ["bf16"]
    assert "::notice title=normcheck::PASS" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["--impl $(touch${IFS}planted)", "--impl `touch planted`", "--impl ;touch planted"]
)
def test_arguments_are_never_code(tmp_path: Path, arguments: str) -> None:
    code, output, said = runner(STEPS["Verify"], tmp_path, arguments=arguments, reports="$(touch planted):x\n")
    assert (code, said) == (2, "exit-code=2\n"), output
    assert not (tmp_path / "planted").exists()


def test_what_is_installed(tmp_path: Path) -> None:
    """With a pip that only says what it was asked for: there is no network here."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python").write_text('#!/bin/sh\nfor a; do printf "[%s]" "$a"; done\n', encoding="utf-8")
    (bin_ / "python").chmod(0o755)
    _, output, _ = runner(STEPS["Install normcheck"], tmp_path, requirement="normcheck==0.1; x")
    assert output == "[-m][pip][install][--disable-pip-version-check][normcheck==0.1; x]"
    _, output, _ = runner(STEPS["Install normcheck"], tmp_path)
    assert output == f"[-m][pip][install][--disable-pip-version-check][{ROOT}]"


def test_the_hook() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["pass_filenames"], hook["types"]) == ("normcheck", False, ["python"])
    assert hook["language"] == "system"  # an environment of the hook's own would lack what the user's kernels import
    assert hook["stages"] == ["pre-push"]
    program, command = hook["entry"].split()
    assert command in get_command(app).commands  # type: ignore[attr-defined]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'{program} = "normcheck.cli.app:main"' in project
