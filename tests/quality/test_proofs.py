"""The counts of tolerances.toml, proved for the orders of evaluation that it allows; a count that is too small is not.

Gappa proves what it reaches, where it is installed, and interval arithmetic all sums, with terms of any sign. Each
proof's goal has the table's number in it. docs/bounds.md says what is proved and what is argued.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS
from normcheck.cases.ops import OPS
from normcheck.oracle import backward_bounds, casting, forward_bounds
from normcheck.oracle.backward_bounds import Block, GradientSums
from normcheck.oracle.reference import Backward, Forward, Rows, Scale
from normcheck.oracle.rounding import Rules, rules
from normcheck.oracle.tolerances import Model, table
from tests.quality.gappa_scripts import proves, script
from tests.quality.rounded_kernels import ORDERS, Order
from tests.quality.rounding_derivatives import most_moved

GAPPA = shutil.which("gappa")
needs_gappa = pytest.mark.skipif(GAPPA is None, reason="gappa is not installed: apt-get install gappa")

BY_GAPPA = [order for order in ORDERS if order.by_gappa]
BY_INTERVALS = [order for order in ORDERS if order.terms]

SPARE: Mapping[str, tuple[int, str]] = {
    "var": (1, "the corrected two-pass variance takes 5, the plain one 4; Welford's has a term of its own"),
    "rms": (2, "x * x, 1/N and the product by it are 3, and a sum of N terms has N - 1 adds"),
    "c2": (1, "1 + weight, its product with dy, 1/N and the product by it are 4, and there are N - 1 adds"),
    "dw": (2, "x - mean, its product with rstd and that with dy are 3, and there are M - 1 adds"),
    "db": (1, "nothing but the M - 1 adds"),
}
"""Counts that are larger than any order here needs: by how much, and why. H(n) is n, one more than the adds."""


def with_count(count: str, value: int) -> Rules:
    """The numbers of the table with another ``value`` of one count."""
    numbers = rules(OPS["layernorm"], Model())
    changed = {**numbers.count, count: value}
    return replace(numbers, count=changed, k_y=changed["y"])


def proved_by_gappa(order: Order, numbers: Rules) -> bool:
    assert GAPPA is not None
    return proves(GAPPA, script(order, numbers))


def proved_by_intervals(order: Order, numbers: Rules) -> bool:
    return most_moved(order, Fraction(numbers.u)) <= order.allowed(numbers)


def least(count: str) -> int:
    """The smallest number with which all orders are proved."""
    return table().count[count] - SPARE.get(count, (0, ""))[0]


OF_A_GATE = {"exp", "exp_argument", "sigmoid", "sigmoid_absolute", "activation", "slope", "gated", "dgate"}
OF_A_LENGTH = {"y_l2norm", "eps"}
ARGUED = {"dresidual", "lanes", "scale", "code", "factor", "xhat_centered", *OF_A_GATE, *OF_A_LENGTH}
"""The counts that are argued only, in words, in docs/bounds.md."""


def test_every_count_has_a_proof() -> None:
    assert {order.count for order in ORDERS} == set(table().count) - ARGUED
    assert {order.count for order in BY_GAPPA} == set(table().count) - ARGUED


@pytest.mark.slow
@needs_gappa
@pytest.mark.parametrize("order", BY_GAPPA, ids=str)
def test_gappa_proves_the_count(order: Order) -> None:
    numbers = with_count(order.count, table().count[order.count])
    assert proved_by_gappa(order, numbers), f"this is not so:\n{script(order, numbers)}"


@pytest.mark.slow
@needs_gappa
def test_no_script_is_true_of_anything() -> None:
    """As it would be if what it is given cannot be: there is no kernel without a rounding."""
    for order in BY_GAPPA:
        if "N = " not in order.name or order.name.endswith("N = 2"):
            assert not proved_by_gappa(replace(order, allowed=lambda rules: 0.0), with_count("y", 4)), order


@needs_gappa
def test_a_hint_that_is_not_so_is_no_proof() -> None:
    order = next(order for order in BY_GAPPA if order.divides_by == "root")
    text = script(order, with_count("y", 4)).replace("-(r - 1 / root) / r", "-(r - 1 / root) / (2 * r)")
    with pytest.raises(ValueError, match="not trivially equal"):
        proves(str(GAPPA), text)


@pytest.mark.slow
@pytest.mark.parametrize("order", BY_INTERVALS, ids=str)
def test_intervals_prove_the_count_for_terms_of_any_sign(order: Order) -> None:
    numbers = with_count(order.count, table().count[order.count])
    assert proved_by_intervals(order, numbers), f"{order}: {order.count} = {numbers.count[order.count]} is too small"


@pytest.mark.slow
@pytest.mark.parametrize("count", SPARE)
def test_what_is_spare_is_not_needed(count: str) -> None:
    numbers = with_count(count, least(count))
    assert all(proved_by_intervals(order, numbers) for order in BY_INTERVALS if order.count == count)


def test_the_page_says_what_is_proved_and_what_is_spare() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bounds.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| `(\w+)` \| (\d+) \| (-?\d+) \| (Gappa.*?) \|", page, re.MULTILINE)
    assert [(count, int(value), int(needed)) for count, value, needed, _ in said] == [
        (count, value, least(count)) for count, value in table().count.items() if count not in ARGUED
    ]
    assert {count for count, _, _, by in said if "intervals" in by} == {order.count for order in BY_INTERVALS}
    assert set(re.findall(r"^- `(\w+)`, (?:\d+): ", page, re.MULTILINE)) == ARGUED


# a count that is one too small


@pytest.mark.slow
@needs_gappa
@pytest.mark.parametrize("count", sorted({order.count for order in BY_GAPPA} - {"mean"}))
def test_gappa_refuses_a_count_that_is_one_too_small(count: str) -> None:
    """Only the running mean needs all of the mean's count, and Gappa does not reach it."""
    numbers = with_count(count, least(count) - 1)
    assert not all(proved_by_gappa(order, numbers) for order in BY_GAPPA if order.count == count)


