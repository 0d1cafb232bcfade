"""What is asked for at a desk and has to answer at once: list without torch, and what a shell completes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normcheck.cases.ops import OPS
from normcheck.cli import list as catalogue
from normcheck.cli.options import offered
from normcheck.gate.options import VerifyOptions
from normcheck.options import options_of
from tests.inner_loop import parametrize

ROOT = Path(catalogue.__file__).parents[1]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


LIBRARY = """
import ctypes
class Library:
    def cuInit(self, flags): return {init}
    def cuDriverGetVersion(self, version): version._obj.value = {version}; return 0
    def cuDeviceGetCount(self, count): count._obj.value = {count}; return 0
ctypes.CDLL = lambda name: Library()
"""
LIST = """
import sys; sys.argv = ['normcheck', 'list']
from normcheck.cli import app
try: app.main()
except SystemExit as stopped: assert stopped.code == 0
heavy = {'torch', 'triton', 'numpy', 'hypothesis', 'safetensors', 'cudnn', 'liger_kernel'} & set(sys.modules)
print('heavy', sorted(heavy), file=sys.stderr)
"""


def driver_with(*, count: int = 1, version: int = 13000, init: int = 0) -> str:
    """Code that puts a CUDA driver in the place of this machine's."""
    return LIBRARY.format(init=init, version=version, count=count)


def torch_built(folder: Path, text: str) -> str:
    """A path with packages that are there, a torch with this version.py among them, and that nothing may import."""
    for name in ("torch", "triton", "cudnn", "liger_kernel"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "torch" / "version.py").write_text(text)
    return f"{folder}:{ROOT}"


@pytest.mark.slow
def test_list_imports_no_torch_without_a_gpu() -> None:
    done = python(driver_with(count=0) + LIST)
    assert done.stderr.strip() == "heavy []"
    assert "implementations, on cpu" in done.stdout
    assert "cuDNN needs an NVIDIA GPU" in done.stdout
    words = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert "triton rmsnorm runs" in words


@pytest.mark.slow
def test_list_imports_no_torch_with_a_gpu(tmp_path: Path) -> None:
    """What would have to be imported to know whether it works is not tried, and the list says so."""
    path = torch_built(tmp_path, "cuda: Optional[str] = '13.0'\n")
    done = python(driver_with() + LIST, PYTHONPATH=path, TRITON_INTERPRET="")
    assert done.stderr.strip() == "heavy []"
    assert "implementations, on cuda" in done.stdout
    words = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {"torch rmsnorm runs", "triton rmsnorm runs"} <= words
    assert "cudnn rmsnorm nvidia-cudnn-frontend is installed; normcheck doctor tries it" in words
    assert "liger rmsnorm liger-kernel is installed; normcheck doctor tries it" in words


def test_what_a_glance_does_not_try_is_tried_elsewhere(tmp_path: Path) -> None:
    code = "from normcheck.impls import _optional\nprint(_optional.not_working('liger_kernel', 'liger-kernel'))"
    done = python(code, PYTHONPATH=torch_built(tmp_path, ""))
    assert done.stdout.strip() == "liger-kernel is installed but does not work: RuntimeError: imported"


def test_list_and_torch_agree() -> None:
    done = python("from normcheck.cli import list as listed; print(listed.device_here())")
    assert done.stdout.strip() == ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = torch.version.cuda
    assert catalogue._toolkit_of_torch() == (None if cuda is None else int(cuda.partition(".")[0]))


@parametrize(
    ("text", "library", "device"),
    [
        ("cuda = '12.8'\n", driver_with(), "cuda"),
        ("cuda: Optional[str] = '13.0'\n", driver_with(count=8), "cuda"),
        ("cuda = '13.0'\n", driver_with(version=12080), "cpu"),  # the driver is older than torch's CUDA
        ("cuda = '12.8'\n", driver_with(version=12020), "cuda"),  # of one major version any will do
        ("cuda = '12.8'\n", driver_with(count=0), "cpu"),
        ("cuda = '12.8'\n", driver_with(init=100), "cpu"),  # CUDA_ERROR_NO_DEVICE: also where all are hidden
        ("cuda = '12.8'\n", "", "cpu"),  # no library
        ("cuda = '12.8'\n", "import ctypes; ctypes.CDLL = lambda name: object()\n", "cpu"),  # another library
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", driver_with(), "cpu"),
        ("something_else = 1\n", driver_with(), "cuda"),  # cannot be told
    ],
    inner=2,
)
def test_a_gpu_that_torch_could_use(text: str, library: str, device: str, tmp_path: Path) -> None:
    if not library:
        library = "import ctypes\ndef CDLL(name): raise OSError(name)\nctypes.CDLL = CDLL\n"
    code = f"{library}from normcheck.cli import list as listed; print(listed.device_here())"
    assert python(code, PYTHONPATH=torch_built(tmp_path, text)).stdout.strip() == device


