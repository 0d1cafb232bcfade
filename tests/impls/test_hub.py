"""Kernels of the kernels hub: on a folder laid out as a downloaded one is; there is no network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normcheck.errors import ExitCode, UsageError
from normcheck.impls import _hub
from tests.command_line import Cli

SPEC = "hub:somebody/norms@v1:PlainRMSNorm"
FILES = {
    "__init__.py": "from . import layers\nfrom ._ops import rstd_of\n\n__all__ = ['layers', 'rstd_of']\n",
    "_ops.py": "import torch\n\n\ndef rstd_of(x, eps):\n"
    "    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)\n",
    "layers.py": """
import torch
from ._ops import rstd_of


class PlainRMSNorm(torch.nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states):
        wide = hidden_states.float()
        return (wide * rstd_of(wide, self.variance_epsilon) * self.weight.float()).to(hidden_states.dtype)


class FixedEps(PlainRMSNorm):
    def forward(self, hidden_states):
        wide = hidden_states.float()
        return (wide * rstd_of(wide, 1e-6) * self.weight.float()).to(hidden_states.dtype)
""",
}
FEW = ("--op", "rmsnorm", "--dtype", "fp32", "--device", "cpu", "--no-contexts", "--max-examples", "12", "--allow-thin")


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    _hub.local.cache_clear()
    yield
    _hub.local.cache_clear()


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A repository as the hub's library keeps it, with a build for all and one for another machine."""
    folder = tmp_path / "models--somebody--norms" / "snapshots" / "0f1e2d"
    package = folder / "build" / "torch-universal" / "norms"
    package.mkdir(parents=True)
    (folder / "build" / "torch27-cxx11-cu126-aarch64-linux").mkdir()
    for name, source in FILES.items():
        (package / name).write_text(source, encoding="utf-8")
    return folder


class Library:
    """Stands for huggingface_hub: what it was asked, and a network or none."""

    def __init__(self, folder: Path | None, network: bool) -> None:
        self.folder, self.network, self.asked = folder, network, list[dict[str, Any]]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Library:
        api = SimpleNamespace(list_repo_files=self.list_repo_files)
        found = SimpleNamespace(HfApi=lambda: api, snapshot_download=self.snapshot_download)
        monkeypatch.setitem(sys.modules, _hub.LIBRARY, found)  # type: ignore[arg-type]
        return self

    def list_repo_files(self, repository: str, revision: str | None) -> list[str]:
        if not self.network or self.folder is None:
            raise OSError("Name or service not known")
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*.py")]

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.asked.append({"repository": repository, **options})
        if self.folder is None:
            raise FileNotFoundError("not in the cache")
        return str(self.folder)


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_layer_without_a_constructor_is_judged(snapshot: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(snapshot, network=True).install(monkeypatch)
    done = cli("verify", "--impl", SPEC, *FEW)
    assert done.code == 0, (done.out, done.err)
    assert "norms:PlainRMSNorm" in done.out
    assert library.asked == [
        {"repository": "somebody/norms", "revision": "v1", "allow_patterns": ["build/torch-universal/*"]}
    ]
    wrong = cli("verify", "--impl", "hub:somebody/norms:FixedEps", *FEW)
    assert wrong.code == ExitCode.FOUND
    (line,) = [line for line in wrong.out.splitlines() if line.startswith("Reproduce: ")]
    assert line.startswith("Reproduce: normcheck repro hub:somebody/norms:FixedEps 'rmsnorm fp32 ")


def test_what_was_downloaded_before_needs_no_network(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(snapshot, network=False).install(monkeypatch)
    found = _hub.local(SPEC)
    assert found == f"{snapshot}/build/torch-universal/norms/__init__.py:PlainRMSNorm"
    assert library.asked[-1]["local_files_only"] is True


def test_without_network_there_is_one_clear_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Library(None, network=False).install(monkeypatch)
    done = cli("verify", "--impl", SPEC, *FEW)
    assert (done.code, done.err.count("\n")) == (ExitCode.USAGE, 1)
    assert "cannot be downloaded" in done.err and "Name or service not known" in done.err


def test_without_the_library_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _hub.LIBRARY, None)  # type: ignore[arg-type]
    done = cli("verify", "--impl", SPEC, *FEW)
    assert done.code == ExitCode.USAGE and "hub" in done.err.rpartition("pip install")[2]


@pytest.mark.parametrize(
    "spec", ["hub:", "hub:norms:A", "hub:a/b", "hub:a/b:", "hub:a/b@:A", "hub:../../x/y:A", "hub:a/b:A.b"]
)
def test_another_form_is_refused(spec: str, cli: Cli) -> None:
    done = cli("verify", "--impl", spec, *FEW)
    assert done.code == ExitCode.USAGE and "expected hub:OWNER/NAME:LAYER" in done.err


def test_the_build_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    exact, other = "torch210-cxx11-cpu-x86_64-linux", "torch29-cxx11-cpu-x86_64-linux"
    assert _hub.build_of([other, exact, "torch-universal"]) == exact
    assert _hub.build_of([other, "torch-cuda", "torch-universal"]) == "torch-universal"
    assert _hub.build_of([other, "torch-cuda"]) == ""


def test_a_repository_without_a_build_that_fits(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot / "build" / "torch-universal").rename(snapshot / "build" / "torch27-cxx11-cu126-x86_64-linux")
    Library(snapshot, network=True).install(monkeypatch)
    with pytest.raises(UsageError, match="its builds are torch27-cxx11-cu126-x86_64-linux; expected one for this"):
        _hub.local(SPEC)
