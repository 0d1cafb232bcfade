"""What ran: which cases are profiled, what a declared kernel owes, and how long it may take.

The profiler is a double here, except in the tests for a GPU: ``pytest -m gpu tests/gate/test_what_ran.py -n 0``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.contexts import _not_run
from normcheck.circumstances import HELD, NOT_TRIED, WRONG, InContext
from normcheck.contexts.kernel import Launched
from normcheck.gate import what_ran as module
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import PROFILES, Plan, profile_of
from normcheck.gate.what_ran import looked, what_ran
from normcheck.result import CONTEXT
from tests.command_line import Cli, KernelFile

KERNELS = Path(__file__).parents[1] / "quality" / "gpu_launching_kernels.py"  # which imports Triton
LINE = "rmsnorm fp16 M={m} N={n} eps=1e-05 rows=normal dy=normal layout=contiguous seed=1"
PLAN = Plan((), profile_of(VerifyOptions()), 0, "cuda", 10.0, contexts=("profiler",))


def case(m: int, n: int) -> Case:
    return parsed(LINE.format(m=m, n=n))


def cell(**fields: Any) -> Cell:
    kernel = Implementation(name="mine", op="rmsnorm", forward=lambda x, weight, bias, *, eps: x, **fields)
    return Cell(OPS["rmsnorm"], kernel, "fp16", "mine.py")


class Profiled:
    """In place of ``run_case``. Up to N = 1024 a small kernel runs; each new M has one compiled if it ``compiles``."""

    def __init__(self, *, compiles: bool = False) -> None:
        self.compiles = compiles
        self.asked: list[tuple[int, int]] = []
        self.built = 7
        self.time = 0.0

    def __call__(self, cell: Cell, case: Case, plan: Plan, *_: object) -> Result:
        assert plan.within == ("profiler",)
        self.time += 0.4
        self.built += self.compiles and case.M not in {m for m, _ in self.asked}
        self.asked.append((case.M, case.N))
        name = "small" if case.N <= 1024 else "tiled"
        launched = Launched((name,), (), name in cell.implementation.expects_kernel.split("|"), self.built)
        problems = tuple(_not_run(cell.implementation, "profiler", launched))
        how = InContext(status=WRONG if problems else HELD, cases=1)
        model = undeclared_model(cell.implementation, "cpu")
        return Result(case, model, problems=problems, launched=launched, contexts={"profiler": how})

    def perf_counter(self) -> float:
        """Of this double's own clock."""
        return self.time


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Profiled:
    return use(Profiled(), monkeypatch)


def use(double: Profiled, monkeypatch: pytest.MonkeyPatch) -> Profiled:
    monkeypatch.setattr(module, "run_case", double)
    monkeypatch.setattr(module, "time", double)
    return double


RAN = [case(m, n) for m in (1, 3, 300, 5000) for n in (64, 129, 2048, 16384)]


def test_a_case_of_each_class_of_sizes_is_profiled_the_smallest_round_one(profiled: Profiled) -> None:
    done = looked(cell(), PLAN, RAN)
    assert sorted(profiled.asked) == [(1, 64), (1, 2048), (1, 16384), (300, 64), (300, 2048), (300, 16384)]
    assert done.failed is None and done.how == InContext(status=HELD, cases=6)
    assert {(each.N, each.forward) for each in done.ran} == {(64, ("small",)), (2048, ("tiled",)), (16384, ("tiled",))}
    assert all(each.built is None for each in done.ran)  # in this process others compile too


def test_new_rows_show_what_is_compiled_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "session_of", lambda _: type("Isolated", (), {"isolated": True}))
    for compiles in (True, False):
        double = use(Profiled(compiles=compiles), monkeypatch)
        done = looked(cell(), PLAN, [case(m, 64) for m in (3, 40, 42, 46)])
        assert double.asked == [(3, 64), (40, 64), (41, 64), (43, 64), (44, 64)]  # 45 is for a fourth
        assert [each.built for each in done.ran] == [None, None, *([int(compiles)] * 3)]
    use(double := Profiled(), monkeypatch)
    looked(cell(shapes=((3, 64),)), PLAN, [case(3, 64)])
    assert double.asked == [(3, 64)]  # it takes no other


def test_a_declared_kernel_must_run_in_one_of_the_cases(profiled: Profiled) -> None:
    assert looked(cell(expects_kernel="small"), PLAN, RAN).failed is None
    assert looked(cell(expects_kernel="tiled"), PLAN, RAN).failed is None
    done = looked(cell(expects_kernel="fused"), PLAN, RAN)
    assert done.failed is not None and done.how is not None and done.how.status == WRONG and len(done.ran) == 6
    (problem,) = done.failed.problems
    assert (problem.kind, problem.check) == (CONTEXT, "profiler")
    assert problem.message.startswith("expects_kernel='fused': no kernel of that name ran, but ")