def completed(*lines: str) -> list[list[str]]:
    """What bash is offered after each of these lines, all in one process."""
    code = f"""
import contextlib, io, json, os, sys
from normcheck.cli.app import main

sys.argv, found = ["normcheck"], []
for words in {lines!r}:
    count = str(len(words.split(" ")) - 1)
    os.environ |= {{"_NORMCHECK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    found.append(out.getvalue().split())
print(json.dumps(found))
"""
    done = python(code)
    assert done.stderr == ""
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_shell_completes_commands_options_and_their_values() -> None:
    command, options, ops, profiles = completed(
        "normcheck ver", "normcheck verify --kn", "normcheck verify --op rms", "normcheck verify --profile "
    )
    assert command == ["verify"]
    assert "--known-failures" in options
    assert ops == [op for op in OPS if op.startswith("rms")]
    assert profiles == ["quick", "ci", "deep", "soak"]


OFFERED = {
    "verify --device c": ["cpu", "cuda"],
    "audit --profile c": ["ci"],
    "audit --recipe triton": ["triton-tutorial"],
    "audit --regime la": ["late_rows"],
    "audit --cells ": ["every", "turns"],
    "audit --regime-cells ": ["one", "every"],
    "audit --report ": ["json:", "html:"],
    "bench --suite triton": ["triton-tutorial"],
    "bench --report p": ["png:"],
    "bench --dtype b": ["bf16"],
    "tolerances --output d": ["dx", "dresidual", "dgate", "dw", "db"],
    "tolerances --impl cudnn": ["cudnn", "cudnn_graph", "cudnn_ops"],
    "repro triton_tutorial_": ["triton_tutorial_no_barrier"],
}
"""What is typed after normcheck -> the values that are offered, of every option that names something."""


@pytest.mark.slow
def test_every_option_that_names_something_is_completed() -> None:
    found = completed(*(f"normcheck {words}" for words in OFFERED))
    assert dict(zip(OFFERED, found, strict=True)) == OFFERED


def test_completion_imports_no_torch() -> None:
    code = """
import sys
from normcheck.audit.options import AuditOptions
from normcheck.bench.options import BenchOptions
from normcheck.cli.options import offered
from normcheck.cli.tolerances import _outputs
from normcheck.gate.options import VerifyOptions
from normcheck.options import options_of
assert _outputs('')
for kind in (VerifyOptions, AuditOptions, BenchOptions):
    for option in options_of(kind).values():
        assert not option.names or offered(option)('')
print('torch' in sys.modules)
"""
    done = python(code)
    assert done.stdout.strip() == "False", done.stderr


def test_the_name_to_complete_is_normcheck_however_it_was_started() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "_NORMCHECK_COMPLETE": "complete_bash"}
    env |= {"COMP_WORDS": "normcheck ver", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "normcheck"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["verify"], done.stderr


def offers(name: str, incomplete: str) -> list[str]:
    return offered(options_of(VerifyOptions)[name])(incomplete)


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "triton_mine.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kernel.py").touch()
    assert offers("impl", "triton") == [
        "triton",
        "triton_token_int8",
        "triton_block128",
        "triton_sigmoid",
        "triton_before",
        "triton_max",
        "triton_mean",
        "triton_silu",
        "triton_interleaved",
        "triton_tutorial",
        "triton_tutorial_no_barrier",
        "triton_mine.py",
    ]
    assert offers("impl", "sub/k") == ["sub/kernel.py"]
    assert offers("dtype", "f") == ["fp16", "fp32"]
    assert offers("device", "c") == ["cpu", "cuda"]
    assert offers("report", "js") == ["json:"]
    assert offers("profile", "q") == ["quick"]
    assert offers("impl", "no/such/folder/") == []


def test_how_completion_is_installed_is_in_the_help() -> None:
    code = "import sys; sys.argv = ['normcheck', '--help']; from normcheck.cli.app import main; main()"
    assert "--install-completion" in python(code).stdout
