"""Every kind of finding has a page, whose wrong kernel is found as this kind and whose mended one is not."""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import normcheck
from normcheck.findings import page, summary
from normcheck.gate.plan import PROFILES
from normcheck.result import KINDS
from tests.command_line import Cli

ROOT = Path(normcheck.__file__).parent
HEADINGS = ["What it means", "The usual cause", "Wrong", "Mended", "If it is meant"]
FEW = ("--max-examples", "12", "--allow-thin", "--device", "cpu", "--report", "json:report.json")


@pytest.fixture
def found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is reported as it was found: how it is shrunk and explained is not the subject."""
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0))


def test_every_kind_has_a_page_and_every_page_a_kind() -> None:
    assert {path.stem for path in (ROOT / "findings").glob("*.md")} == set(KINDS)


@pytest.mark.slow
def test_what_the_code_reports_has_a_page() -> None:
    """The kinds that ``Problem`` and ``Broken`` are made of, where they stand as text."""
    made = {
        (call.args[0].value, path.name)
        for path in ROOT.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("Problem", "Broken")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert len(made) > 20
    assert {kind for kind, _ in made} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_its_parts_and_is_short(kind: str) -> None:
    text = page(kind)
    assert text.startswith(f"# {kind}: ") and summary(kind)[0].islower() and len(summary(kind)) < 60
    assert re.findall("^## (.*)$", text, re.MULTILINE) == HEADINGS
    prose = [line for line in re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines() if line]
    assert len(prose) <= 25
    assert max(map(len, text.splitlines())) <= 120


def blocks(kind: str) -> tuple[str, str, str]:
    """The wrong kernel of a page, the command that finds it, and the mended kernel."""
    wrong, mended = re.findall(r"^```python\n(.*?)^```$", page(kind), re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```sh\n(.*)\n```$", page(kind), re.MULTILINE)
    return wrong, command, mended


def judged(cli: Cli, command: str, few: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    """The exit code of a command with few cases and these words, and the verdict of its one cell."""
    name, *words = shlex.split(command, comments=True)
    assert name == "normcheck"
    code = cli(*words, *FEW, *few).code
    (verdict,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["verdicts"]
    return code, verdict


@pytest.mark.slow
@pytest.mark.usefixtures("found_at_once")
@pytest.mark.parametrize("kind", KINDS)
def test_the_wrong_kernel_of_a_page_is_found_and_the_mended_one_is_not(kind: str, cli: Cli) -> None:
    wrong, command, mended = blocks(kind)
    assert "--impl wrong.py" in command and command.endswith("  # exit code 1")
    Path("wrong.py").write_text(wrong, encoding="utf-8")
    Path("mended.py").write_text(mended, encoding="utf-8")
    few = () if kind == "context" else ("--no-contexts",)
    code, verdict = judged(cli, command, few)
    assert (code, verdict["status"], verdict["failure"]["kind"]) == (1, "fail", kind)
    # Of a busy machine, so with time; the same cases, and those after the one that showed it.
    code, right = judged(cli, re.sub(" --timeout [0-9]+", "", command).replace("wrong.py", "mended.py"), few)
    assert (code, right["failure"]) == (0, None), right["detail"]
    assert right["cases"] == 12 >= verdict["cases"]
