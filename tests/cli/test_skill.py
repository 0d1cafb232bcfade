"""The page for agents is followed to the letter: on three broken kernels it leads to the true cause, and to its end."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from normcheck.cli.skill import page
from normcheck.findings import page as page_of_kind
from normcheck.result import KINDS
from tests.command_line import Cli, Done

BLOCKS = re.findall(r"^```sh\n(.*)\n```$", page(), re.MULTILINE)

EPS_OUTSIDE = """
import torch

def rmsnorm(x, weight, eps):
    wide = x.float()
    rstd = 1 / (wide.square().mean(-1, keepdim=True).sqrt() + eps)
    return (wide * rstd * weight.float()).to(x.dtype)
"""
(NO_MASK, _) = re.findall(r"^```python\n(.*?)^```$", page_of_kind("out_of_bounds_write"), re.MULTILINE | re.DOTALL)
STALE_BUFFER = """
import torch

buffers = {}

@torch.no_grad()
def rmsnorm(x, weight, eps):
    wide = x.float()
    y = buffers.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
    return y.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())
"""
RIGHT = STALE_BUFFER.replace("buffers.setdefault((x.shape, x.dtype), ", "(")

BROKEN = {
    "eps": (EPS_OUTSIDE, "mismatch", "eps is added outside the root"),
    "mask": (NO_MASK, "out_of_bounds_write", "1 behind its last"),
    "buffer": (STALE_BUFFER, "not_repeatable", "y of two calls lies in the same memory"),
}


def follow(cli: Cli, line: str) -> Done:
    """Run a line of the page as a shell would; what it writes to a file is there."""
    command, _, target = line.partition(" > ")
    name, *words = shlex.split(command)
    assert name == "normcheck"
    done = cli(*words)
    if target:
        Path(target).write_text(done.out, encoding="utf-8")
    return done


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path("report.json").read_text(encoding="utf-8"))["verdicts"]
    return found


def test_the_page_is_short_and_names_all_kinds(cli: Cli) -> None:
    text = cli("skill").out
    assert text == page() and len(text.splitlines()) < 80 and max(map(len, text.splitlines())) <= 125
    assert set(KINDS) <= set(re.findall(r"\w+", text.partition("## What the kinds want")[2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_its_steps_lead_to_the_true_cause(name: str, cli: Cli) -> None:
    source, kind, cause = BROKEN[name]
    verify, explain = BLOCKS
    Path("my_kernel.py").write_text(source, encoding="utf-8")
    assert follow(cli, verify).code == 1
    (entry,) = entries()
    assert (entry["status"], entry["failure"]["kind"]) == ("fail", kind)
    assert cause in entry["next"]["do"]
    assert follow(cli, explain.replace("KIND", kind)).out.startswith(f"# {kind}: ")
    assert follow(cli, entry["next"]["command"]).code == 1  # it still fails
    defined = Path(entry["file"]).read_text(encoding="utf-8").splitlines()[entry["line"] - 1]
    assert defined.startswith(("def rmsnorm", "@torch.no_grad"))
    Path("my_kernel.py").write_text(RIGHT, encoding="utf-8")
    assert follow(cli, entry["next"]["command"]).code == 0


@pytest.mark.slow
def test_its_loop_ends(cli: Cli) -> None:
    Path("my_kernel.py").write_text(RIGHT, encoding="utf-8")
    assert follow(cli, BLOCKS[0]).code == 0
    (entry,) = entries()
    assert entry["next"]["do"].startswith("Nothing is wrong. Before a merge")
    assert "Gradients were not checked" in entry["next"]["do"]
    words = shlex.split(entry["next"]["command"])
    assert words[:2] == ["normcheck", "verify"] and words[-2:] == ["--profile", "ci"]
