"""A failing case comes down to the simplest one that fails alike, within its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from torch import Tensor
from torch.nn import functional

from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.finding import signature
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.shrink import Stop, clearer, search, seed_of, shrunk, widened
from normcheck.impls.implementation import Implementation
from tests.case_lines import case_of

LARGE = case_of("rmsnorm fp32 M=40 N=300 rows=offset dy=shifted eps=0.001 seed=77 bias=none")
BOTH = (Phase.generate, Phase.shrink)


def wide_is_wrong(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """Wrong in y from 9 columns on, and in rstd in fewer: there is a smaller case, of another fault."""
    wide = x.shape[-1] > 8
    y, rstd = functional.rms_norm(x, x.shape[-1:], weight, eps), (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return {"y": y * (2 if wide else 1), "rstd": rstd * (1 if wide else 2)}


def failed_at(seconds: float) -> tuple[Cell, Plan, Result]:
    implementation = Implementation(name="mine", op="rmsnorm", forward=wide_is_wrong, biases=(False,))
    cell = Cell(OPS["rmsnorm"], implementation, "fp32", "tests")
    plan = Plan((cell,), replace(PROFILES["quick"], shrink_seconds=seconds), 0, "cpu", 60.0)
    return cell, plan, run_case(cell, LARGE, plan)


@pytest.mark.slow
def test_the_smallest_case_that_fails_in_the_same_output() -> None:
    cell, plan, failed = failed_at(60.0)
    smallest = shrunk(cell, plan, failed)
    assert (smallest.case.M, smallest.case.N) == (1, 9)
    assert (smallest.case.rows, smallest.case.dy, smallest.case.layout) == ("normal", "normal", "contiguous")
    assert signature(smallest) == signature(failed) == ("mismatch", "y")


def with_forward(is_wrong: Callable[[int, int], bool]) -> tuple[Cell, Plan, Result]:
    """A kernel that doubles y in the calls whose M and N are wrong, and its failure at M=40 N=300."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
        return {"y": functional.rms_norm(x, x.shape[-1:], weight, eps) * (2 if is_wrong(*x.shape) else 1)}

    cell, plan, _ = failed_at(60.0)
    cell = replace(cell, implementation=replace(cell.implementation, forward=forward))
    return cell, plan, run_case(cell, LARGE, plan, UNPROBED)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), [(1, 213), (38, 1), (1, 9), (40, 300)])
def test_a_size_is_the_edge_between_right_and_wrong(m: int, n: int) -> None:
    """Sizes to draw have gaps, as from 160 to 255: what lies between them is found by halves."""
    cell, plan, failed = with_forward(lambda rows, columns: rows >= m and columns >= n)
    smallest = shrunk(cell, plan, failed)
    assert (m, n) == (smallest.case.M, smallest.case.N)


def test_the_edge_takes_few_cases() -> None:
    sizes: list[int] = []
    cell, plan, failed = with_forward(lambda rows, columns: not sizes.append(columns) and columns >= 213)
    shrunk(cell, replace(plan, profile=replace(plan.profile, shrink_seconds=60.0)), failed)
    assert len({n for n in sizes if 160 < n < 255}) <= 7


def test_a_larger_case_stands_for_one_that_hides_what_is_wrong() -> None:
    cell, plan, failed = with_forward(lambda rows, columns: True)
    smallest = shrunk(cell, plan, failed)
    assert (smallest.case.M, smallest.case.N) == (1, 1)
    assert clearer(cell, plan, smallest, lambda result: True) is smallest
    assert clearer(cell, plan, smallest, lambda result: False) is smallest
    found = clearer(cell, plan, smallest, lambda result: result.case.M > 1 and result.case.N > 2)
    assert (found.case.M, found.case.N) == (2, 3)


@pytest.mark.parametrize(
    ("unsteady", "told"), [("rstd", ("mismatch", "y")), ("y", ("not_repeatable", "y")), ("", ("mismatch", "y"))]
)
def test_the_probe_after_shrinking_tells_of_the_output_that_failed(unsteady: str, told: tuple[str, str]) -> None:
    """It may give the reason why that output is wrong; a fault of another output is another finding."""
    calls = 0

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        step = 1 + 2.0**-22 * (calls % 2)  # within any bound
        y, rstd = functional.rms_norm(x, x.shape[-1:], weight, eps), (x.square().mean(-1) + eps).rsqrt()
        return {"y": 2 * y * (step if unsteady == "y" else 1), "rstd": rstd * (step if unsteady == "rstd" else 1)}

    cell, plan, _ = failed_at(60.0)
    cell = replace(cell, implementation=replace(cell.implementation, forward=forward))
    failed = run_case(cell, LARGE, plan, UNPROBED)
    assert signature(failed) == ("mismatch", "y")
    smallest = shrunk(cell, plan, failed)
    assert (smallest.case.M, smallest.case.N) == (1, 1)
    assert signature(smallest) == told
    if unsteady == "rstd":
        assert signature(run_case(cell, smallest.case, plan)) == ("not_repeatable", "rstd")


def test_without_time_it_is_the_case_itself() -> None:
    cell, plan, failed = failed_at(0.0)
    assert shrunk(cell, plan, failed) is failed
    assert widened(cell, plan, failed, failed) is failed


def test_a_larger_case_has_simple_data_and_room_for_a_pattern() -> None:
    cell, plan, failed = failed_at(60.0)
    small = run_case(cell, case_of("rmsnorm fp32 M=1 N=9 bias=none"), plan)
    assert str(widened(cell, plan, small, failed).case).startswith("rmsnorm fp32 M=40 N=300 eps=1e-05 rows=normal ")
    tall = run_case(cell, case_of("rmsnorm fp32 M=39 N=200 bias=none"), plan)
    larger = widened(cell, plan, tall, failed).case
    assert (larger.M, larger.N) == (78, 400)


def test_a_larger_case_fails_alike_or_is_the_one_before_shrinking() -> None:
    cell, plan, failed = failed_at(60.0)
    other = run_case(cell, case_of("rmsnorm fp32 M=1 N=8 bias=none"), plan)
    assert signature(other) == ("mismatch", "rstd")
    assert widened(cell, plan, other, failed) is failed


def test_a_search_finds_the_simplest_and_nothing_where_nothing_fails() -> None:
    numbers = st.integers(0, 1000)
    assert search(numbers, lambda n: n > 17, seed=0, tries=200, phases=BOTH) == 18
    assert search(numbers, lambda n: False, seed=0, tries=200, phases=BOTH) is None


def test_stop_gets_out_of_a_search() -> None:
    def stops(number: int) -> bool:
        raise Stop

    with pytest.raises(Stop):
        search(st.integers(), stops, seed=0, tries=9, phases=BOTH)


def test_each_cell_has_a_seed_of_its_own() -> None:
    cell, *_ = failed_at(0.0)
    assert seed_of(cell, 0) == seed_of(cell, 0) != seed_of(cell, 1)
    assert seed_of(replace(cell, dtype="fp16"), 0) != seed_of(cell, 0)


def test_a_search_hangs_on_its_seed_alone_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis read all source files, kept their numbers in the working directory, and drew some of them."""

    def read(_: object) -> None:
        raise AssertionError("a source file was read")

    usual = providers._get_local_constants
    monkeypatch.setattr(providers, "constants_from_module", read)
    monkeypatch.setattr(providers, "_seen_modules", set())
    monkeypatch.setattr(providers, "_sys_modules_len", None)
    assert search(st.integers(0, 10**9), lambda number: number > 3, seed=1, tries=300, phases=BOTH) == 4
    assert providers._get_local_constants is usual