@pytest.mark.slow
@pytest.mark.parametrize("count", sorted({order.count for order in BY_INTERVALS}))
def test_intervals_refuse_a_count_that_is_one_too_small(count: str) -> None:
    numbers = with_count(count, least(count) - 1)
    assert not all(proved_by_intervals(order, numbers) for order in BY_INTERVALS if order.count == count)


class Numbers:
    """The arithmetic that computes, on numbers that ``make`` makes: rounded in numpy's fp32, exact in fractions."""

    def __init__(self, make: Callable[[Any], Any], values: Mapping[str, Any]) -> None:
        self.make, self.values = make, values

    def leaf(self, name: str) -> Any:
        return self.make(self.values[name])

    def difference(self, name: str, less: str) -> Any:
        return self.leaf(name) - self.leaf(less)

    def one_plus(self, name: str) -> Any:
        return self.make(1) + self.leaf(name)

    def constant(self, value: int) -> Any:
        return self.make(value)

    def fused(self, a: Any, b: Any) -> Any:
        return a * b


S = float.fromhex("0x1.002e9aff675c2p+0")  # the root of a variance in fp64: it and its reciprocal round the same way
X, MEAN = float.fromhex("0x1.003416p+0"), float.fromhex("-0x1.00015p-24")
FOUND = {
    "y: divided by the root, statistics in fp64": {"x": X, "m": MEAN, "w": float.fromhex("0x1.002e9ep+0")},
    "y_zero_centered: divided by the root, statistics in fp64": {
        "x": X,
        "m": MEAN,
        "w": float.fromhex("0x1.74e804p-11"),
    },
    "y_without_weight: divided by the root, statistics in fp64": {"x": X, "m": MEAN},
    "xhat: divided by the root, statistics in fp64": {"x": float.fromhex("0x1.003418p+0")},
    "dx_elementwise: N dy g, sum first, layernorm, 1 + weight": {
        "x": 1.0,
        "m": 0.0,
        "w": float.fromhex("0x1.7fe804p-11"),
        "dy": float.fromhex("0x1.000802p+0"),
        "c1": float.fromhex("-0x1.000d1cp-12"),
        "c2": float.fromhex("-0x1.00015p-12"),
        "r": float.fromhex("0x1.001p+0"),
    },
}
"""Numbers, found by a search, with which a right kernel in fp32 errs by more than one rounding less would allow."""


@pytest.mark.parametrize("name", FOUND)
def test_a_right_kernel_in_fp32_needs_the_count(name: str) -> None:
    order = next(order for order in ORDERS if str(order) == name)
    root, saved = np.float32(S), np.float32(1 / S)
    computed = order.kernel(Numbers(np.float32, {**FOUND[name], "root": root}))
    exact = order.kernel(Numbers(Fraction, {**FOUND[name], "root": 1 / Fraction(float(saved))}))
    assert isinstance(computed, np.float32)
    error = abs(Fraction(float(computed)) / exact - 1)
    count = table().count[order.count]
    assert order.allowed(with_count(order.count, count - 1)) < error <= order.allowed(with_count(order.count, count))


