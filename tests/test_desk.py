"""What is asked for at a desk and has to answer at once: list without torch, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normcheck import catalogue, discovery, driver
from normcheck.commands import complete

ROOT = Path(catalogue.__file__).parents[1]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_list_imports_no_torch_without_a_gpu() -> None:
    code = (
        "import sys; sys.argv = ['normcheck', 'list']\n"
        "from normcheck import cli, driver; driver.present = lambda: False\n"
        "try: cli.main()\n"
        "except SystemExit as stopped: assert stopped.code == 0\n"
        "heavy = {'torch', 'triton', 'numpy', 'hypothesis', 'safetensors'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy), file=sys.stderr)"
    )
    done = python(code)
    assert done.stderr.strip() == "heavy []"
    assert "implementations, on cpu" in done.stdout
    assert "cuDNN needs an NVIDIA GPU" in done.stdout
    words = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert "triton rmsnorm runs" in words


def test_list_and_torch_agree() -> None:
    assert catalogue.device_here() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert catalogue._torch_has_cuda() == bool(torch.version.cuda or torch.version.hip)


@pytest.mark.parametrize(
    ("hidden", "there", "built", "asked"),
    [
        (None, True, True, True),
        ("0,1", True, True, True),
        ("", True, True, False),
        ("-1", True, True, False),
        (None, False, True, False),
        (None, True, False, False),
    ],
)
def test_torch_is_asked_only_where_it_might_see_a_gpu(
    hidden: str | None, there: bool, built: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(driver, "present", lambda: there)
    monkeypatch.setattr(catalogue, "_torch_has_cuda", lambda: built)
    monkeypatch.setattr("normcheck.environment.device_of", lambda asked: "cuda")
    assert catalogue.device_here() == ("cuda" if asked else "cpu")


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda = '12.8'\nhip = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", True),
        ("something_else = 1\n", True),  # cannot be told: torch is asked
    ],
)
def test_how_torch_is_built(text: str, built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    code = "from normcheck import catalogue; print(catalogue._torch_has_cuda())"
    assert python(code, PYTHONPATH=f"{tmp_path}:{ROOT}").stdout.strip() == str(built)


def completed(words: str) -> list[str]:
    """What bash is offered after ``words``."""
    code = "import sys; sys.argv = ['normcheck']; from normcheck.cli import main; main()"
    count = str(len(words.split(" ")) - 1)
    env = {"_NORMCHECK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    done = python(code, **env)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_their_values() -> None:
    assert completed("normcheck ver") == ["verify"]
    assert "--known-failures" in completed("normcheck verify --kn")
    assert completed("normcheck verify --op rms") == [op for op in discovery.ops() if op.startswith("rms")]
    assert completed("normcheck verify --profile ") == ["quick", "ci", "deep"]


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "triton_mine.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kernel.py").touch()
    assert complete.implementations("triton") == [
        "triton",
        "triton_tutorial",
        "triton_tutorial_no_barrier",
        "triton_mine.py",
    ]
    assert complete.implementations("sub/k") == ["sub/kernel.py"]
    assert complete.dtypes("f") == ["fp16", "fp32"]
    assert complete.devices("c") == ["cpu", "cuda"]
    assert complete.reports("js") == ["json:"]
    assert complete.profiles("q") == ["quick"]
    assert complete.implementations("no/such/folder/") == []


def test_how_completion_is_installed_is_in_the_help() -> None:
    code = "import sys; sys.argv = ['normcheck', '--help']; from normcheck.cli import main; main()"
    assert "--install-completion" in python(code).stdout
