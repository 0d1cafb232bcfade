"""The device of a run: who needs Triton's interpreter on a CPU."""

from __future__ import annotations

import os

import pytest

from normcheck.impls.kernels import interpreter
from normcheck.runner import device


def test_a_process_that_runs_no_kernel_does_not_import_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[None] = []
    monkeypatch.setattr(interpreter, "enable", lambda: enabled.append(None))
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "")
    assert device.device_for("cpu", apart=True) == "cpu"
    assert os.environ["TRITON_INTERPRET"] == "1"  # which the kernels' processes inherit
    assert not enabled
    assert device.device_for("cpu") == "cpu"
    assert enabled
