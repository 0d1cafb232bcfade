"""Imports point one way, and the oracle is independent of what it judges. Read from the source, so nothing is run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import normcheck

ROOT = Path(normcheck.__file__).parent
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
JUDGES = ("normcheck.oracle", "normcheck.checks.gradients", "normcheck.checks.check", "normcheck.checks.finding")

FORBIDDEN = {
    "oracle/*.py": LIBRARIES,
    "oracle/fused/*.py": tuple(set(LIBRARIES) - {"triton"}),
    "cases/*.py": LIBRARIES,
    "cases/rng.py": ("normcheck",),
    "cases/case.py": ("torch",),
    "runner/call.py": LIBRARIES,
    "runner/kernel_errors.py": LIBRARIES,
    "isolation/*.py": ("normcheck.oracle", "cudnn", "liger_kernel"),
    "checks/*.py": LIBRARIES,
    "checks/rerun.py": JUDGES,
    "checks/repeatability.py": JUDGES,
    "checks/statefulness.py": JUDGES,
    "checks/batch_invariance.py": JUDGES,
    "checks/padding_rows.py": JUDGES,
    "checks/probes.py": JUDGES,
    "gate/sanity.py": ("torch", *LIBRARIES, *JUDGES),
    "json_types.py": ("torch", "normcheck"),
    "options.py": ("torch",),
    "result.py": ("torch",),
    "audit/score.py": ("torch", "normcheck"),
    "audit/mutants/*.py": ("normcheck.oracle", "normcheck.gate"),
    "audit/mutants/regimes.py": ("normcheck.cases.core", "normcheck.cases.design", "normcheck.cases.strategies"),
    "bench/speed.py": ("torch",),
    "golden/*.py": ("pickle", "normcheck.impls.kernels", "torch.load"),
    "golden/results.py": ("torch", "normcheck.oracle"),
    "golden/judge.py": (*LIBRARIES, "normcheck.runner.call", "normcheck.checks.attempt"),
}
"""What import-linter does not see: parts of torch, and files that may import less than their package."""


@cache
def trees() -> dict[str, ast.Module]:
    """File of the package -> what it parses to; not made where tests are only collected."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


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


def test_the_layers_hold() -> None:
    """The contracts of import-linter, in pyproject.toml."""
    lint = str(Path(sys.executable).with_name("lint-imports"))  # the environment need not be activated
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_a_file_imports_no_more_than_it_may(pattern: str) -> None:
    matching = [name for name in trees() if Path(name).match(pattern) and ("/" in name) == ("/" in pattern)]
    assert matching
    for name in matching:
        if name in FORBIDDEN and name != pattern:  # it has a line of its own
            continue
        wrong = {i for i in imported(trees()[name]) for package in FORBIDDEN[pattern] if below(i, package)}
        assert wrong == set(), name


def test_the_command_line_starts_without_torch() -> None:
    """--help, --version and a mistyped option answer at once."""
    code = "import sys, normcheck.cli.app; print({'torch', 'triton', 'numpy', 'hypothesis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_every_complaint_says_what_was_expected() -> None:
    """A message that only passes on somebody else's words is theirs; ours name what is right beside what is wrong."""
    silent = []
    for name, tree in trees().items():
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "UsageError":
                said = ast.unparse(call.args[0])
                words = re.sub(r"\{.*?\}", "", said) if said.startswith(("f", "'", '"')) else ""
                if re.search(r"[a-z]{2} [a-z]{2}", words) and "expected" not in said.lower():
                    silent.append(f"{name}:{call.lineno}: {said}")
    assert silent == []


_STAGES = ("oracle/fused/forward.py", "oracle/fused/gradients.py")
"""The kernels of one stage of the fused judge each."""


def test_no_file_has_more_than_400_lines_and_no_class_more_than_200() -> None:
    long = []
    for path in ROOT.rglob("*.py"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        long += [name] * (len(text.splitlines()) > 400 and name not in _STAGES)
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        long += [f"{name}: {own.name}" for own in classes if (own.end_lineno or 0) - own.lineno >= 200]
    assert not long
