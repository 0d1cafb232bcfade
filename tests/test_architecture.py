"""Imports point one way, and the oracle is independent of what it judges. Read from the source, so nothing is run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normcheck

ROOT = Path(normcheck.__file__).parent
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
_JUDGES = (
    "reference",
    "tolerance",
    "forward_bounds",
    "backward_bounds",
    "casting",
    "compare",
    "judge",
    "judge_backward",
    "gradients",
    "check",
    "sweep",
    "explain",
    "bitmask",
    "gate",
    "run",
    "checks",
    "sense",
)
JUDGES = tuple(f"normcheck.{name}" for name in _JUDGES)
LIBRARIES = (
    "triton",
    "cudnn",
    "torch.compile",
    "torch._dynamo",
    "torch._inductor",
    "cupy",
    "flash_attn",
    "liger_kernel",
)

FORBIDDEN = {
    "ops/*.py": (*LIBRARIES, "normcheck.impls", "normcheck.kernels", "normcheck.reports", *JUDGES),
    "impls/*.py": (*JUDGES, "normcheck.reports"),
    "kernels/*.py": (*JUDGES, "normcheck.reports", "normcheck.impls"),
    "mutants/*.py": (*JUDGES, "normcheck.reports"),
    "mutants/regimes.py": ("normcheck.cases.core", "normcheck.choices"),
    "golden/*.py": ("pickle", "normcheck.impls", "normcheck.kernels", "normcheck.mutants", "torch.load"),
    "golden/outcome.py": ("torch", *JUDGES),
    "golden/judging.py": (*LIBRARIES, "normcheck.call", "normcheck.attempt"),
    "reference.py": LIBRARIES,
    "tolerance.py": LIBRARIES,
    "forward_bounds.py": LIBRARIES,
    "backward_bounds.py": LIBRARIES,
    "casting.py": LIBRARIES,
    "bitmask.py": LIBRARIES,
    "compare.py": LIBRARIES,
    "call.py": (*JUDGES, *LIBRARIES),
    "answers.py": (*JUDGES, *LIBRARIES),
    "remote.py": (*JUDGES, *LIBRARIES),
    "stand_ins.py": (*JUDGES, *LIBRARIES),
    "random_bits.py": ("normcheck",),
    "data_kinds.py": (*JUDGES, *LIBRARIES, "normcheck.inputs"),
    "subject.py": JUDGES,
    "two_runs.py": JUDGES,
    "repeatability.py": JUDGES,
    "earlier_calls.py": JUDGES,
    "batch_invariance.py": JUDGES,
    "probes.py": JUDGES,
    "result.py": ("torch", "normcheck"),
    "score.py": ("torch", "normcheck"),
    "kin.py": ("torch", "normcheck"),
    "sense.py": ("torch", *LIBRARIES, *JUDGES),
    "checks/*.py": ("normcheck.reports", "normcheck.run", "normcheck.gate", "normcheck.sweep", *LIBRARIES),
    "speed.py": ("torch",),
    "case.py": ("torch", *JUDGES),
    "[!_]*.py": ("normcheck.cli",),
    "*/*.py": ("normcheck.cli",),
}


def imported(tree: ast.AST) -> set[str]:
    """Every module that a file imports, anywhere in it, and every attribute of torch that it names."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
    return names


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_imports_point_one_way(pattern: str) -> None:
    matching = [name for name in TREES if Path(name).match(pattern) and ("/" in name) == ("/" in pattern)]
    assert matching
    for name in matching:
        wrong = {i for i in imported(TREES[name]) for package in FORBIDDEN[pattern] if below(i, package)}
        assert wrong == set(), name


def test_reports_read_results_only() -> None:
    allowed = (
        "normcheck.result",
        "normcheck.score",
        "normcheck.speed",
        "normcheck.golden.outcome",
        "normcheck.reports",
        "normcheck.errors",
    )
    for name, tree in TREES.items():
        if name.startswith("reports/"):
            own = {i for i in imported(tree) if below(i, "normcheck") or below(i, "torch")}
            assert {i for i in own if not any(below(i, package) for package in allowed)} == set(), name


def test_the_command_line_starts_without_torch() -> None:
    """--help, --version and a mistyped option answer at once."""
    code = "import sys, normcheck.cli; print({'torch', 'triton', 'numpy', 'hypothesis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_every_complaint_says_what_was_expected() -> None:
    """A message that only passes on somebody else's words is theirs; ours name what is right beside what is wrong."""
    silent = []
    for name, tree in TREES.items():
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "UsageError":
                said = ast.unparse(call.args[0])
                words = re.sub(r"\{.*?\}", "", said) if said.startswith(("f", "'", '"')) else ""
                if re.search(r"[a-z]{2} [a-z]{2}", words) and "expected" not in said.lower():
                    silent.append(f"{name}:{call.lineno}: {said}")
    assert silent == []


def test_everything_public_says_what_it_is() -> None:
    silent = []
    for name, tree in TREES.items():
        assert ast.get_docstring(tree), name
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                silent += [] if ast.get_docstring(node) else [f"{name}: {node.name}"]
    assert silent == []
