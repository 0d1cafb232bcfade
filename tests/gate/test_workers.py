"""How many cells are judged side by side: what fits the machine, and what a user says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from normcheck.audit.mutants.correct import CONTROLS
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate import engine, workers
from normcheck.gate.engine import THIS_MACHINE
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.workers import fitting, patience, workers_of
from tests.command_line import Cli

GIB = 1 << 30
H100, H200, SMALL = 79 * GIB, 139 * GIB, 23 * GIB


@pytest.mark.parametrize(
    ("cells", "cores", "free", "profile", "expected"),
    [
        (87, 16, [H200], "quick", 12),  # the two processes of a cell wait for the GPU as well
        (87, 16, [H100], "quick", 8),
        (87, 64, [H200], "quick", 12),
        (87, 32, [H200, H200], "quick", 24),
        (87, 64, [H200] * 8, "quick", 49),
        (300, 256, [H200] * 8, "quick", 96),
        (5, 64, [H200], "quick", 5),
        (87, 16, [SMALL], "quick", 2),
        (87, 16, [6 * GIB], "quick", 1),  # little memory, or much of it in use
        (87, 16, [0, H100], "quick", 8),
        (87, 1, [H200], "quick", 1),
        (87, 16, [H200], "ci", 3),
        (87, 16, [H100], "ci", 1),
        (87, 16, [H100], "deep", 1),
    ],
)
def test_what_fits(cells: int, cores: int, free: list[int], profile: str, expected: int) -> None:
    assert fitting(cells, cores, free, profile) == expected


def plan(cells: int, device: str = "cuda") -> Plan:
    cell = Cell(OPS["rmsnorm"], next(i for i in CONTROLS if i.op == "rmsnorm"), "fp16", "tests")
    return Plan((cell,) * cells, PROFILES["quick"], 0, device, 60.0)


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (H200, H200 + GIB))
    monkeypatch.setattr(workers, "cores_here", lambda: 16)


@pytest.mark.usefixtures("an_h200")
def test_the_default_fits_and_a_number_stays() -> None:
    default = VerifyOptions()
    assert workers_of(default, 87, "cuda") == 12
    assert workers_of(default, 87, "cpu") == 1
    assert workers_of(replace(default, isolation=False), 87, "cuda") == 1
    assert workers_of(default, 1, "cuda") == workers_of(default, 0, "cuda") == 1
    for number in (1, 3, 24):
        assert workers_of(replace(default, workers=number), 87, "cuda") == number
        assert workers_of(replace(default, workers=number), 87, "cpu") == number
    assert workers_of(replace(default, workers=24), 2, "cuda") == 2


def test_a_crowd_waits_longer_before_it_accuses() -> None:
    assert patience(8, cores=16) == patience(1, cores=16) == patience(1, cores=2) == 1.0
    assert patience(1, cores=1) == 2.0
    assert patience(24, cores=16) == 3.0


def test_the_judges_of_a_crowd_have_the_longer_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their plan has it; --timeout is that of a case which has the cores to itself."""
    given: list[Plan] = []

    def spread(work: Any, jobs: Any, **rest: Any) -> Iterator[tuple[int, Any]]:
        given.extend(plan for _, plan in jobs)
        yield from ()

    monkeypatch.setattr(engine, "spread", spread)
    monkeypatch.setattr(workers, "cores_here", lambda: 4)
    assert list(THIS_MACHINE.verdicts(plan(9, "cpu"), VerifyOptions(workers=6), lambda *_: None)) == []
    assert [each.timeout for each in given] == [180.0] * 9


def test_one_cell_needs_no_pool(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "spread", None)
    monkeypatch.setattr(
        engine, "verdict_of", lambda cell, plan, progress: engine.uncounted(cell, "cpu", "skip", detail="no")
    )
    one = ("verify", "--impl", "torch", "--op", "rmsnorm", "--device", "cpu", "--workers", "8", "--dtype")
    assert cli(*one, "fp16").out.count("NOTHING CHECKED  1 cell skipped") == 1
    with pytest.raises(TypeError):
        next(THIS_MACHINE.verdicts(plan(2, "cpu"), VerifyOptions(workers=2), lambda *_: None))
