"""What is handed to strangers: the wheel runs where no checkout is, and the sdist and its metadata are complete."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import normcheck
from normcheck.errors import to_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECORDS = ("golden/gpu", "golden/found", "golden/bench")
"""Folders of other machines' records, which the sdist has not."""
KERNEL = """
import torch

def rmsnorm(x, weight, bias, eps):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)

def wrong(x, weight, bias, eps):
    return rmsnorm(x, weight, bias, 2 * eps)
"""
FEW = ("--op", "rmsnorm", "--dtype", "fp16", "--max-examples", "4", "--allow-thin", "--no-contexts", "--device", "cpu")


def done(*argv: str | Path, cwd: Path, code: int = 0, env: dict[str, str] | None = None) -> str:
    """What a program says that must end with ``code``."""
    ended = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code, f"{argv}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def wheel_in(folder: Path) -> Path:
    """The wheel of this checkout, built into ``folder``."""
    done(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "-w", folder, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def installed_in(folder: Path, wheel: Path) -> Path:
    """An environment that has the wheel; what it needs is read from this one, without its checkout of normcheck."""
    venv.create(folder)
    python = folder / "bin" / "python"
    done(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # Folders that a .pth file names come last, and no .pth file in them is read, such as that of pip install -e.
    (packages / "dependencies.pth").write_text("\n".join(sorted(here)), encoding="utf-8")
    return folder


def run(installed: Path, folder: Path, *argv: str, code: int = 0, program: str = "normcheck") -> str:
    """A program of the environment, called from ``folder`` as by a user who has no checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{installed / 'bin'}{os.pathsep}{env['PATH']}"
    return done(installed / "bin" / program, *argv, cwd=folder, code=code, env=env)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(files.read(name))


def require_all_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    tracked = done("git", "ls-files", "normcheck", cwd=ROOT).splitlines()
    assert len(tracked) > 300 and set(tracked) - names == set()
    assert {name for name in names if not name.startswith("normcheck/")} == set()
    said = metadata(wheel)
    assert said["Version"] == normcheck.__version__
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert said["Author"] == "normcheck maintainers"


@pytest.mark.slow
def test_the_wheel_is_whole_and_runs_where_no_checkout_is(tmp_path: Path) -> None:
    """One test, which builds and installs it once. What each command does is tested elsewhere; here, that it is there:
    its modules, the pages, C sources and templates beside them, and the processes that a kernel needs.
    """
    wheel = wheel_in(tmp_path)
    require_all_of_the_package(wheel)
    installed, elsewhere = installed_in(tmp_path / "venv", wheel), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(KERNEL, encoding="utf-8")
    code = "import normcheck, normcheck.errors as e; print(normcheck.__file__); print(e.to_install('plot'))"
    file, step = run(installed, elsewhere, "-c", code, program="python").splitlines()
    assert Path(file).is_relative_to(installed)
    assert step == f"pip install 'normcheck[plot] @ file://{wheel}'", "it names itself in what it says to install"
    assert run(installed, elsewhere, "--version") == f"normcheck {normcheck.__version__}\n"
    assert "out_of_bounds_write" in run(installed, elsewhere, "explain", "out_of_bounds_write")
    both = ("--impl", "mine.py:rmsnorm", "--impl", "mine.py:wrong", "--workers", "1")
    said = run(installed, elsewhere, "verify", *both, *FEW, "--report", "html:page.html", code=1)
    assert said.splitlines()[-1].startswith("FAIL  1 of 2 cells failed: rmsnorm/mine.py:wrong fp16 ")
    assert "mine.py:rmsnorm" in (elsewhere / "page.html").read_text(encoding="utf-8")
    mutant = ("--mutant", "mA01", "--dtype", "fp16", "--device", "cpu", "--workers", "1")
    assert run(installed, elsewhere, "audit", *mutant).splitlines()[-1].startswith("PASS")


@pytest.mark.slow
def test_the_sdist_builds_and_leaves_the_records_of_other_machines_out(tmp_path: Path) -> None:
    done(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    tracked = set(done("git", "ls-files", cwd=ROOT).splitlines())
    left_out = {name for name in tracked if name.startswith(RECORDS)}
    assert len(left_out) > 10
    assert tracked - names - left_out <= {".gitignore"} and names & left_out == set()


def test_test_brings_what_the_other_extras_bring() -> None:
    """So that README.md's first command has all that the tests need; liger-kernel asks for a GPU, and
    the library of the hub for a network: a stand-in is tested."""
    extras = {name: {*map(Requirement, lines)} for name, lines in PROJECT["optional-dependencies"].items()}
    others = set().union(*(lines for name, lines in extras.items() if name not in ("test", "liger", "hub")))
    assert "cudnn" in extras and others <= extras["test"]


def test_the_hint_for_cudnn_names_its_extra() -> None:
    from normcheck.cli.remedies import step_for

    assert step_for("nvidia-cudnn-frontend is not installed", "LINK") == to_install("cudnn")


def test_the_versions_of_python_are_those_that_ci_runs() -> None:
    said = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language")]
    versions = [Version(version) for version in said if version != "Only"]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(str(versions[0]))
    assert versions == [Version(f"3.{minor}") for minor in range(versions[0].minor, versions[-1].minor + 1)]
    jobs = [
        step["with"]["python-version"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/setup-python@")
    ]
    assert {str(versions[0]), str(versions[-1])} == set(jobs)


def test_the_changelog_names_what_is_needed() -> None:
    said = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### What it needs")[2]
    bounds = {asked.name: next(iter(asked.specifier)).version for asked in map(Requirement, PROJECT["dependencies"])}
    python = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {python} or newer, torch {bounds['torch']} and Triton {bounds['triton']} or newer" in said
    extras = said.partition("Extras: ")[2].partition(".")[0]
    assert {name.strip("`") for name in extras.split(", ")} == set(PROJECT["optional-dependencies"])
    assert f"## {normcheck.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
