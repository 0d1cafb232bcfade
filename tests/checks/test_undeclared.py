"""What a declaration buys: the ratios without it, from the case to the report."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from normcheck import Implementation
from normcheck.audit.mutants.correct import rmsnorm
from normcheck.audit.mutants.kernel import CLEAN, Kernel
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.shards import merged
from normcheck.gate.sweep import run_cell
from normcheck.impls.adapt import adapt
from normcheck.reports._cells import columns_of, put_cell
from normcheck.result import SweepResult, Verdict
from tests.sample_runs import verdict, worst

CASE = Case(op="layernorm", dtype="fp32", M=6, N=24, seed=2, rows="offset", eps=1e-5)
ROUGH = Kernel(rstd=lambda c: CLEAN.rstd(c) * (1 + 12 * 2.0**-23))
"""A root that is 12 ulp off."""
FOLDED = Kernel(preact=lambda c: c.x * (c.r * c.g) + ((0 if c.b is None else c.b) - c.m * (c.r * c.g)))


def result_of(implementation: Implementation, case: Case = CASE) -> Result:
    return check(implementation, OPS[implementation.op], case, "cpu", UNPROBED)


def declaring(kernel: Kernel, **model: Any) -> Implementation:
    return kernel.implementation("mine", "layernorm", model=model)


def ratios(result: Result) -> dict[str, float]:
    found: dict[str, float] = {}
    for checked in result.undeclared:
        found[checked.output] = max(found.get(checked.output, 0.0), checked.comparison.ratio)
    return found


def test_nothing_is_judged_twice_where_nothing_is_widened() -> None:
    for model in ({}, {"chain": 32, "variance": "two_pass"}, {"rsqrt_ulp": 2, "reason": "CUDA's rsqrtf"}):
        assert result_of(declaring(CLEAN, **model)).undeclared == ()


def test_a_rough_root_beyond_the_undeclared_bound() -> None:
    case = replace(CASE, N=3, rows="normal")
    declared = result_of(declaring(ROUGH, rsqrt_ulp=16), case)
    assert not declared.failed
    found = ratios(declared)
    assert set(found) == {"mean", "rstd", "y", "dx", "dw", "db"}
    assert found["rstd"] > 1 > found["db"]
    undeclared = result_of(declaring(ROUGH), case)
    assert found == pytest.approx({c.output: max(o.comparison.ratio for o in undeclared.checked if o.output == c.output)
                                   for c in undeclared.checked})  # fmt: skip


def test_a_folded_y_beyond_the_undeclared_bound() -> None:
    found = ratios(result_of(declaring(FOLDED, y_form="folded")))
    assert found["y"] > 1 > found["rstd"]


def test_a_check_that_is_declared_away_is_made_all_the_same() -> None:
    saves_other = Kernel(rstd_out=lambda c: c.r.float() * (1 + 2.0**-21))
    declared = result_of(declaring(saves_other, y_given_stats=False), replace(CASE, N=1100, rows="normal"))
    assert not declared.failed
    assert ratios(declared)["y"] > 1


def test_gradients_by_autograd() -> None:
    mine = Implementation(name="mine", op="rmsnorm", forward=adapt(rmsnorm)[0], model={"rsqrt_ulp": 16})
    result = result_of(mine, replace(CASE, op="rmsnorm", bias=False))
    assert set(ratios(result)) == {"y", "dx", "dw"}
    assert max(ratios(result).values()) <= 1


def verdict_of(implementation: Implementation) -> Verdict:
    cell = Cell(OPS[implementation.op], implementation, "fp32", "tests")
    profile = replace(PROFILES["quick"], max_examples=22, seconds=600.0, large_share=0.0)
    torch.set_num_threads(1)
    return run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0), lambda *_: None)


def line_of(found: Verdict) -> str:
    stream = io.StringIO()
    put_cell(Console(file=stream, width=400), found, columns_of([], 20))
    return stream.getvalue()


@pytest.mark.slow
def test_a_cell_tells_what_its_declaration_buys() -> None:
    rough, needless = verdict_of(declaring(ROUGH, rsqrt_ulp=16)), verdict_of(declaring(CLEAN, rsqrt_ulp=16))
    assert rough.status == needless.status == "thin"  # so few cases are no core
    assert rough.undeclared["rstd"].ratio > 1
    assert "declares rsqrt_ulp=16: rstd up to " in line_of(rough)
    assert " of the undeclared bound" in line_of(rough)
    assert "declares rsqrt_ulp=16: needless here, " in line_of(needless)
    assert verdict_of(declaring(CLEAN, chain=128)).undeclared == {}


def test_the_worst_of_all_shards_is_kept() -> None:
    def shard(number: int, ratio: float) -> tuple[str, SweepResult]:
        cell = verdict(undeclared={"y": worst(ratio), f"only{number}": worst(0.5)})
        run = SweepResult(
            argv=(),
            seed=0,
            profile="quick",
            seconds=1.0,
            environment={},
            verdicts=(cell,),
            status="pass",
            exit_code=0,
            shard=f"{number}/2",
        )
        return f"{number}.json", run

    (cell,) = merged([shard(1, 2.0), shard(2, 3.0)]).verdicts
    assert {name: w.ratio for name, w in cell.undeclared.items()} == {"y": 3.0, "only1": 0.5, "only2": 0.5}
