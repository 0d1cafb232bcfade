"""How many cells are judged side by side: what fits the machine, and what a user says."""

from __future__ import annotations

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
from normcheck.gate.engine import Order, ThisMachine
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.prepare import selected
from normcheck.gate.workers import fitting, likely_cells, patience, workers_of
from normcheck.impls import discovery
from normcheck.result import Verdict
from tests.command_line import Cli

GIB = 1 << 30
H100, H200, SMALL = 79 * GIB, 139 * GIB, 23 * GIB


@pytest.mark.parametrize(
    ("cells", "cores", "free", "profile", "expected"),
    [
        (87, 16, [H200], "quick", 16),  # the two processes of a cell wait for the GPU as well
        (87, 16, [H100], "quick", 9),
        (87, 64, [H200], "quick", 16),
        (87, 32, [H200, H200], "quick", 32),
        (87, 64, [H200] * 8, "quick", 64),
        (300, 256, [H200] * 8, "quick", 128),
        (5, 64, [H200], "quick", 5),
        (87, 16, [SMALL], "quick", 2),
        (87, 16, [6 * GIB], "quick", 1),  # little memory, or much of it in use
        (87, 16, [0, H100], "quick", 9),
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
    monkeypatch.setattr(workers, "memory_bytes", lambda device: 128 * GIB)


@pytest.mark.usefixtures("an_h200")
def test_the_default_fits_and_a_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    default = VerifyOptions()
    assert workers_of(default, 87, "cuda") == 16
    assert workers_of(default, 87, "cpu") == 8
    monkeypatch.setattr(workers, "memory_bytes", lambda device: 13 * GIB)
    assert workers_of(default, 87, "cpu") == 3
    monkeypatch.setattr(workers, "cores_here", lambda: 2)
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
    assert list(ThisMachine().verdicts(plan(9, "cpu"), VerifyOptions(workers=6), lambda *_: None)) == []
    assert [each.timeout for each in given] == [180.0] * 9


@pytest.mark.slow
def test_one_cell_needs_no_pool(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "spread", None)
    monkeypatch.setattr(
        engine, "verdict_of", lambda cell, plan, progress: engine.uncounted(cell, "cpu", "skip", detail="no")
    )
    one = ("verify", "--impl", "torch", "--op", "rmsnorm", "--device", "cpu", "--workers", "8", "--dtype")
    assert cli(*one, "fp16").out.count("NOTHING CHECKED  1 cell skipped") == 1
    with pytest.raises(TypeError):
        next(ThisMachine().verdicts(plan(2, "cpu"), VerifyOptions(workers=2), lambda *_: None))


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
    with ThisMachine() as here:
        list(here.verdicts(here.planned(options), options, lambda *_: None))
    (begun,) = Begun.made
    assert (begun.workers, begun.words) == (2, words)
    assert used == {1: [], 2: [begun], 3: [None]}[cells]


def test_they_end_with_their_machine_if_their_plan_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Begun, "made", [])
    monkeypatch.setattr(engine, "Pool", Begun)
    monkeypatch.setattr(engine, "prepared", lambda options: plan(3, "cpu"))
    with ThisMachine() as here:
        here.planned(VerifyOptions(impl=("mine.py",), workers=9, device="cpu"))
        assert [one.words for one in Begun.made] == [["begun"]]
    assert [one.words for one in Begun.made] == [["begun", "ended"]]


def test_they_end_if_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(options: VerifyOptions) -> Plan:
        raise UsageError("impl=mine.py: expected a file")

    monkeypatch.setattr(Begun, "made", [])
    monkeypatch.setattr(engine, "Pool", Begun)
    monkeypatch.setattr(engine, "prepared", wrong)
    with pytest.raises(UsageError), ThisMachine() as here:
        here.planned(VerifyOptions(impl=("mine.py",), workers=9, device="cpu"))
    assert [one.words for one in Begun.made] == [["begun", "ended"]]


@pytest.mark.parametrize(("cells", "share"), [(1.0, 1.0), (6.0, 1.0), (7.0, 101 / 7 / 16), (50.0, 0.8)])
def test_cells_that_follow_each_other_share_their_time(cells: float, share: float) -> None:
    """A short core has less, and no other; what is asked of it stays."""
    dear = PROFILES["quick"].dear
    assert dear.in_turn(cells) == replace(dear, share=pytest.approx(share))
    assert PROFILES["ci"].dear.in_turn(cells) == PROFILES["ci"].dear


@pytest.mark.slow
def test_a_process_says_whether_what_it_has_builds() -> None:
    for name, builds in (("torch_native", False), ("torch_compile", True)):
        (one,) = selected(name, ("rmsnorm",), "cpu", 60.0, isolation=True)
        assert one.builds is builds


def cells_of(*names: str, dtypes: tuple[str, ...] = ("fp16",), ops: tuple[str, ...] = ("layernorm",)) -> list[Cell]:
    known = discovery.implementations()
    return [
        Cell(OPS[op], next(i for i in known[name] if i.op == op), dtype, name)
        for name in names
        for op in ops
        for dtype in dtypes
    ]


def ended(cell: Cell, seconds: float) -> Verdict:
    return replace(engine.uncounted(cell, "cuda", "pass"), seconds=seconds)


def order_of(cells: list[Cell], **seconds: float) -> Order:
    """That of a plan of these, of whose implementations one has taken so many seconds."""
    order = Order(replace(plan(1), cells=tuple(cells)))
    for name, taken in seconds.items():
        order.add(ended(next(cell for cell in cells if cell.implementation.name == name), taken))
    return order


def chosen(order: Order, waiting: list[Cell], running: list[Cell]) -> str:
    return waiting[order.next(waiting, running)].implementation.name


def test_a_run_begins_with_what_builds_nothing() -> None:
    """While everything starts, a cell that compiles would have less of its time."""
    cells = cells_of("triton", "cudnn", "torch", dtypes=("fp16", "bf16"))
    assert chosen(order_of(cells), cells, []) == "torch"
    assert chosen(order_of(cells), cells[:-1], cells[-1:]) == "torch"
    assert chosen(order_of(cells, torch=9.0), cells, []) == "triton"


def test_cells_of_one_implementation_stand_beside_others() -> None:
    """Of 18, of which two thirds compile: else all of these would do so at the same time."""
    cells = cells_of("triton", "liger", "torch", dtypes=("fp16", "bf16", "fp32"), ops=("layernorm", "rmsnorm"))
    triton, liger, torch_ = cells[:6], cells[6:12], cells[12:]
    order = order_of(cells, torch=9.0, triton=16.0, liger=16.0)
    assert chosen(order, triton[2:] + liger + torch_, triton[:2]) == "liger"
    assert chosen(order, triton[2:] + liger[2:] + torch_, triton[:2] + liger[:2]) == "torch"
    assert chosen(order, triton[2:] + liger[2:] + torch_[2:], torch_[:1] + triton[:2] + liger[:2]) == "torch"


def test_of_whom_there_are_many_more_run() -> None:
    """Three of twelve beside one of two: a fourth part is less than half."""
    dtypes = ("fp16", "bf16", "fp32")
    ops = ("layernorm", "rmsnorm", "layernorm_zero_centered", "layernorm_relu_bitmask")
    many, (one, other) = cells_of("triton", ops=ops, dtypes=dtypes), cells_of("liger", ops=ops[:2])
    order = order_of([*many, one, other], triton=16.0, liger=16.0)
    running = [many[0], many[3], many[6], one]
    assert chosen(order, [cell for cell in (*many, other) if cell not in running], running) == "triton"


def test_cells_of_one_op_come_one_after_the_other() -> None:
    """What the first of them compiles, and dtypes share, the next finds on disk."""
    cells = cells_of("triton", dtypes=("fp16", "bf16", "fp32"), ops=("layernorm", "rmsnorm"))
    place = order_of(cells, triton=16.0).next(cells[1:], cells[:1])
    assert cells[1:][place].op.name == "rmsnorm"


def test_the_last_ones_end_together() -> None:
    """At the end the longest begin first, as the latest of their kind show: the first met the start of all."""
    cells = cells_of("torch", "triton", dtypes=("fp16", "bf16"))
    order = order_of(cells, torch=19.0, triton=16.0)
    assert chosen(order, cells, cells[:3]) == "torch"
    order.add(ended(cells[0], 9.0))
    assert chosen(order, cells, cells[:3]) == "triton"
    expected = {cell.key: 1.0 + place for place, cell in enumerate(cells)}
    order = Order(replace(plan(1), cells=tuple(cells), expected_seconds=expected))
    assert order.next(cells[:3], cells[3:]) == 1  # the dearest of those of which none runs
    assert order.next(cells[1:3], cells[2:]) == 1
