"""Whether two commits behave alike: python tests/quality/same_behaviour.py BEFORE AFTER.

For a step that only moves, renames or folds: cases, bounds, verdicts and report texts of both, as hashes. Each commit
is checked out in a folder of its own and asked by its command line, which outlives the names of modules. Exit code 1
if something differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KERNELS = """
import torch

def right(x, weight, bias, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

def of_ones(x, weight, bias, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], torch.ones_like(x[0]), bias, eps)

def many_rows(x, weight, bias, eps):
    y = right(x, weight, bias, eps)
    return torch.cat([y[:64], y[64:] * 1.01]) if x.ndim == 2 else y
"""
"""One right function and two wrong ones, of which one is wrong from 64 rows on."""

EXPLAINED = "layernorm bf16 M=5 N=129 eps=1e-05 rows=shifted dy=normal layout=contiguous seed=3"
FEW = ("--max-examples", "60", "--seed", "0", "--dtype", "fp32")
ASKED = {
    **{f"cases of {op}": ("list", "--cases", "--op", op) for op in ("layernorm", "rmsnorm", "layernorm_relu_bitmask")},
    "table of bounds": ("tolerances",),
    **{
        f"bound of {out}": ("tolerances", "--explain", EXPLAINED, "--output", out, "--at", at)
        for out, at in (("y", "3,77"), ("dx", "3,77"), ("dw", "77"), ("rstd", "3"))
    },
    "verdict and report, right": ("verify", "--impl", "kernels.py:right", "--op", "layernorm", *FEW),
    "verdict and report, ones for weight": ("verify", "--impl", "kernels.py:of_ones", "--op", "layernorm", *FEW),
    "verdict and report, many rows": ("verify", "--impl", "kernels.py:many_rows", "--op", "layernorm", *FEW),
}

_OF_TIME = re.compile(r"\d[\d.,]* ?(ms|s|min|GB|GiB|MiB)\b|(?<=seconds\": )[\d.e-]+|/tmp/[^\s\"']+|[0-9a-f]{12,}")
_OF_RUN = (
    "seconds",
    "time",
    "building",
    "started",
    "host",
    "machine",
    "version",
    "commit",
    "argv",
    "environment",
    "wall",
)


def answers(tree: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """What the normcheck in ``tree`` answers to each question of ASKED: exit code and hash of its text and report."""
    (folder / "kernels.py").write_text(KERNELS)
    found = {}
    for name, asked in ASKED.items():
        report = folder / "report.json"
        also = ("--report", f"json:{report}") if asked[0] == "verify" else ()
        environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "100"}
        command = [sys.executable, "-m", "normcheck", *asked, *also]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        text = " ".join(_OF_TIME.sub("#", ended.stdout).split())  # a number of another width moves a table
        if also:
            text += json.dumps(_steady(json.loads(report.read_text())), sort_keys=True)
        if "NORMCHECK_SHOW" in os.environ:
            (Path(os.environ["NORMCHECK_SHOW"]) / f"{tree.name} {name}".replace(" ", "_")).write_text(text)
        found[name] = ended.returncode, hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _steady(value: Any) -> Any:
    """A report without what differs from run to run."""
    if isinstance(value, dict):
        return {key: _steady(own) for key, own in value.items() if not any(word in key for word in _OF_RUN)}
    if isinstance(value, list):
        return [_steady(own) for own in value]
    return _OF_TIME.sub("#", value) if isinstance(value, str) else value


def main(refs: list[str]) -> int:
    """Ask both commits, print a line for each question."""
    with tempfile.TemporaryDirectory() as space:
        every = []
        for ref in refs:
            tree, folder = Path(space, ref.replace("/", "_")), Path(space, "run")
            folder.mkdir(exist_ok=True)
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, ref], check=True)
            try:
                every.append(answers(tree, folder))
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)
    before, after = every
    for name in ASKED:
        print(
            f"{'equal  ' if before[name] == after[name] else 'DIFFERS'} {name}: {before[name]} {after[name]}",
            flush=True,
        )
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:3]))
