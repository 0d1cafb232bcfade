"""How many cells are judged side by side: what fits the machine, and what a user says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from normcheck.audit.mutants.correct import CONTROLS
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError
from normcheck.gate import engine, workers
from normcheck.gate.engine import THIS_MACHINE, Cost
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.workers import fitting, likely_cells, patience, workers_of
from normcheck.impls import discovery
from tests.command_line import Cli

GIB = 1 << 30
H100, H200, SMALL = 79 * GIB, 139 * GIB, 23 * GIB


@pytest.mark.parametrize(
    ("cells", "cores", "free", "profile", "expected"),
    [
        (87, 16, [H200], "quick", 15),  # the two processes of a cell wait for the GPU as well
        (87, 16, [H100], "quick", 8),
        (87, 64, [H200], "quick", 15),
        (87, 32, [H200, H200], "quick", 30),
        (87, 64, [H200] * 8, "quick", 60),
        (300, 256, [H200] * 8, "quick", 120),
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
    assert workers_of(default, 87, "cuda") == 15
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


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        (VerifyOptions(impl=("mine.py",), op=("rmsnorm",), dtype=("fp16",)), 1),
        (VerifyOptions(impl=("mine.py",)), 3),
        (VerifyOptions(impl=("mine.py", "theirs.py"), op=("rmsnorm", "layernorm")), 12),
        (VerifyOptions(impl=("torch_native",), op=("rmsnorm",)), 3),
        (VerifyOptions(impl=("torch_native", "mine.py"), dtype=("bf16", "bf16")), 3),
    ],
)
def test_how_many_cells_there_will_be(options: VerifyOptions, cells: int) -> None:
    assert likely_cells(options, "cuda") == cells


def test_of_a_default_run_that_is_known() -> None:
    known = discovery.implementations()
    expected = 3 * sum(i.op in ops for name, ops in discovery.by_default("cuda").items() for i in known[name])
    assert likely_cells(VerifyOptions(), "cuda") == expected > 100


class Begun:
    """In place of a pool: what became of it."""

    made: ClassVar[list[Begun]] = []

    def __init__(self, workers: int, *_: object) -> None:
        self.workers, self.words = workers, list[str]()
        Begun.made.append(self)

    def begin(self) -> None:
        self.words.append("begun")

    def end(self) -> None:
        self.words.append("ended")


@pytest.mark.parametrize(("cells", "words"), [(2, ["begun"]), (3, ["begun", "ended"]), (1, ["begun", "ended"])])
def test_processes_that_judge_begin_while_the_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, cells: int, words: list[str]
) -> None:
    """They are used if it then has as many cells. What fits is not asked again: they have taken of the GPU's memory."""
    used: list[object] = []

    def spread(work: Any, jobs: Any, *, begun: object, first: object, **rest: Any) -> Iterator[tuple[int, Any]]:
        assert first is not None  # a root of its kernels' processes
        used.append(begun)
        yield from ()

    monkeypatch.setattr(Begun, "made", [])
    monkeypatch.setattr(engine, "Pool", Begun)
    monkeypatch.setattr(engine, "spread", spread)
    monkeypatch.setattr(engine, "verdict_of", lambda *_: None)
    monkeypatch.setattr(engine, "prepared", lambda options: plan(cells, "cpu"))
    options = VerifyOptions(impl=("mine.py",), op=("rmsnorm",), dtype=("fp16", "bf16"), workers=9, device="cpu")
    here = engine.ThisMachine()
    list(here.verdicts(here.planned(options), options, lambda *_: None))
    (begun,) = Begun.made
    assert (begun.workers, begun.words) == (2, words)
    assert used == {1: [], 2: [begun], 3: [None]}[cells]


def test_they_end_with_the_next_plan_if_theirs_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Begun, "made", [])
    monkeypatch.setattr(engine, "Pool", Begun)
    monkeypatch.setattr(engine, "prepared", lambda options: plan(3, "cpu"))
    here = engine.ThisMachine()
    for _ in range(2):
        here.planned(VerifyOptions(impl=("mine.py",), workers=9, device="cpu"))
    assert [one.words for one in Begun.made] == [["begun", "ended"], ["begun"]]


def test_they_end_if_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(options: VerifyOptions) -> Plan:
        raise UsageError("impl=mine.py: expected a file")

    monkeypatch.setattr(Begun, "made", [])
    monkeypatch.setattr(engine, "Pool", Begun)
    monkeypatch.setattr(engine, "prepared", wrong)
    with pytest.raises(UsageError):
        engine.ThisMachine().planned(VerifyOptions(impl=("mine.py",), workers=9, device="cpu"))
    assert [one.words for one in Begun.made] == [["begun", "ended"]]


@pytest.mark.parametrize(("cells", "share"), [(1.0, 1.0), (7.5, 1.0), (8.0, 120 / 8 / 16), (50.0, 0.8)])
def test_cells_that_follow_each_other_share_their_time(cells: float, share: float) -> None:
    """A short core has less, and no other; what is asked of it stays."""
    short = PROFILES["quick"].short
    assert short.in_turn(cells) == replace(short, share=pytest.approx(share))
    assert PROFILES["ci"].short.in_turn(cells) == PROFILES["ci"].short


def test_a_run_begins_with_what_builds_nothing() -> None:
    """While everything starts, a cell that compiles would have less of its time; then the longest come first."""
    by_name = {name: i for name, (i, *_) in discovery.implementations().items()}
    torch_cell, triton_cell = (Cell(OPS[by_name[n].op], by_name[n], "fp16", n) for n in ("torch", "triton"))
    cost = Cost(plan(2))
    assert cost.of(triton_cell) < cost.of(torch_cell) == math.inf
    cost.add(replace(engine.uncounted(torch_cell, "cuda", "pass"), seconds=9.0))
    assert cost.of(torch_cell) == 9.0 and cost.of(triton_cell) == math.inf
