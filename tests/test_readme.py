"""The README's commands, examples and options, held against the tool: what it shows is what happens."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normcheck.audit.recipes import RECIPES
from normcheck.gate.plan import PROFILES
from normcheck.result import KINDS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^(<!-- ci -->\n)?```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for mark, block in BLOCKS if not mark for line in block.splitlines()]
GATE = re.findall(r"^- run: (normcheck .*)$", README, re.MULTILINE)
FEWER = ("--time-budget", "1")  # the core, little after it, and a second to shrink what fails


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )


def normcheck(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a ``normcheck ...`` line of the README; a verify on the CPU, with fewer cases than it says."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "normcheck"
    if arguments[0] == "verify":
        arguments += FEWER
    return run("-m", "normcheck", *arguments, "--device", "cpu", cwd=cwd)


def write(folder: Path, **changed: str) -> Path:
    """The README's example files in ``folder``."""
    for name, source in EXAMPLES.items():
        (folder / name).write_text(changed.get(name.removesuffix(".py"), source), encoding="utf-8")
    return folder


def replaced(name: str, old: str, new: str) -> str:
    assert EXAMPLES[name].count(old) == 1, f"the README's {name} no longer says {old!r}"
    return EXAMPLES[name].replace(old, new)


def with_the_readmes_typo() -> str:
    found = re.search(r"^```diff\n-(.*)\n\+(.*)\n```$", README, re.MULTILINE)
    assert found
    return replaced("my_layernorm.py", found[1], found[2])


def test_four_commands_are_marked_for_ci() -> None:
    marked = [block for mark, block in BLOCKS if mark]
    assert README.count("<!-- ci -->") == len(marked) == 4
    install, tests, audit, golden = marked
    assert golden == ".venv/bin/normcheck golden verify golden/cpu/* golden/h200/*\n"
    assert audit == ".venv/bin/normcheck audit\n"
    assert "-c tests/constraints.txt -e '.[test]'" in install
    assert "normcheck verify --op rmsnorm --dtype fp16" in install
    assert tests == ".venv/bin/python -m pytest\n"


def test_the_examples_are_found() -> None:
    assert set(EXAMPLES) == {"vacuous.py", "my_rmsnorm.py", "my_layernorm.py"}
    assert len(COMMANDS) >= 4


def test_a_dx_of_zeros_passes_the_check_that_the_readme_quotes(tmp_path: Path) -> None:
    done = run("vacuous.py", cwd=write(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dx = 0 passes: the largest |dx| is ")
    assert float(done.stdout.split()[-1]) < 2e-4


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_what_it_says(command: str, tmp_path: Path) -> None:
    fails = "exit code 1" in command
    done = normcheck(command, write(tmp_path, **({"my_layernorm": with_the_readmes_typo()} if fails else {})))
    assert done.returncode == fails, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("FAIL" if fails else "PASS")
    if fails and "verify" in command:
        assert "FAIL layernorm mine fp16: rstd is wrong (end to end)" in done.stdout
    elif fails:  # what the README shows of it
        shown = re.search(r"^```text\n(pass  dx .*?)^```$", README, re.MULTILINE | re.DOTALL)
        assert shown and shown[1] in done.stdout


def test_the_red_block_reproduces(tmp_path: Path) -> None:
    command = re.search(r"^Reproduce: (.*)$", README, re.MULTILINE)
    assert command
    done = normcheck(command[1], write(tmp_path, my_layernorm=with_the_readmes_typo()))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^FAIL +rstd +end to end ", done.stdout, re.MULTILINE), done.stdout


def test_the_gate_writes_the_report_that_the_readme_describes(tmp_path: Path) -> None:
    (command,) = GATE
    done = normcheck(command, write(tmp_path, my_layernorm=with_the_readmes_typo()))
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "normcheck.json").read_text(encoding="utf-8"))
    verdict = next(v for v in report["verdicts"] if v["status"] == "fail")
    outermost = {**report, **verdict, **verdict["core"]}
    innermost = {**verdict["failure"], **next(iter(verdict["worst"].values()))}
    paragraph = re.search(r"^The JSON report, (.*?)\n\n", README, re.MULTILINE | re.DOTALL)
    assert paragraph
    words = set(re.findall(r"`([a-z_]+)`", paragraph[1])) - {"pass", "thin", "fail", "error", "nothing", "skip"}
    assert len(words) > 25
    assert words <= {*outermost, *innermost}
    assert f"`{report['schema']}`" in paragraph[1]


@pytest.mark.parametrize(
    ("name", "command", "old", "new"),
    [
        (
            "my_rmsnorm.py",
            "normcheck verify --impl my_rmsnorm.py:rmsnorm --op rmsnorm",
            "torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)",
            "(1 / (xf.square().mean(-1, keepdim=True).sqrt() + eps))",
        ),
        (
            "my_layernorm.py",
            "normcheck verify --impl my_layernorm.py",
            "torch.rsqrt(var + eps)",
            "1 / (var.sqrt() + eps)",
        ),
    ],
)
def test_eps_outside_the_root_is_found(name: str, command: str, old: str, new: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **{name.removesuffix(".py"): replaced(name, old, new)})
    done = normcheck(command, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("\nReproduce: ") == 3  # one for each dtype


def test_every_option_that_the_readme_names_exists(tmp_path: Path) -> None:
    helps = {
        name: run("-m", "normcheck", name, "--help", cwd=tmp_path).stdout
        for name in ("verify", "audit", "repro", "list", "tolerances")
    }
    spans = re.findall(r"`(--[^`]+)`", README)
    assert spans
    for option in {word for span in spans for word in re.findall(r"--[a-z-]+", span)}:
        both = helps["verify"] + helps["audit"]
        assert re.search(rf"{option}\b", both), f"{option} is in no help of normcheck verify or audit"
    for line in re.findall(r"normcheck ((?:verify|audit|repro|list|tolerances)\b[^`\n]*)", README):
        command = line.split()[0]
        for option in re.findall(r"--[a-z-]+", line):
            assert re.search(rf"{option}\b", helps[command]), f"{option} is not in normcheck {command} --help"


def test_every_command_that_the_readme_names_exists(tmp_path: Path) -> None:
    known = run("-m", "normcheck", "--help", cwd=tmp_path).stdout
    named = set(re.findall(r"`normcheck ([a-z]+)", README)) | {shlex.split(line)[1] for line in COMMANDS}
    for name in named:
        assert re.search(rf"^ +{name}\b", known, re.MULTILINE), f"normcheck has no command {name}"


def test_the_budgets_of_the_profiles_are_as_written() -> None:
    quick, ci, deep = PROFILES["quick"], PROFILES["ci"], PROFILES["deep"]
    text = " ".join(README.split())
    assert f"`quick` (after the core {quick.seconds:g} s, and {quick.max_examples} cases in all)" in text
    assert f"`ci` ({ci.seconds:g} s, {ci.max_examples} cases, more sizes" in text
    assert f"`deep` ({deep.seconds:g} s, {deep.max_examples} cases)" in text
    assert f"({quick.core_seconds:g} s a cell in quick, {ci.core_seconds:g} in ci" in text


def test_every_recipe_that_the_readme_names_exists() -> None:
    named = re.search(r"tolerance, one of\s+(.*?), or\s+yours", README, re.DOTALL)
    assert named
    assert re.findall(r"`([a-z-]+)`", named[1]) == list(RECIPES)


def test_every_kind_of_finding_is_explained() -> None:
    assert {kind for kind in KINDS if f"`{kind}`" in README} == set(KINDS)
