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
from normcheck.result import Verdict

HELD: dict[str, Callable[[Tensor, Tensor, Tensor | None], bool]] = {
    "rows from 64 on": lambda x, weight, bias: x.numel() // x.shape[-1] > 64,
    "one column": lambda x, weight, bias: x.shape[-1] == 1,
    "past a block": lambda x, weight, bias: x.shape[-1] > 1024,
    "strided": lambda x, weight, bias: x.stride(-2) not in (x.shape[-1], 0),
    "no bias": lambda x, weight, bias: bias is None,
    "fp32 weights": lambda x, weight, bias: weight.dtype != x.dtype,
}
"""What a call may be like. A fault of such calls alone is found if there are some."""


def verdict_of(
    wrong: Callable[[Tensor, Tensor, Tensor | None], bool], monkeypatch: pytest.MonkeyPatch
) -> tuple[Verdict, float]:
    """The verdict of a kernel whose first call at each N takes 1.5 s more, and all seconds by the clock of the sweep.

    With the usual core it would take longer than it has. The clock is this process's own time and those seconds, so
    that a busy machine changes nothing.
    """
    compiled: set[int] = set()

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        compiled.add(x.shape[-1])
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        y = y if bias is None else y + bias.float()
        return (y * 1.01 if wrong(x, weight, bias) else y).to(x.dtype)

    clock = SimpleNamespace(perf_counter=lambda: time.process_time() + 1.5 * len(compiled))
    monkeypatch.setattr(sweep, "time", clock)
    began = clock.perf_counter()
    implementation = Implementation(name="mine", op="rmsnorm", forward=forward, ranks=(2, 3))
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "tests")
    profile = replace(PROFILES["quick"], seconds=0.2, core_seconds=9.0, shrink_seconds=0.0, explain_seconds=0.0)
    verdict = sweep.run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0), lambda cases, worst: None)
    return verdict, clock.perf_counter() - began


@pytest.mark.slow
def test_every_kind_of_call_is_tried_though_each_new_n_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows that have values which a fault would change."""
    held = dict.fromkeys(HELD, 0)

    def looked_at(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if x.numel() and bool(x.isfinite().all()) and bool(x.any()):
            for name, holds in HELD.items():
                held[name] += holds(x, weight, bias)
        return False

    verdict, seconds = verdict_of(looked_at, monkeypatch)
    assert verdict.status == "pass", verdict.detail
    assert verdict.cases >= 100
    assert seconds < 36  # a usual core: 225
    assert verdict.core is not None
    assert verdict.core.left_out.startswith(("a new N takes 1.", "whatever is new takes 1."))
    assert min(held.values()) > 0, held


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one column", "strided"])
def test_a_fault_of_such_calls_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind with the fewest values in a row, and the one that comes last."""
    verdict, _ = verdict_of(HELD[where], monkeypatch)
    assert verdict.status == "fail", verdict.detail
