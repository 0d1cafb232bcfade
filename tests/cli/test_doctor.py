"""``normcheck doctor``: what it says of this machine, of broken ones, and that it never ends in a traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck.cli import doctor
from normcheck.cli.remedies import step_for
from normcheck.errors import Broken
from normcheck.impls import discovery
from normcheck.isolation.sandbox import Reach
from normcheck.runner import nvidia_driver
from tests.some import some

ROOT = Path(doctor.__file__).parents[1]


def examined(interpret: str = "") -> tuple[int, str]:
    stream = io.StringIO()
    return doctor.examine(stream, interpret), stream.getvalue()


def test_this_machine_can_verify() -> None:
    code, text = examined()
    assert code == 0
    assert torch.__version__ in text
    assert "isolation            works: a worker was started" in text
    assert text.rstrip().endswith("Next: normcheck verify")
    for name in discovery.implementations():
        assert f"\n  {name} " in text


def test_what_does_not_run_has_a_next_step() -> None:
    lines = examined()[1].splitlines()
    reasons = [number for number, line in enumerate(lines) if "cuDNN needs an NVIDIA GPU" in line]
    if not torch.cuda.is_available():
        assert reasons
    for number in reasons:
        assert "-> run it on a machine with an NVIDIA GPU" in lines[number + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_reason_of_a_known_implementation_has_a_step_of_its_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing at all is installed; no reason is answered with a link alone."""
    for nothing in (False, True):
        if nothing:
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
            for module in ("_optional", "triton"):
                monkeypatch.setattr(f"normcheck.impls.{module}.find_spec", lambda name: None)
        for found in some(discovery.implementations().values()):
            for implementation in some(found):
                reason = implementation.unavailable(device) if implementation.unavailable else None
                if reason:
                    assert not step_for(reason, "LINK").startswith("see "), reason


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("apex is not installed", "install it: LINK"),
        ("triton is not installed", "pip install triton"),
        ("apex is installed but does not work: OSError: libcudart", "install it again"),
        ("cuDNN 9.0.0 is installed; rmsnorm needs 9.1.0 or newer", "newer"),
        ("only on Sundays", "see LINK"),
    ],
)
def test_steps(reason: str, step: str) -> None:
    assert step in step_for(reason, "LINK")


def test_without_isolation_it_says_so_and_still_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise Broken("crash", "", "its process was ended by SIGKILL")

    monkeypatch.setattr("normcheck.isolation.select.select_apart", broken)
    code, text = examined()
    assert code == 0
    assert "isolation            does not work: Broken: its process was ended by SIGKILL" in text
    assert "in this process      works: torch's rmsnorm was judged" in text


@pytest.mark.parametrize("loose", [True, False])
def test_what_the_sandbox_holds(monkeypatch: pytest.MonkeyPatch, loose: bool) -> None:
    """As a worker finds by trying: what is not held is said, and what to do about it."""
    found = Reach(**dict.fromkeys(Reach.__dataclass_fields__, loose))
    monkeypatch.setattr("normcheck.isolation.select.reach", lambda file: found)
    facts = doctor.sandbox()
    assert [fact.name for fact in facts] == list(Reach.__dataclass_fields__)
    assert {fact.value.startswith("not held: ") for fact in facts} == {loose}
    assert any(fact.step for fact in facts) == loose


def test_a_sandbox_that_does_not_work_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: str) -> Any:
        raise Broken("crash", "", "its process was ended by SIGSYS")

    monkeypatch.setattr("normcheck.isolation.select.reach", broken)
    (fact,) = doctor.sandbox()
    assert "its process was ended by SIGSYS" in fact.value
    assert "--no-sandbox" in fact.step


def test_a_judge_that_accuses_torch_verifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normcheck.checks.check.Result.failed", True)
    code, text = examined()
    assert code == 5
    assert "torch's own rmsnorm is found wrong" in text
    assert text.rstrip().splitlines()[-1].startswith("Nothing can be verified here. Next: ")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "triton", "numpy"])
def test_a_package_that_does_not_import(module: str, tmp_path: Path) -> None:
    """Whatever is broken is an answer, and nothing else is printed."""
    (tmp_path / f"{module}.py").write_text("raise OSError('libbroken.so: cannot open\\nshared object')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "normcheck", "doctor"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 5, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "libbroken.so: cannot open shared object" in done.stdout
    assert "Nothing can be verified here" in done.stdout


@pytest.mark.parametrize(
    ("given", "device", "trouble", "value", "step"),
    [
        ("", "cpu", "", "interpreted on the CPU", ""),
        ("", "cuda", "", "compiled for the GPU", ""),
        ("1", "cuda", "", "in spite of the GPU", "unset TRITON_INTERPRET"),
        ("0", "cuda", "", "compiled for the GPU", ""),
        ("", "cpu", "triton=9: use 3.6 to 3.9", "use 3.6 to 3.9", "make this work"),
    ],
)
def test_interpretation(given: str, device: str, trouble: str, value: str, step: str) -> None:
    (fact,) = doctor.interpretation(given, device, trouble)
    assert value in fact.value
    assert (step in fact.step) if step else not fact.step


def test_the_driver_from_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_driver, "PROC", tmp_path)
    assert (nvidia_driver.version(), nvidia_driver.gpus()) == ("", ())
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n")
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 18\n")
    assert (nvidia_driver.version(), nvidia_driver.gpus()) == ("570.86.15", ("NVIDIA H200",))


def test_a_worker_gives_way_while_it_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *arguments: called.append((name, arguments[-1])) or 0

    monkeypatch.setattr(nvidia_driver.ctypes, "CDLL", Driver)
    nvidia_driver.wait_yielding()
    assert [name for name, _ in called] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxSetFlags"]
    assert called[-1] == ("cuDevicePrimaryCtxSetFlags", 2)  # CU_CTX_SCHED_YIELD

    def none(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nvidia_driver.ctypes, "CDLL", none)
    nvidia_driver.wait_yielding()  # no driver: nothing to wait for


@pytest.mark.parametrize(
    ("built", "hidden", "step"),
    [
        (None, None, "build of torch for CUDA"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES="),
        ("13.0", None, "update the driver"),
    ],
)
def test_a_gpu_that_torch_does_not_see(
    built: str | None, hidden: str | None, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_driver, "present", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (fact,) = (fact for fact in doctor.gpu() if fact.name == "seen by torch")
    assert fact.value == "no GPU"
    assert step in fact.step
