"""Every dependency has a lower bound that was chosen and a reason, and a version in which it was last tested."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.some import some

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TABLE = tomllib.loads(PROJECT)
LEFT_TO_TORCH = re.compile(r"nvidia-|cuda-|setuptools$|triton$")
OBVIOUS = {"pytest", "ruff", "mypy"}


def asked_for() -> list[Requirement]:
    """What is installed with ``.[test]``."""
    project = TABLE["project"]
    return [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["test"]]


def pinned() -> set[str]:
    """The names in constraints.txt."""
    lines = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def brought(requirement: Requirement, found: set[str]) -> None:
    """Add what a requirement brings on this machine to ``found``: names."""
    name = canonicalize_name(requirement.name)
    if name in found or LEFT_TO_TORCH.match(name):
        return
    found.add(name)
    for inner in map(Requirement, metadata.requires(name) or ()):
        if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in requirement.extras or {""}):
            brought(inner, found)


def test_each_has_a_lower_bound_and_a_reason() -> None:
    for requirement in some(asked_for()):
        assert [s.operator for s in requirement.specifier] == [">="], requirement
        line = next(line for line in PROJECT.splitlines() if line.strip().startswith(f'"{requirement.name}>='))
        assert requirement.name in OBVIOUS or "# " in line, requirement


def test_all_that_they_bring_has_a_tested_version() -> None:
    found: set[str] = set()
    for requirement in asked_for():
        brought(requirement, found)
    assert found - pinned() == set()


def test_the_weekly_job_asks_for_the_lowest_versions_that_are_promised() -> None:
    """By the line of the workflow itself; pip then refuses bounds that cannot all be met at once."""
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8"))
    runs = [step["run"] for step in weekly["jobs"]["lowest"]["steps"] if "run" in step]
    (line, install) = (run for run in runs if "lowest.txt" in run)
    command = line.removesuffix(" > lowest.txt")
    said = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    bounds = {f"{asked.name}=={next(iter(asked.specifier)).version}" for asked in asked_for()}
    assert set(said.split()) == bounds
    assert install == "pip install -c lowest.txt -e '.[test]'"
