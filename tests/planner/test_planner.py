"""What a planner gives kernels that build nothing, little or much: cases and shapes in the time of a cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest

from normcheck.cases.case import Case
from normcheck.cases.core import core
from normcheck.cases.layouts import STRIDED
from normcheck.cases.parameters import Parameters, with_parameters
from normcheck.cases.strategies import choices, endless
from normcheck.gate.plan import PROFILES
from tests.inner_loop import parametrize
from tests.planner import simulated as kernels
from tests.planner.simulated import DECLARED, Builds, Simulated, at, blocks, plain, plans, simulated, tuned

RANKS: dict[str, Any] = {"ranks": (2, 3)}
PACKED: dict[str, Any] = {"strided": False}
SMALL: dict[str, Any] = {**RANKS, "biases": (False,), "weight_dtypes": ("same",), "call": 0.002}

TABLE: dict[str, tuple[Builds, dict[str, Any], float, tuple[int, int]]] = {
    "blocks": (blocks, RANKS, 17.0, (100, 6)),
    "plans": (plans, PACKED, 16.5, (85, 6)),
    "slow plans": (kernels.slow_plans, PACKED, 28.0, (100, 10)),
    "tuned": (tuned, RANKS, 30.0, (100, 10)),
    "tuned by Triton": (kernels.tuned_by_triton, {**RANKS, "without_rows": True}, 32.0, (100, 8)),
    "tuned by width": (kernels.tuned_by_width, RANKS, 37.0, (100, 6)),
    "tuned for a minute": (kernels.tuned_for_a_minute, RANKS, 186.0, (60, 3)),
    "compiled": (kernels.compiled, {**PACKED, "shapes": DECLARED}, 41.5, (60, 3)),
    "each shape": (kernels.each_shape, RANKS, 55.0, (100, 5)),
    "torch.compile": (kernels.compiled_by_user, PACKED, 60.0, (100, 8)),
    "torch.compile, eps in the key": (kernels.eps_in_the_key, PACKED, 62.0, (100, 8)),
    "torch.compile on a CPU": (kernels.compiled_on_cpu, {"device": "cpu"}, 200.0, (300, 18)),
    "for each M": (kernels.for_each_m, RANKS, 16.5, (100, 6)),
    "for each layout": (kernels.for_layouts, RANKS, 41.5, (190, 20)),
    "load_inline": (kernels.loaded_once, RANKS, 60.0, (230, 60)),
    "blocks among 50 cells": (blocks, {**RANKS, "cells": 50}, 13.5, (180, 11)),
    "tuned among 50 cells": (tuned, {**RANKS, "cells": 50}, 16.0, (120, 8)),
    **{
        f"{price} s a key{' of M' * tall}": (
            at(price, each_height=tall),
            {**PACKED, "call": 0.02, "starting": 5.0, "without_rows": not tall},
            min(5.0 + 8.0 + 8 * price, 60.0),
            (60, 3),
        )
        for price, tall in ((2.4, True), (4.5, False), (4.5, True), (7.2, True), (11.0, False))
    },
    "blocks that stall": (blocks, {**RANKS, "stalls": 0.02}, 80.0, (100, 6)),
    "tuned that stalls": (tuned, {**RANKS, "stalls": 0.02}, 80.0, (60, 4)),
    "torch.compile, at first slow": (kernels.compiled_at_first_slowly, SMALL, 75.0, (100, 6)),
    "tuned, at first slow": (kernels.tuned_at_first_slowly, RANKS, 90.0, (100, 6)),
}
"""A kernel -> what it builds, how it is run, and its limits: seconds at most, cases and shapes at least. Several rows
at the columns of models are what takes more than 16 s. The one tuned by width pays 8 s for rows of more than 4096
columns, without which a kernel that fails there passed. The eight even N that are no multiple of 8 move the blocks
among 50 cells past the 13.3 s that they had, by 0.1 s.
"""


FAULTS: dict[str, Callable[[Case], bool]] = {
    "rows from 64 on": lambda case: case.M >= 65,
    "one row": lambda case: case.M == 1,
    "one column": lambda case: case.N == 1,
    "no multiple of 16": lambda case: case.N % 16 != 0 and case.N > 1,
    "a multiple of 16": lambda case: case.N % 16 == 0,
    "past a block": lambda case: case.N > 1024,
    "past four": lambda case: case.N > 4096,
    "the rest of a loop": lambda case: case.N > 4096 and case.N % 16 != 0,
    "strided": lambda case: case.layout in ("strided", "x_strided"),
    "no bias": lambda case: not case.bias,
    "with a bias": lambda case: case.bias,
    "fp32 weights": lambda case: case.weight_dtype == "fp32",
    "no rows": lambda case: case.M == 0,
    "more rows than 512 of each of 132 processors": lambda case: case.M > 512 * 132,
    "misaligned": lambda case: case.layout == "misaligned",
}


SHOWS_ALL = (
    *("blocks", "plans", "slow plans", "tuned", "tuned by Triton", "tuned by width", "each shape", "torch.compile"),
    *("for each M", "for each layout", "4.5 s a key of M", "blocks among 50 cells", "tuned among 50 cells"),
)
"""Kernels of the table of whose faults each is found."""


def unseen(run: Simulated) -> list[str]:
    """The faults that no case of a run shows."""
    cases = [case for case in run.cases if case.rows == "blend" or case.M < 20]
    return [name for name, shows in FAULTS.items() if not any(map(shows, cases))]


@pytest.mark.slow
@parametrize(("name", "seed"), [*zip(TABLE, cycle((0, 7)), strict=False)], inner=1)
def test_a_dear_kernel_gets_what_a_pass_needs_in_its_time(name: str, seed: int) -> None:
    builds, fields, most, (cases, shapes) = TABLE[name]
    run = simulated(builds, seed=seed, **fields)
    assert run.missed == ()
    assert run.seconds <= most
    assert len(run.cases) >= cases
    assert len(run.core.record.shapes) >= shapes
    if name in SHOWS_ALL:
        assert unseen(run) == ["strided"] * (not fields.get("strided", True))


@pytest.mark.slow
@pytest.mark.parametrize("builds", [blocks, plans, kernels.compiled_by_user])
def test_a_dear_kernel_is_asked_several_rows_at_the_columns_of_models(builds: Builds) -> None:
    """One that is wrong at N = 4096 alone, but for its first row, passed on a GPU."""
    run = simulated(builds, **PACKED)
    several = {case.N for case in run.cases if case.M > 1}
    assert run.was_priced and several >= {256, 512, 1024, 2048, 4096, 8192}


@parametrize(("device", "stalls"), [("cuda", 0.0), ("cuda", 0.02), ("cuda", 0.1), ("cpu", 0.0), ("cpu", 0.1)], inner=2)
def test_a_kernel_that_builds_nothing_has_its_whole_core_however_the_machine_stalls(device: str, stalls: float) -> None:
    run = simulated(plain, device=device, stalls=stalls, **RANKS)
    whole = core(run.core.claims, PROFILES["quick"].extent.on(device), 0)
    assert run.cases == [planned.case for planned in whole]
    assert not run.was_priced and run.missed == ()
    drawn = list(islice(endless(choices(run.core.claims), 0), 100))
    assert [run.core.where_paid(case, 1.0) for case in drawn] == drawn
    assert all(run.core.is_worth(case, 0.0) for case in drawn)


@pytest.mark.slow
def test_where_much_starts_at_first_what_builds_nothing_keeps_its_whole_core() -> None:
    """As the first cells of a run, whose first calls at each place are slow while thirty processes start."""

    def at_first(case: Case) -> Iterator[tuple[Hashable, float]]:
        yield (case.N, case.M, case.layout, case.bias, case.weight_dtype), 0.7

    assert simulated(at_first).was_priced
    assert not simulated(at_first, builds=False).was_priced


@pytest.mark.slow
def test_dear_rows_are_no_building() -> None:
    """An interpreted kernel: a tall case takes long whether it is the first of its shape or not."""
    run = simulated(plain, device="cpu", call=0.01, row=5e-4, **RANKS)
    assert not run.was_priced and run.missed == ()
    assert "M above 4096 in few cases of the core: a row costs 0.47 ms here" in run.core.account.coverage(0).left_out


@pytest.mark.slow
def test_a_pause_of_the_machine_hides_no_dear_key() -> None:
    short = replace(PROFILES["quick"], core_seconds=4.0)
    assert simulated(tuned, device="cpu", profile=short, pauses=(1,), **RANKS).was_priced


@pytest.mark.slow
def test_what_is_dear_is_said_with_its_price() -> None:
    left_out = simulated(kernels.compiled_by_user, **PACKED).core.account.coverage(100).left_out
    assert left_out.startswith("a new eps takes 33 s: ")
    assert "; left out: no eps 0.1, 0.5, " in left_out or ", no eps 0.1, 0.5, " in left_out


@pytest.mark.slow
def test_the_price_that_kept_a_part_of_the_floor_out_is_said() -> None:
    """And no other: what a new N takes is nothing to a layout that is missing."""

    def builds(case: Case) -> Iterator[tuple[Hashable, float]]:
        yield case.layout, 60.0
        yield case.N, 0.5

    run = simulated(builds, **RANKS)
    (missed,) = run.missed
    assert missed.startswith("no layout ")
    assert run.core.account.coverage(len(run.cases)).limit == "time"
    assert re.fullmatch(r"60 s are allowed, and a new layout takes \d+ s", run.core.account.why_thin())


@pytest.mark.slow
def test_too_few_cases_are_said() -> None:
    run = simulated(plans, **PACKED)
    assert run.core.account.coverage(50).missed == ("50 of 100 cases at least",)


def test_too_many_for_the_number_of_cases_are_thin_and_say_so() -> None:
    run = simulated(blocks, profile=replace(PROFILES["quick"], max_examples=20), **RANKS)
    assert len(run.cases) == 20 and run.missed
    assert run.core.account.coverage(20).limit == "cases"


ADDING: dict[str, Any] = {"op": "fused_add_layernorm", "weights": (True, False), "residual_dtypes": ("io", "fp32")}


@pytest.mark.slow
def test_a_kernel_that_adds_a_residual_has_all_that_it_needs_and_what_is_drawn_then_is_where_it_was_paid_for() -> None:
    """With the gap, too: another may be compiled for."""
    run = simulated(blocks, **RANKS, **ADDING)
    assert run.was_priced and run.seconds <= 17.0
    assert len(run.cases) >= 100 and len(run.core.record.shapes) >= 9 and run.missed == ()
    for all_of_them in (run.cases, run.cell.claims.parameters):
        assert {one.residual_dtype for one in all_of_them} == {"same", "fp32"}
    built = {key for case in run.cases if case.M for key, _ in blocks(case)}
    known = next(case for case in run.cases[4:] if case.layout in STRIDED and case.M)
    again = run.core.where_paid(replace(known, seed=1, gap=known.gap + 1), 1.0)
    assert (again.layout, again.gap) == (known.layout, known.gap) and built.issuperset(k for k, _ in blocks(again))
    moved = 0
    for seed in range(1, 12):
        new = replace(
            with_parameters(known, Parameters(True, not known.bias, "fp32", "fp32")), seed=seed, N=6000 + seed
        )
        drawn = run.core.where_paid(new, 1.0)
        moved += drawn.N != new.N
        assert built.issuperset(key for key, _ in blocks(drawn))
    assert moved == 11


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


@pytest.mark.slow
@parametrize("what", REFUSED, inner=1)
def test_what_a_dear_kernel_refuses_costs_little_and_the_rest_is_asked(what: str) -> None:
    run = simulated(blocks, refuses=REFUSED[what], **RANKS)
    assert run.was_priced
    assert run.refused <= (70 if what == "wide" else 50)  # each width of a facet is asked for before it is given up
    assert len(run.cases) >= 75
    assert run.missed == (("no special inf, nan",) if what == "special values" else ())


@pytest.mark.slow
def test_a_fault_of_one_class_of_cases_is_found_where_each_shape_is_dear() -> None:
    """Of strided rows as well, which those in the table have not."""
    assert unseen(simulated(plans, seed=3, **RANKS)) == []


@pytest.mark.slow
def test_the_plain_order_does_not_come_back_for_more_cases_than_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel was thin after 400 cases on 80 shapes: what priced cases had let go was not counted, and drawn again."""
    planner = simulated(blocks, **RANKS).core
    assert planner.is_priced
    for left, priced in ((10, True), (1000, False)):
        planner._limits = replace(planner._limits, cases=planner.record.run + left)
        for name, value in {"is_new": True, "slow": False, "spent": 0.0}.items():
            setattr(planner.prices, name, value)
        monkeypatch.setattr(planner.prices, "ahead", lambda *_: 0.0)
        assert [*planner._plain.let_go()] and not [*planner._plain.rest()]
        planner._choose(0.01)
        assert planner.is_priced == priced
