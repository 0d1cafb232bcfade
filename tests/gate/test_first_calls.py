"""A fault of a kernel that compiles for each new N is found in the time of a cell."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate import sweep
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.implementation import Implementation

WRONG: dict[str, Callable[[Tensor, Tensor, Tensor | None], bool]] = {
    "rows from 64 on": lambda x, weight, bias: x.numel() // x.shape[-1] > 64,
    "one column": lambda x, weight, bias: x.shape[-1] == 1,
    "past a block": lambda x, weight, bias: x.shape[-1] > 1024,
    "strided": lambda x, weight, bias: x.stride(-2) not in (x.shape[-1], 0),
    "no bias": lambda x, weight, bias: bias is None,
    "fp32 weights": lambda x, weight, bias: weight.dtype != x.dtype,
    "": lambda x, weight, bias: False,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_fault_is_found_though_each_new_n_is_compiled(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose first call at each N takes 1.5 s more: with the usual core it would take longer than it has.

    The clock of the sweep is this process's own time and those seconds, so that a busy machine changes nothing.
    """
    compiled: set[int] = set()

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        compiled.add(x.shape[-1])
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        y = y if bias is None else y + bias.float()
        return (y * 1.01 if WRONG[wrong](x, weight, bias) else y).to(x.dtype)

    clock = SimpleNamespace(perf_counter=lambda: time.process_time() + 1.5 * len(compiled))
    monkeypatch.setattr(sweep, "time", clock)
    began = clock.perf_counter()
    implementation = Implementation(name="mine", op="rmsnorm", forward=forward, ranks=(2, 3))
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "tests")
    profile = replace(PROFILES["quick"], seconds=0.2, core_seconds=9.0, shrink_seconds=0.0, explain_seconds=0.0)
    verdict = sweep.run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0), lambda cases, worst: None)
    if wrong:
        assert verdict.status == "fail", verdict.detail
        return
    assert verdict.status == "pass", verdict.detail
    assert verdict.cases >= 100
    assert clock.perf_counter() - began < 36  # a usual core: 225
    assert verdict.core is not None
    assert verdict.core.left_out.startswith(("a new N takes 1.", "whatever is new takes 1."))
