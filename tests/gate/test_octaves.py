"""A fault of one class of sizes alone is found by default, whatever the seed: each octave of N with several rows, and
rows past 32768."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from normcheck.impls.kernels import interpreter

if not torch.cuda.is_available():
    interpreter.enable()

from normcheck.cases.axes import OCTAVES, octave_of
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate import sweep
from normcheck.gate.plan import PROFILES, Plan, planner_of
from normcheck.impls.implementation import Implementation
from normcheck.planner.own import RUNS
from normcheck.result import Verdict
from tests.case_lines import case_of
from tests.command_line import Cli
from tests.quality.octave_kernels import LONG, of_torch, of_triton

QUICK = replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0)
DTYPES = ("fp16", "bf16", "fp32")
GOT_PAST = Path(__file__).parents[1] / "quality" / "got_past"


def verdict_of(implementation: Implementation, dtype: str, seed: int) -> Verdict:
    cell = Cell(OPS["rmsnorm"], implementation, dtype, "tests")
    plan = Plan((cell,), QUICK, seed, "cpu", 120.0)
    return sweep.run_cell(cell, plan, lambda cases, worst: None, with_coverage=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_an_octave_with_several_rows_is_asked_of_a_torch_kernel(seed: int) -> None:
    """Three octaves for each seed; ``cases/test_core`` counts such rows of every octave, for a seed of each op."""
    octaves = sorted({high for high, _ in OCTAVES if high > 1})
    assert LONG in octaves
    for number, octave in enumerate(octaves):
        if (number + seed) % 5:
            continue
        verdict = verdict_of(of_torch(octave), DTYPES[(seed + number) % 3], seed)
        assert verdict.status == "fail", (octave, verdict.dtype)
        assert verdict.failure is not None and verdict.failed_at is not None
        case = case_of(verdict.failure.case)
        assert case.N > LONG if octave == LONG else octave_of(case.N)[0] == octave and case.M > 1
        assert verdict.failed_at < 200, (octave, verdict.dtype)


@pytest.mark.slow
def test_it_is_asked_where_rows_are_dear() -> None:
    """As of an interpreted kernel, each of whose rows takes 5 ms: in its core, or in what a pass needs of that."""
    cell = Cell(OPS["rmsnorm"], of_torch(LONG), "bf16", "tests")
    core, asked = planner_of(cell, Plan((cell,), QUICK, 1, "cpu", 120.0)), set[int]()
    while (step := core.next()) is not None:
        case = step.planned.case
        asked |= {octave_of(case.N)[0]} if case.M > 1 else set()
        core.saw(step, refused=False, seconds=RUNS[step.planned.probe] * (0.02 + 5e-3 * case.M))
    assert asked >= {high for high, _ in OCTAVES if 1 < high < LONG}


@pytest.mark.slow
@pytest.mark.parametrize(("octave", "seed"), [(64, 3), (LONG, 0)])
def test_so_it_is_of_an_interpreted_kernel(octave: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of this process: on a busy machine its rows are no dearer."""
    monkeypatch.setattr(sweep, "time", SimpleNamespace(perf_counter=time.process_time))
    verdict = verdict_of(of_triton(octave), DTYPES[seed % 3], seed)
    assert verdict.status == "fail"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("w22_long_rows", "fp16"), ("w03_two_rows", "fp32")])
def test_what_had_got_past_is_found_in_sixty_cases(
    name: str, dtype: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By turns: sizes do not depend on a dtype, and interpreted cases of fp16 take three times as long."""
    monkeypatch.setitem(PROFILES, "quick", QUICK)
    done = cli("verify", "--impl", str(GOT_PAST / f"{name}.py"), "--dtype", dtype, "--max-examples", "60")
    assert done.code == 1, done.out + done.err


@pytest.mark.slow
def test_the_mended_twin_is_not_accused(cli: Cli) -> None:
    few = ("--max-examples", "25", "--time-budget", "0.1", "--allow-thin", "--no-contexts")
    done = cli("verify", "--impl", str(GOT_PAST / "w03_ok.py"), "--dtype", "fp16", *few)
    assert "0 failed" in done.out, done.out + done.err