def test_it_ends_after_a_second_from_the_first_case_on_unless_the_kernel_is_held_to_it(profiled: Profiled) -> None:
    """A case takes 0.4 s of this clock, and a cell of 100 s has 2 s for it."""
    plan = replace(PLAN, asked=False)
    assert len(what_ran(cell(), plan, RAN, used=1.0).ran) == 4
    assert len(what_ran(cell(), plan, RAN, used=100.0).ran) == 6
    assert len(what_ran(cell(expects_kernel="small"), plan, RAN, used=1.0).ran) == 6


def test_nobody_looks_if_nobody_asks(profiled: Profiled) -> None:
    for plan in (replace(PLAN, contexts=()), replace(PLAN, contexts=("thread",))):
        assert what_ran(cell(), plan, RAN, used=1.0).how is None
    assert what_ran(cell(expects_kernel="small"), replace(PLAN, contexts=("thread",)), RAN, used=1.0).how is not None
    assert not what_ran(cell(), PLAN, [], used=1.0).ran


def test_in_quick_a_known_kernel_is_left_alone_unless_somebody_asks(profiled: Profiled) -> None:
    known = replace(cell(), spec="torch")
    for asked, profile, looks in ((False, "quick", False), (True, "quick", True), (False, "ci", True)):
        plan = replace(PLAN, asked=asked, profile=PROFILES[profile])
        assert bool(what_ran(known, plan, RAN, used=1.0).ran) == looks


def test_a_case_that_cannot_be_profiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    how = InContext(status=NOT_TRIED, why="torch's profiler saw no kernel")
    result = Result(case(3, 64), undeclared_model(cell().implementation, "cpu"), contexts={"profiler": how})
    monkeypatch.setattr(module, "run_case", lambda *_, **__: result)
    done = looked(cell(expects_kernel="small"), PLAN, RAN)
    assert (done.failed, done.how, done.ran) == (None, how, [])


@pytest.mark.slow
def test_a_declared_kernel_makes_a_cell_thin_where_there_is_no_gpu(cli: Cli, kernel_file: KernelFile) -> None:
    source = (
        "import torch\nfrom normcheck import Implementation\n"
        "def forward(x, weight, bias, *, eps):\n"
        "    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)\n"
        "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=forward, biases=(False,),\n"
        "    shapes=((3, 129), (20, 24)), expects_kernel='rms_fwd'),)\n"
    )
    path = kernel_file(source)
    run = ("verify", "--impl", str(path), "--dtype", "fp32", "--device", "cpu", "--context", "inference")
    done = cli(*run)
    assert done.code == 5, done.out
    assert "expects_kernel='rms_fwd': no GPU to see it run on" in " ".join(done.out.split())


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")


def verdict_of(cli: Cli, name: str, *more: str) -> tuple[int, str, dict[str, Any]]:
    done = cli(
        *("verify", "--impl", f"{KERNELS}:{name}", "--dtype", "fp32", "--device", "cuda", "--verbose"),
        *("--context", "profiler", "--time-budget", "30", "--report", "json:report.json", *more),
    )
    (verdict,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["verdicts"]
    return done.code, " ".join(done.out.split()), verdict


@pytest.mark.gpu
@needs_gpu
def test_the_names_of_what_ran_on_a_gpu_are_told_by_the_sizes_on_which_they_depend(cli: Cli) -> None:
    code, out, verdict = verdict_of(cli, "two_ways")
    assert (code, verdict["contexts"]["profiler"]["status"]) == (0, "held"), out
    assert {name for each in verdict["ran"] for name in each["forward"]} == {"_few_columns", "_many_columns"}
    assert all((each["N"] <= 1024) == (each["forward"] == ["_few_columns"]) for each in verdict["ran"])
    assert "forward: N <= " in out and "backward: " in out


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["two_ways", "for_each_m"])
def test_what_is_compiled_for_each_m_on_a_gpu_is_told(cli: Cli, name: str) -> None:
    _, out, verdict = verdict_of(cli, name)
    built = [each["built"] for each in verdict["ran"] if each["built"] is not None]
    assert len(built) == 3
    assert ("compiles for each M" in out) == (name == "for_each_m") == all(built)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("name", "code"), [("engaged", 0), ("never_engaged", 1)])
def test_a_declared_kernel_that_never_ran_on_a_gpu_is_a_finding(cli: Cli, name: str, code: int) -> None:
    found, out, verdict = verdict_of(cli, name)
    assert found == code, out
    if code:
        assert verdict["failure"]["kind"] == "context" and verdict["failure"]["check"] == "profiler"
        assert "no kernel of that name ran, but" in out
        again = cli("repro", f"{KERNELS}:{name}", "--context", "profiler", verdict["failure"]["case"])
        assert again.code == 1
