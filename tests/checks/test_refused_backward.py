"""A backward that its library refuses: the forward is checked all the same, and what was not checked is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import normcheck
from normcheck import Implementation, UnsupportedCase
from normcheck.gate.decision import Terms, decide
from normcheck.gate.shards import merged
from normcheck.gate.tally import NO_BACKWARD
from normcheck.oracle.special import LEAVES_ROW
from normcheck.reports.json import REPORT
from normcheck.reports.json_reader import read
from normcheck.result import Verdict
from tests.sample_runs import run, verdict

FEW: dict[str, Any] = {"max_examples": 24, "device": "cpu", "dtypes": "fp16"}
WHY = "no engine for this graph"


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * rstd * weight.float()
    return {"y": (y if bias is None else y + bias.float()).to(x.dtype), "rstd": rstd}


def right(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, saved: dict[str, Tensor], *, eps: float
) -> dict[str, Tensor]:
    xhat, wdy = x.float() * saved["rstd"], dy.float() * weight.float()
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * saved["rstd"]
    gradients = {"dx": dx.to(x.dtype), "dw": (dy.float() * xhat).sum(0).to(weight.dtype)}
    return gradients if bias is None else {**gradients, "db": dy.float().sum(0).to(bias.dtype)}


def refusing(when: Any) -> Implementation:
    """Refuses a backward ``when(number of its call, x)``."""
    calls = iter(range(10**6))

    def backward(dy: Tensor, x: Tensor, *others: Any, eps: float) -> dict[str, Tensor]:
        if when(next(calls), x):
            raise UnsupportedCase(WHY)
        return right(dy, x, *others, eps=eps)

    return Implementation(name="mine", op="rmsnorm", forward=forward, backward=backward)


def checked(implementation: Implementation) -> Verdict:
    (cell,) = normcheck.verify(implementation, **FEW)
    return cell


@pytest.mark.slow
def test_always_refused_is_no_finding_but_is_said_and_does_not_conform() -> None:
    implementation = refusing(lambda call, x: True)
    cell = checked(implementation)
    assert (cell.status, cell.cases, cell.no_backward) == ("thin", 24, True), cell.detail
    assert cell.backward_refused == {WHY: 24}
    assert cell.not_returned == ("dx", "dw", "db")
    assert cell.repeats["y"].cases > 0
    assert cell.notes == (LEAVES_ROW, f"{NO_BACKWARD}: {WHY} (24 cases)")
    with pytest.raises(AssertionError, match=f"required mine did not run rmsnorm fp16: {NO_BACKWARD}"):
        normcheck.assert_conforms(implementation, **FEW, allow_thin=True)


@pytest.mark.slow
def test_refused_for_some_rows_only() -> None:
    implementation = refusing(lambda call, x: x.shape[0] in (1, 3))
    cell = checked(implementation)
    count = cell.backward_refused[WHY]
    assert (cell.status, cell.no_backward, "dx" in cell.worst) == ("thin", False, True), cell.detail
    assert 0 < count < 24
    assert cell.notes == (LEAVES_ROW, f"gradients not checked where it was refused: {WHY} ({count} cases)")
    normcheck.assert_conforms(implementation, **FEW, allow_thin=True)


@pytest.mark.slow
def test_refused_the_second_time_only() -> None:
    cell = checked(refusing(lambda call, x: call == 2))
    assert cell.failure is not None
    assert (cell.failure.kind, WHY in cell.failure.message) == ("not_repeatable", True)


def test_what_is_required_has_a_backward_that_ran() -> None:
    cell = verdict(backward_refused={WHY: 200}, worst={"y": verdict().worst["y"]})
    required = Terms(required=(cell.implementation,))
    _, code, messages = decide([cell], required)
    assert (code, messages) == (
        5,
        (f"required triton did not run rmsnorm bf16: {NO_BACKWARD}: {WHY} (200 cases)",),
    )
    assert decide([cell], Terms())[1] == 0
    assert decide([cell], replace(required, shard=True))[1] == 0
    other = replace(cell, dtype="fp32", backward_refused={})  # as for an op that ran in one dtype: that is enough,
    assert decide([cell, other], required)[1] == 0  # where no dtype was asked for by name
    assert decide([cell, other], replace(required, dtypes=("bf16",)))[1] == 5
    assert decide([replace(cell, cases=201)], required)[1] == 0


def test_it_survives_a_report_and_adds_up_over_shards(tmp_path: Path) -> None:
    note = f"{NO_BACKWARD}: {WHY} (200 cases)"
    parts = verdict(backward_refused={WHY: 200}, notes=(note,)), verdict(backward_refused={WHY: 5})
    runs = [run(part, shard=f"{number}/2") for number, part in enumerate(parts, 1)]
    with (tmp_path / "1.json").open("w", encoding="utf-8") as stream:
        REPORT.write(runs[0], stream)
    assert read(str(tmp_path / "1.json")) == runs[0]
    assert json.loads((tmp_path / "1.json").read_text(encoding="utf-8"))["verdicts"][0]["backward_refused"] == {
        WHY: 200
    }
    (cell,) = merged([("1", runs[0]), ("2", runs[1])]).verdicts
    assert (cell.backward_refused, cell.no_backward) == ({WHY: 205}, False)
    assert cell.notes == (f"gradients not checked where it was refused: {WHY} (205 cases)",)
