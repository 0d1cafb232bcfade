"""Where a first call is dear, what was paid for is used: cases and shapes in the time of a cell, and what they find."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import STRIDED, Case, Parameters, with_parameters
from normcheck.cases.core import Planned, core
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.budget import Budget
from normcheck.gate.costs import RUNS, Costs
from normcheck.gate.coverage import CoreRun
from normcheck.gate.plan import PROFILES, Plan, Profile
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.oracle.tolerances import Model
from tests.case_lines import case_of

Builds = Callable[[Case], Iterator[tuple[Hashable, float]]]
"""What a kernel builds for a case: a key, which is built once, and its seconds."""

TALL = "M=65537 N=3"
CALL_SECONDS, STARTING_SECONDS = 0.006, 2.0
SHORT_AFTER = 4
"""By so many cases a core is short, if first calls are dear."""

DECLARED = ((2, 16), (3, 7), (1, 24), (33, 127), (17, 1000), (2, 4097), (64, 768), (3, 8200), (4096, 128), (2, 65536))


def plain(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Nothing is built."""
    return iter(())


def blocks(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Triton: a block of a power of two, divisibility by 16, alignment, what is there and of which dtype."""
    aligned = case.layout != "misaligned", (case.N + case.gap) % 16 == 0, case.M == 1, case.N == 1
    parameters = case.weight, case.bias, case.weight_dtype, case.residual_dtype
    yield ("forward", max(1 << (case.N - 1).bit_length(), 8), aligned, parameters), 0.35
    yield ("backward", max(1 << (case.N - 1).bit_length(), 8), aligned, parameters), 0.35


def plans(case: Case) -> Iterator[tuple[Hashable, float]]:
    """cuDNN: a plan for each shape, forward and backward."""
    yield (case.M, case.N, case.bias, case.weight_dtype), 0.58


def slow_plans(case: Case) -> Iterator[tuple[Hashable, float]]:
    """The same on a busy machine."""
    yield (case.M, case.N, case.bias, case.weight_dtype), 1.6


def tuned(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Ten configurations for each N."""
    yield (case.N, case.bias, case.weight_dtype), 2.0


def tuned_by_triton(case: Case) -> Iterator[tuple[Hashable, float]]:
    """As Triton's autotuner does it: for each N and dtype, without rows as well; then one of them for other strides."""
    yield (case.N, case.weight_dtype), 2.9
    yield (case.N, case.weight_dtype, (case.N + case.gap) % 16 == 0, case.layout == "misaligned"), 0.15


def compiled(case: Case) -> Iterator[tuple[Hashable, float]]:
    """torch.compile with dynamic shapes: a size of 1 is a constant."""
    yield (case.bias, case.weight_dtype, case.M == 1, case.N == 1), 7.0


def each_shape(case: Case) -> Iterator[tuple[Hashable, float]]:
    """torch.compile with static shapes."""
    yield (case.M, case.N, case.bias, case.weight_dtype, case.layout in STRIDED), 6.0


@dataclass
class Simulated:
    """The cases of a core, as a kernel that ``builds`` would be given them; ``seconds``: of all of them."""

    cell: Cell
    core: CoreRun
    seconds: float = field(default_factory=lambda: STARTING_SECONDS)
    cases: list[Case] = field(default_factory=list)
    refused: int = 0

    @property
    def shapes(self) -> set[tuple[int, int]]:
        return {(case.M, case.N) for case in self.cases if case.M}


def simulated(
    builds: Builds,
    /,
    *,
    device: str = "cuda",
    op: str = "rmsnorm",
    seed: int = 0,
    refuses: Callable[[Case], bool] = lambda case: False,
    pauses: Sequence[int] = (),
    profile: Profile = PROFILES["quick"],
    without_rows: bool = False,
    **fields: Any,
) -> Simulated:
    """The core of a profile, in the order and to the end that these costs give it.

    ``pauses``: the numbers of cases for which the machine stands still, as long as a first call takes.
    ``without_rows``: whether the kernel builds for a case without rows as well.
    """
    implementation = Implementation(name="mine", op=op, forward=lambda *tensors, **numbers: None, **fields)
    cell = Cell(OPS[op], implementation, "bf16", "tests")
    run = Simulated(cell, CoreRun(cell, Plan((cell,), profile, seed, device, 120.0), STARTING_SECONDS))
    built: set[Hashable] = set()
    while (step := run.core.next()) is not None:
        case, runs = step.planned.case, RUNS[step.planned.probe]
        if refuses(case):
            run.refused += 1
            run.core.saw(step, Result(case, Model(), refused="not this"), 0.001)
            continue
        seconds = CALL_SECONDS * runs + 2.0 * (not run.cases) + 3.0 * (len(run.cases) in pauses)
        asked = (case, replace(case, M=1, layout="contiguous", gap=0)) if step.planned.probe == "rows" else (case,)
        for one in asked:
            for key, price in builds(one) if one.M or without_rows or builds is tuned_by_triton else ():
                seconds += price * (key not in built)
                built.add(key)
        run.core.saw(step, Result(case, Model()), seconds)
        run.seconds += seconds
        run.cases.append(case)
    return run


DEAR = (
    (blocks, {"ranks": (2, 3)}, 16.5, (100, 6)),
    (plans, {"strided": False}, 16.5, (85, 6)),  # others are drawn after the core
    (slow_plans, {"strided": False}, 18.5, (70, 6)),
    (tuned, {"ranks": (2, 3)}, 16.5, (60, 4)),
    (tuned_by_triton, {"ranks": (2, 3)}, 22.5, (60, 4)),
    (compiled, {"strided": False, "shapes": DECLARED}, 41.5, (60, 3)),
)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(("builds", "fields", "most", "least"), DEAR, ids=[d[0].__name__ for d in DEAR])
def test_a_dear_kernel_gets_its_cases_and_shapes_in_time(
    builds: Builds, fields: dict[str, Any], most: float, least: tuple[int, int], seed: int
) -> None:
    run = simulated(builds, seed=seed, **fields)
    assert run.core.is_short
    assert run.seconds <= most
    assert len(run.cases) >= least[0]
    assert len(run.shapes) >= least[1]
    assert run.core.coverage(100).missed == ()
    assert "a first call takes" in run.core.coverage(100).left_out


@pytest.mark.parametrize(("builds", "fields", "most"), [(blocks, {"ranks": (2, 3)}, 13.3), (tuned, {}, 15.0)])
def test_among_many_cells_a_short_core_takes_less_and_owes_the_same(
    builds: Builds, fields: dict[str, Any], most: float
) -> None:
    profile = PROFILES["quick"]
    hurried = replace(profile, short=profile.short.in_turn(50))
    run = simulated(builds, profile=hurried, **fields)
    assert run.core.is_short and run.seconds <= most
    assert run.core.coverage(100).missed == ()
    budget = Budget(Plan((run.cell,), hurried, 0, "cuda", 120.0), run.core.costs, 0.0)
    assert budget.usual_wall == pytest.approx(0.8 * 16.0)
    assert budget.after(short=True) <= 2.0 == budget.after(short=False)


def at(price: float, *, each_height: bool) -> Builds:
    """A first call takes so many seconds, with each of a case's parameters: with each M and N, or as Triton's tuner."""

    def builds(case: Case) -> Iterator[tuple[Hashable, float]]:
        yield (case.N, case.M if each_height else 0, case.bias, case.weight_dtype), price

    return builds


@pytest.mark.parametrize(("price", "each_height"), [(2.4, True), (4.5, False), (4.5, True), (7.2, True), (11.0, False)])
def test_whatever_a_first_call_takes_nothing_is_missed(
    price: float, each_height: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in fla and mamba, whose cells had 41 s or 16 by what the very first call had taken."""
    monkeypatch.setitem(globals(), "STARTING_SECONDS", 5.0)
    monkeypatch.setitem(globals(), "CALL_SECONDS", 0.02)
    run = simulated(at(price, each_height=each_height), op="layernorm", seed=1, without_rows=not each_height)
    assert run.core.is_short
    assert run.core.coverage(100).missed == ()
    assert run.seconds <= min(5.0 + 2.0 + 8 * price, 45.0)


def test_what_was_kept_in_vain_is_spent_on_shapes_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STARTING_SECONDS", 5.0)
    monkeypatch.setitem(globals(), "CALL_SECONDS", 0.02)
    run = simulated(at(2.4, each_height=True), op="layernorm", seed=1, without_rows=True)
    assert run.core.coverage(100).missed == ()
    assert len(run.shapes) >= 5


@pytest.mark.parametrize(("price", "wall"), [(1.0, 16.0), (1.9, 5.0 + 9 * 1.9), (2.1, 5.0 + 7 * 2.1), (9.0, 41.0)])
def test_a_short_core_has_time_for_what_a_pass_takes(price: float, wall: float) -> None:
    costs, first = Costs("cuda"), Planned(case_of("rmsnorm fp16 M=5 N=24"), "memory")
    cell = Cell(
        OPS["rmsnorm"], Implementation(name="mine", op="rmsnorm", forward=lambda *_, **__: None), "fp16", "tests"
    )
    budget = Budget(Plan((cell,), PROFILES["quick"], 0, "cuda", 120.0), costs, 5.0)
    assert budget.wall == 16.0
    costs.count(first, price)
    costs.count(first, 0.0)
    assert budget.wall == pytest.approx(wall, rel=1e-3)


def test_what_starts_in_the_first_call_is_no_time_of_a_pass() -> None:
    costs = Costs("cuda")
    first = Planned(case_of("rmsnorm fp16 M=5 N=24"), "memory")
    other = Planned(replace(first.case, weight_dtype="fp32"), "memory")
    budget = Budget(Plan((simulated(plain).cell,), PROFILES["quick"], 0, "cuda", 120.0), costs, 5.0)
    for planned, seconds in ((first, 4.1), (first, 0.0), (other, 2.1)):
        costs.count(planned, seconds)
    assert costs.starting == pytest.approx(2.0)
    assert budget.wall == pytest.approx(5.0 + 2.0 + 7 * 2.1, abs=1e-2)


def test_other_rows_tell_of_layouts_and_layouts_of_no_rows() -> None:
    """A kernel that is built for each M and N may take any layout; a free layout says nothing of other rows."""
    costs, about = Costs("cuda"), partial(pytest.approx, abs=1e-3)
    first, tall = (Planned(case_of(f"rmsnorm fp16 M={m} N=24"), "memory") for m in (5, 65))
    strided, misaligned = (Planned(replace(first.case, layout=name), "memory") for name in ("strided", "misaligned"))
    empty = Planned(replace(first.case, M=0), "memory")
    costs.count(first, 4.0)
    costs.count(first, 0.0)
    costs.count(Planned(replace(first.case, weight_dtype="fp32"), "memory"), 4.0)
    assert costs.untried(strided) == about(1.0)
    assert costs.untried(empty) == about(1.0)
    assert costs.untried(tall) == about(1.0)
    assert costs.kept({"layout": 5, "empty": 1}) == about(2.0)
    costs.count(strided, 0.0)
    assert costs.untried(strided) == math.inf
    assert costs.untried(misaligned) == about(1.0), "a layout may be free though another is dear"
    assert costs.first_calls(tall) == (0.0, about(2.0))
    assert costs.kept({"layout": 5}) == about(0.0)
    costs.count(misaligned, 4.0)
    costs.count(empty, 4.0)
    assert costs.kept({"layout": 5}) == costs.kept({"empty": 1}) == about(1.0), "no more than a trial is worth"


ADDING: dict[str, Any] = {
    "op": "fused_add_layernorm",
    "ranks": (2, 3),
    "weights": (True, False),
    "residual_dtypes": ("io", "fp32"),
}


@pytest.mark.parametrize(
    ("fields", "seed"),
    [(ADDING, 0), (ADDING, 1), ({"op": "layernorm_relu_bitmask", "ranks": (2, 3)}, 1), ({"heads": True}, 1)],
)
def test_where_nothing_is_new_nothing_is_compiled(fields: dict[str, Any], seed: int) -> None:
    """Else a case that looks cheap costs a first call: by another residual's dtype, or another gap behind the rows."""
    run = simulated(blocks, seed=seed, **fields)
    assert run.core.is_short
    costs, built = Costs("cuda"), set[Hashable]()
    for case in run.cases[SHORT_AFTER:]:
        if not costs.news(case) and case.M:
            assert built.issuperset(key for key, _ in blocks(case)), case
        costs.count(Planned(case, "memory"), 0.0)
        built.update(key for key, _ in blocks(case))


@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_adds_a_residual_has_all_that_it_owes(seed: int) -> None:
    run = simulated(blocks, seed=seed, **ADDING)
    assert run.core.is_short and run.seconds <= 13.5
    assert len(run.cases) >= 100 and len(run.shapes) >= 9 and run.core.coverage(100).missed == ()
    for all_of_them in (run.cases, run.cell.claims.parameters):
        assert {one.residual_dtype for one in all_of_them} == {"same", "fp32"}


def test_what_is_drawn_after_a_short_core_is_where_it_was_paid_for() -> None:
    """With the gap, too: another may be compiled for."""
    run = simulated(blocks, **ADDING)
    costs, built = run.core.costs, {key for case in run.cases if case.M for key, _ in blocks(case)}
    known = next(case for case in run.cases[SHORT_AFTER:] if case.layout in STRIDED and case.M)
    again = run.core.where_paid(replace(known, seed=1, gap=known.gap + 1), 1.0)
    assert (again.layout, again.gap) == (known.layout, known.gap) and built.issuperset(k for k, _ in blocks(again))
    other = Parameters(True, not known.bias, "fp32", known.residual_dtype)
    for seed in range(1, 12):
        new = with_parameters(replace(known, seed=seed, gap=9), other)
        if costs.news(new):
            drawn = run.core.where_paid(new, 1.0)
            assert not costs.news(drawn) and built.issuperset(key for key, _ in blocks(drawn))


def test_what_builds_nothing_keeps_its_whole_core_on_a_machine_that_starts_much() -> None:
    """As the first cells of a run, whose first calls at each place are slow while thirty processes start."""

    def at_first(case: Case) -> Iterator[tuple[Hashable, float]]:
        yield (case.N, case.M, case.layout, case.bias, case.weight_dtype), 0.7

    assert simulated(at_first).core.is_short
    assert not simulated(at_first, builds=False).core.is_short


def test_a_pause_of_the_machine_hides_no_dear_first_call() -> None:
    short = replace(PROFILES["quick"], core_seconds=4.0)
    assert simulated(tuned, device="cpu", profile=short, ranks=(2, 3), pauses=[1]).core.is_short


@pytest.mark.parametrize("fields", [{"ranks": (2, 3)}, {"strided": False, "shapes": DECLARED}])
@pytest.mark.parametrize("builds", [blocks, plans, tuned])
def test_many_rows_are_among_the_first_shapes(builds: Builds, fields: dict[str, Any]) -> None:
    shapes = list(dict.fromkeys((case.M, case.N) for case in simulated(builds, **fields).cases if case.M))
    assert any(m >= 256 for m, _ in shapes[:3]), shapes


def test_many_rows_are_asked_for_only_where_they_cost_no_new_width() -> None:
    """With this seed more than 65535 rows are of one column, and each N is tuned for three seconds."""
    core = simulated(tuned_by_triton, seed=7, ranks=(2, 3)).core
    assert core.coverage(100).missed == ()
    shapes = list(dict.fromkeys(place[:2] for place in core.costs.places))
    for number, (m, n) in enumerate(shapes):
        assert m <= 65535 or n in {width for _, width in shapes[:number]}
    cheap = simulated(blocks, seed=7, ranks=(2, 3)).core
    assert any(m > 65535 for m, _ in cheap.costs.shapes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_rows_cost_on_a_gpu_is_what_their_elements_cost(device: str) -> None:
    """A few wide rows were taken for dear rows there, so that 65537 rows of 3 were never tried."""
    costs = Costs(device)
    few, wide, tall = (Planned(case_of(f"rmsnorm fp16 {size}"), "memory") for size in ("M=5 N=24", "M=300 N=768", TALL))
    for planned, seconds in ((few, 0.02), (few, 0.02), (wide, 0.1), (wide, 0.1)):
        costs.count(planned, seconds)
    assert costs.expected(tall) == pytest.approx(0.02 + 0.08 * (65537 * 3) / (300 * 768), rel=0.4) or device == "cpu"
    assert costs.expected(tall) > 5 or device == "cuda"


def test_several_widths_come_before_more_of_the_rest() -> None:
    """Other rows cost Triton nothing, and so are many shapes; each width is compiled."""
    assert len({n for _, n in simulated(blocks, ranks=(2, 3)).shapes}) >= 4


def test_a_whole_core_leaves_its_time_after_it_and_a_late_one_a_part() -> None:
    cell = simulated(plain).cell
    plan = Plan((cell,), PROFILES["quick"], 0, "cuda", 120.0)
    costs = Costs("cuda")
    budget = Budget(plan, costs, 1.0)
    assert budget.after(short=False) == 4.0
    for spent, seconds in ((11.0, 4.0), (13.0, 4.0), (14.0, 3.0), (15.0, 2.0), (16.0, 1.0), (30.0, 1.0)):
        costs.spent = spent
        assert budget.after(short=True) == seconds


def test_what_is_too_dear_even_for_a_short_core_is_thin_and_ends_in_time() -> None:
    run = simulated(each_shape, ranks=(2, 3))
    assert run.seconds <= 41.5
    assert len(run.cases) >= 60
    assert run.core.coverage(len(run.cases)).missed
    assert run.core.why_thin().startswith("41 s are allowed with compiling and the like, which took ")


def test_too_few_cases_or_shapes_are_said() -> None:
    run = simulated(plans, strided=False)
    assert run.core.coverage(50).missed == ("50 of 100 cases at least",)


REFUSED: dict[str, Callable[[Case], bool]] = {
    "bias": lambda case: case.bias,
    "fp32 weights": lambda case: case.weight_dtype == "fp32",
    "strided": lambda case: case.gap > 0,
    "wide": lambda case: case.N > 4096,
    "odd": lambda case: case.N % 2 == 1,
    "tall": lambda case: case.M > 64,
    "no rows": lambda case: case.M == 0,
    "wide and rank 3": lambda case: case.rank == 3 and case.N > 1024,
    "an eps": lambda case: case.eps == 1e-3,  # no declaration names it
    "special values": lambda case: case.rows in ("nan", "inf"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_dear_kernel_refuses_costs_little_and_the_rest_is_asked(what: str) -> None:
    run = simulated(blocks, ranks=(2, 3), refuses=REFUSED[what])
    assert run.core.is_short
    assert run.refused <= 50
    assert len(run.cases) >= 75
    assert run.core.coverage(100).missed == (("no special inf, nan",) if what == "special values" else ())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cheap_kernel_keeps_its_core(device: str) -> None:
    run = simulated(plain, device=device, ranks=(2, 3))
    whole = core(run.core.claims, PROFILES["quick"].extent.on(device), 0)
    assert run.cases == [planned.case for planned in whole]


def test_dear_rows_are_no_dear_first_calls() -> None:
    """An interpreted kernel: a tall case takes long whether it is the first of its shape or not."""
    implementation = Implementation(name="mine", op="rmsnorm", forward=lambda: None, ranks=(2, 3))
    cell = Cell(OPS["rmsnorm"], implementation, "bf16", "tests")
    run = CoreRun(cell, Plan((cell,), PROFILES["quick"], 0, "cpu", 120.0))
    while (step := run.next()) is not None:
        seconds = RUNS[step.planned.probe] * (0.01 + 5e-4 * step.planned.case.M)
        run.saw(step, Result(step.planned.case, Model()), seconds)
        assert not run.is_short
    assert run.coverage(run.length).missed == ()


FAULTS: dict[str, Callable[[Case], bool]] = {
    "rows from 64 on": lambda case: case.M >= 65,
    "one row": lambda case: case.M == 1,
    "one column": lambda case: case.N == 1,
    "no multiple of 16": lambda case: case.N % 16 != 0 and case.N > 1,
    "a multiple of 16": lambda case: case.N % 16 == 0,
    "past a block": lambda case: case.N > 1024,
    "strided": lambda case: case.layout in ("strided", "x_strided"),
    "no bias": lambda case: not case.bias,
    "with a bias": lambda case: case.bias,
    "fp32 weights": lambda case: case.weight_dtype == "fp32",
    "no rows": lambda case: case.M == 0,
    "misaligned": lambda case: case.layout == "misaligned",
}


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("builds", [blocks, plans, tuned])
def test_a_fault_of_one_class_of_cases_is_in_a_short_core(builds: Builds, seed: int) -> None:
    cases = [case for case in simulated(builds, seed=seed, ranks=(2, 3)).cases if case.rows == "blend" or case.M < 20]
    assert [name for name, shows in FAULTS.items() if not any(map(shows, cases))] == []


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
def test_a_fault_is_found_though_each_new_n_is_compiled(wrong: str) -> None:
    """A kernel that sleeps in the first call at each N: with the usual core it would sleep for longer than it has."""
    compiled: set[int] = set()

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        time.sleep(0.5 * (x.shape[-1] not in compiled))
        compiled.add(x.shape[-1])
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        y = y if bias is None else y + bias.float()
        return (y * 1.01 if WRONG[wrong](x, weight, bias) else y).to(x.dtype)

    implementation = Implementation(name="mine", op="rmsnorm", forward=forward, ranks=(2, 3))
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "tests")
    profile = replace(PROFILES["quick"], seconds=0.2, core_seconds=3.0)
    began = time.perf_counter()
    verdict = run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0), lambda cases, worst: None)
    if wrong:
        assert verdict.status == "fail", verdict.detail
        return
    assert verdict.status == "pass", verdict.detail
    assert verdict.cases >= 100
    assert time.perf_counter() - began < 12
    assert verdict.core is not None
    assert " s here: a short core of " in verdict.core.left_out
