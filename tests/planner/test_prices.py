"""Prices: what a case builds is told from what its runs take, axis by axis."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from normcheck.cases.depth import Depth
from normcheck.cases.planned import Planned
from normcheck.planner.own import Own
from normcheck.planner.prices import Prices
from tests.case_lines import case_of

FIRST = Planned(case_of("rmsnorm fp16 M=5 N=24"), Depth.MEMORY)
about = partial(pytest.approx, abs=0.02)


def like(**changes: object) -> Planned:
    return replace(FIRST, case=replace(FIRST.case, **changes))


def known(*seen: tuple[Planned, float]) -> Prices:
    """Prices after a first case, which starts things as well, the same again, and these."""
    prices = Prices("cuda")
    for planned, seconds in ((FIRST, 4.0), (like(seed=2), 0.001), *seen):
        prices.saw(planned, seconds)
    return prices


def test_what_was_new_alone_tells_the_price_of_its_axis() -> None:
    prices = known((like(N=40), 2.0), (like(M=7), 0.001))
    assert prices.of("N") == about(2.0)
    assert prices.of("M") == 0
    assert prices.building_of(like(N=56)) == about(2.0)
    assert prices.building_of(like(N=40, M=9)) == 0


def test_what_was_never_tried_may_cost_a_part_of_the_dearest() -> None:
    prices = known((like(N=40), 2.0))
    assert prices.of("layout") == about(0.5)
    assert prices.of("layout", trust="sure") == 0


def test_several_new_axes_share_what_a_case_took_until_one_is_known() -> None:
    prices = known((like(N=40, M=9), 2.0))
    assert prices.of("N") == prices.of("M") == about(1.0)
    prices.saw(like(M=11), 0.001)
    assert (prices.of("M"), prices.of("N")) == (0, about(2.0))


def test_a_fast_case_clears_all_that_was_new_in_it() -> None:
    prices = known((like(N=40, M=9, bias=False), 2.0), (like(N=56, M=11, layout="misaligned"), 0.001))
    assert prices.of("N") == prices.of("M") == prices.of("layout") == 0
    assert prices.of("bias") == about(2.0)


def test_two_stalls_among_five_change_no_price() -> None:
    prices = known(*((like(N=8 + 16 * n), 7.0 if n in (3, 5) else 0.001) for n in range(2, 8)))
    assert prices.of("N") == 0


def test_one_row_and_one_column_have_prices_of_their_own() -> None:
    prices = known((like(M=1), 3.0), (like(M=7), 0.001), (like(N=1), 3.0), (like(N=40), 0.001))
    assert (prices.of("M", 1), prices.of("N", 1)) == (about(3.0), about(3.0))
    assert prices.of("M", 9) == prices.of("N", 96) == 0


def test_a_probe_of_rows_runs_a_row_alone() -> None:
    prices = known((like(M=1), 3.0))
    other = known((like(M=7), 0.001), (like(N=40), 3.0))
    assert prices.building_of(replace(like(M=5), probe=Depth.ROWS)) == 0  # M = 1 has run
    assert other.building_of(replace(like(M=5), probe=Depth.ROWS)) > 0


def test_eps_and_limits_are_numbers_that_a_kernel_may_be_built_for() -> None:
    prices = known((like(eps=1e-3), 33.0))
    assert prices.of("numbers") == about(33.0)
    assert prices.told() == "a new eps takes 33 s"


def test_what_starts_in_the_very_first_case_is_no_price() -> None:
    prices = known((like(weight_dtype="fp32"), 2.0))
    assert prices.dearest == about(2.0)


def test_the_sure_price_needs_two_samples() -> None:
    prices = known((like(N=40), 2.0))
    assert prices.of("N", trust="sure") == 0
    prices.saw(like(N=56), 1.0)
    assert prices.of("N", trust="sure") == about(1.0)


def test_what_rows_cost_on_a_gpu_is_what_their_elements_cost() -> None:
    """A few wide rows were taken for dear rows there, so that 65537 rows of 3 were never tried."""
    of_elements = 0.02 + 0.08 * (65537 * 3) / (300 * 768)
    assert price_of_a_tall_case("cuda") == pytest.approx(of_elements, rel=0.4)
    assert price_of_a_tall_case("cpu") > 5


def test_a_program_for_each_group_of_channels_costs_what_a_row_does() -> None:
    """A case of 8192 groups was taken for one of two rows: an interpreted kernel took half a minute for each."""
    own = Own("cpu")
    few, split = (
        Planned(case_of(f"groupnorm fp16 M=2 N={n} channels=each groups={groups}"), Depth.MEMORY)
        for n, groups in ((64, 2), (4096, 2048))
    )
    for planned, seconds in ((few, 0.02), (few, 0.02), (split, 8.0)):
        own.saw(planned, seconds, new=False)
    assert own.seconds(replace(split, case=replace(split.case, groups="1024"))) == pytest.approx(4.0, rel=0.1)
    assert own.seconds(replace(split, case=replace(split.case, groups="1"))) < 0.1


def price_of_a_tall_case(device: str) -> float:
    own = Own(device)
    few, wide, tall = (
        Planned(case_of(f"rmsnorm fp16 {size}"), Depth.MEMORY) for size in ("M=5 N=24", "M=300 N=768", "M=65537 N=3")
    )
    for planned, seconds in ((few, 0.02), (few, 0.02), (wide, 0.1), (wide, 0.1)):
        own.saw(planned, seconds, new=False)
    return own.seconds(tall)


def test_a_stall_changes_nothing_of_what_a_call_takes() -> None:
    own = Own("cpu")
    for seconds in (0.02, 7.0, 0.03):
        own.saw(FIRST, seconds, new=False)
    assert own.call == 0.01