# the formulas that the goals stand for


FP32, FP64 = FORMATS["fp32"], FORMATS["fp64"]


def column(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def rows(xhat: Tensor, *, mean: Tensor | None = None) -> Rows:
    return Rows(xhat, mean, column(1.0), column(1.0), xhat)


def saved(numbers: Rules, one: Rows) -> forward_bounds.StatisticsBound:
    """As of a row that is too long for lanes to differ."""
    return forward_bounds.saved_statistics(replace(numbers, count={**numbers.count, "lanes": 0}), one)


def bound_of_y(numbers: Rules) -> float:
    one = rows(column(1.0), mean=column(0.0))
    fwd = Forward(one.xh, one.xh, one.xh)
    scale = Scale(torch.ones(1))
    return float(forward_bounds.output_y(numbers, one, fwd, scale, None, saved(numbers, one), FP32).y.upper)


def bound_of_xhat(numbers: Rules) -> float:
    one = rows(column(1.0))
    found = casting.cast(numbers, one, saved(numbers, one), FP64)
    return float(found.value - found.low)


def bound_of_mean(numbers: Rules) -> float:
    found = forward_bounds.statistics(numbers, rows(column(1.0, 1.0), mean=column(1.0)), 0.0).mean
    assert found is not None
    return float(found.upper)


def bound_of_variance(numbers: Rules, mean: Tensor | None) -> float:
    """From the bound of rstd, which is the interval of the variance, here 1 with eps 0, through its root."""
    exact_root = replace(numbers, model=replace(numbers.model, rsqrt_ulp=0), c_var=0.0)
    found = forward_bounds.statistics(exact_root, rows(column(1.0, -1.0), mean=mean), 0.0).rstd
    assert found is not None
    dq = 1 - 1 / (1 + float(found.upper)) ** 2
    return (dq - numbers.u) / (1 + numbers.u)


def bound_of_dx(numbers: Rules, xhat: Tensor, *, centered: bool) -> float:
    """Of a row whose dy is 1 and -1: both means are 0, but for what their sums err by."""
    dy, zero = column(1.0, -1.0), column(0.0)
    found = Backward(dy, zero, zero if centered else None, dy, dy.sum(0), dy.sum(0))
    block = Block(rows(xhat, mean=zero if centered else None), found, dy, forward_bounds.EXACT)
    return float(backward_bounds.output_dx(numbers, block, FP32)[0].upper[0, 0])


def bound_of_sums(numbers: Rules, output: Any) -> float:
    one = torch.ones(1, dtype=torch.float64)
    return float(output(numbers, 2, one, GradientSums(one, one * 0, one), None, FP32).upper)


def beyond_elementwise(numbers: Rules, bound: float) -> float:
    return (bound - numbers.count["dx_elementwise"] * numbers.u) / (1 + 8 * numbers.u)


NONE, ONES = column(0.0, 0.0), column(1.0, 1.0)
BOUNDS: Mapping[str, Callable[[Rules], float]] = {
    "mean": bound_of_mean,
    "var": lambda numbers: bound_of_variance(numbers, column(0.0)),
    "rms": lambda numbers: bound_of_variance(numbers, None),
    "y": bound_of_y,
    "y_zero_centered": lambda numbers: bound_of_y(replace(numbers, k_y=numbers.count["y_zero_centered"])),
    "y_without_weight": lambda numbers: bound_of_y(replace(numbers, k_y=numbers.count["y_without_weight"])),
    "xhat": bound_of_xhat,
    "dx_elementwise": lambda numbers: bound_of_dx(numbers, NONE, centered=False),
    "c1": lambda numbers: beyond_elementwise(numbers, bound_of_dx(numbers, ONES, centered=False)),
    "c2": lambda numbers: beyond_elementwise(numbers, bound_of_dx(numbers, NONE, centered=True)),
    "dw": lambda numbers: bound_of_sums(numbers, backward_bounds.output_dw),
    "db": lambda numbers: bound_of_sums(numbers, backward_bounds.output_db),
}
"""The bounds themselves, of 1 or of a sum of two terms, in which nothing errs but what the count counts."""


@pytest.mark.parametrize("count", BOUNDS)
@pytest.mark.parametrize("more", [0, 1])
def test_a_goal_is_the_bound_that_judges(count: str, more: int) -> None:
    numbers = with_count(count, table().count[count] + more)
    orders = [order for order in ORDERS if order.count == count]
    order = next((order for order in orders if order.name.endswith("N = 2")), orders[0])
    assert BOUNDS[count](numbers) == pytest.approx(order.allowed(numbers), rel=1e-6)
