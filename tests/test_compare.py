"""One output against its reference: what is wrong, what is excused, and how its place is told."""

from __future__ import annotations

import math

import pytest
import torch

from normcheck import discovery, judge
from normcheck.case import Case
from normcheck.compare import Comparison, compare
from normcheck.formats import FORMATS, Format
from normcheck.inputs import make
from normcheck.locate import GRID_COLUMNS, GRID_ROWS, locate
from normcheck.table import Model
from normcheck.tolerance import NO_ROOM, Bound

INF, NAN = math.inf, math.nan
FP16, FP32 = FORMATS["fp16"], FORMATS["fp32"]


def one(actual: float, expected: float, upper: float, lower: float | None = None, fmt: Format = FP32) -> Comparison:
    """A single element among 15 that are right. A bound of 0 is what stands for it."""
    upper, lower = (None if side is None else max(side, NO_ROOM) for side in (upper, lower))

    def row(value: float, rest: float = 1.0) -> torch.Tensor:
        values = torch.full((4, 4), rest, dtype=torch.float64)
        values[2, 1] = value
        return values

    bound = Bound(
        row(upper), None if lower is None else row(lower), lambda: {"store": row(upper), "ops": row(0.0, 0.0)}
    )
    return compare(row(actual), row(expected), bound, fmt)


@pytest.mark.parametrize(
    ("actual", "expected", "bound", "ratio"),
    [(1.5, 1.0, 1.0, 0.5), (2.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.5, 2.0), (-1.0, -1.0, 0.0, 0.0), (1.0, 1.0, INF, 0.0)],
)
def test_ratio_is_error_over_bound(actual: float, expected: float, bound: float, ratio: float) -> None:
    result = one(actual, expected, bound)
    assert result.ratio == ratio
    assert (result.wrong is not None) == (ratio > 1)
    assert result.numel == 16


def test_the_worst_element_is_told() -> None:
    result = one(3.0, 1.0, 0.5)
    assert result.worst is not None
    assert result.wrong is not None
    assert (result.worst.index, result.worst.actual, result.worst.expected) == ((2, 1), 3.0, 1.0)
    assert (result.worst.error, result.worst.bound, result.worst.terms) == (2.0, 0.5, (("store", 0.5),))
    assert result.wrong.nonzero().tolist() == [[2, 1]]
    assert (result.max_abs, result.max_ulp) == (2.0, 2.0 * 2**23)


@pytest.mark.parametrize("expected", [0.0, 1.0, 1e30])
def test_nan_is_wrong(expected: float) -> None:
    result = one(NAN, expected, 1e20)
    assert result.ratio == INF
    assert result.non_finite
    assert result.worst is not None
    assert math.isnan(result.worst.actual)


def test_nan_in_one_of_many_is_counted_once() -> None:
    result = one(NAN, 1.0, 1.0)
    assert result.wrong is not None
    assert int(result.wrong.sum()) == 1


@pytest.mark.parametrize(
    ("actual", "expected", "bound", "right"),
    [
        (INF, 65519.0, 16.0, True),  # the bound reaches 65520, which rounds to infinity
        (INF, 65500.0, 16.0, False),
        (-INF, -65519.0, 16.0, True),
        (-INF, 65519.0, 16.0, False),
        (INF, 0.0, 1e6, True),  # the bound spans zero: either sign may overflow
        (-INF, 0.0, 1e6, True),
        (INF, -100.0, 1e6, True),
        (INF, -1e6, 1e3, False),
        (65504.0, 1e6, 1.0, True),  # saturated
        (-65504.0, -1e6, 1.0, True),
        (-65504.0, 1e6, 1.0, False),
        (65472.0, 1e6, 1.0, False),
        (65504.0, 65000.0, 1.0, False),  # nothing to saturate
        (NAN, 1e6, 1.0, False),
        (NAN, 0.0, 1e6, False),
    ],
)
def test_overflow_of_the_store(actual: float, expected: float, bound: float, right: bool) -> None:
    assert (one(actual, expected, bound, fmt=FP16).ratio <= 1) is right


def test_a_bound_of_zero_wants_the_exact_value() -> None:
    assert one(1.0, 1.0, 0.0).ratio == 0
    assert one(-0.0, 0.0, 0.0).ratio == 0
    assert one(5e-324, 0.0, 0.0).ratio <= 1  # below fp32, whose values these are, nothing is told apart
    assert one(2.0**-149, 0.0, 0.0).ratio > 1
    assert one(math.nextafter(1.0, 2.0), 1.0, 0.0).ratio > 1


@pytest.mark.parametrize(
    ("actual", "ratio"), [(1.0, 0.0), (2.0, 0.5), (4.0, 1.5), (0.5, 1.0), (0.0, 2.0), (INF, INF), (NAN, INF)]
)
def test_asymmetric(actual: float, ratio: float) -> None:
    assert one(actual, 1.0, upper=2.0, lower=0.5).ratio == ratio


def test_an_unbounded_upper_side_still_checks_the_lower() -> None:
    assert one(1e9, 1.0, upper=INF, lower=0.5).ratio == 0
    assert one(0.0, 1.0, upper=INF, lower=0.5).ratio == 2
    assert one(NAN, 1.0, upper=INF, lower=0.5).ratio == INF


@pytest.mark.parametrize("bound", [INF, NAN])  # 0 * inf, where eps is 0
@pytest.mark.parametrize("actual", [1.0, 1e9, INF, NAN])
def test_uncheckable_is_counted_and_never_wrong(actual: float, bound: float) -> None:
    result = one(actual, 1.0, bound)
    assert (result.uncheckable, result.wrong, result.ratio <= 1) == (1, None, True)


def test_an_uncheckable_element_does_not_hide_another() -> None:
    bound = Bound(torch.tensor([INF, 1.0]).double(), None, dict)
    result = compare(torch.tensor([NAN, 3.0]), torch.zeros(2).double(), bound, FP32)
    assert (result.ratio, result.uncheckable) == (3.0, 1)
    assert result.worst is not None
    assert result.worst.index == (1,)


def test_nothing_to_compare() -> None:
    empty = torch.empty(0, 5, dtype=torch.float64)
    assert compare(empty, empty, Bound(empty, None, dict), FP32) == Comparison(0.0, 0, 0)


def test_below_the_floor_details_are_left_out() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    bound = Bound(ones, None, dict)
    assert compare(ones * 1.5, ones, bound, FP32, floor=0.6).worst is None
    assert compare(ones * 1.5, ones, bound, FP32, floor=0.4).worst is not None
    assert compare(ones * 2.5, ones, bound, FP32, floor=9.0).worst is not None  # wrong is always wanted


CLIPS = (("lower_clip", -0.5), ("upper_clip", 1.0))


@pytest.mark.parametrize("rows", ["blend", "offset", "normal"])
@pytest.mark.parametrize("spoil", [False, True], ids=["right", "wrong"])
def test_blocks_are_judged_as_one(monkeypatch: pytest.MonkeyPatch, spoil: bool, rows: str) -> None:
    """A large case is judged in blocks of rows: the same ratios, counts and worst elements, whatever their height."""
    op = discovery.ops()["layernorm_relu_bitmask"]
    case = Case(op=op.name, dtype="fp16", M=23, N=9, rows=rows, weights="probe", options=CLIPS)
    inputs = make(case, op, "cpu")
    x = inputs.x.double()
    mean, var = x.mean(1), x.var(1, unbiased=False)
    rstd = (var + case.eps).rsqrt()
    z = (x - mean[:, None]) * rstd[:, None] * inputs.weight + inputs.bias
    y = z.clamp(-0.5, 1.0).half()
    bits = (z > -0.5) & (z < 1.0)
    dx = inputs.dy.clone()
    if spoil:
        y[17, 3] += 3
        bits[5] = ~bits[5]
        mean[22] += 1
    outputs = {"y": y, "mean": mean.float(), "rstd": rstd.float(), "bitmask": bits}
    gradients = {"dx": dx, "dw": inputs.dy.sum(0), "db": inputs.dy.sum(0)}

    def judged(elements: int) -> tuple[list[object], list[float]]:
        """What must stay the same, and numbers whose last digits may change with the order of a sum over rows."""
        monkeypatch.setattr(judge, "BLOCK_ELEMENTS", {"cpu": elements})
        judging = judge.judge_of(op, case, inputs, Model(), {})
        checked, saved = judge.judge_forward(judging, outputs)
        for given in (True, False):
            checked += judge.judge_gradients(judging, gradients, saved, given=given)
        same: list[object] = []
        numbers: list[float] = []
        for output, check, c in ((c.output, c.check, c.comparison) for c in checked):
            wrong = None if c.wrong is None else c.wrong.nonzero().tolist()
            same.append((output, check, c.numel, c.uncheckable, c.non_finite, wrong, c.worst and c.worst.index))
            numbers += [c.ratio, c.max_abs, c.max_ulp]
            if c.worst is not None:
                numbers += [c.worst.actual, c.worst.expected, c.worst.error, c.worst.bound]
        return same, numbers

    same, numbers = judged(1 << 15)
    assert {name for name, *_ in same} == {"mean", "rstd", "y", "bitmask", "dx", "dw", "db"}  # type: ignore[misc]
    for elements in (1, 9 * 4, 9 * 22):
        again, close = judged(elements)
        assert again == same
        assert close == pytest.approx(numbers, rel=1e-6)


def pattern(rows: int, columns: int, *where: tuple[object, object]) -> torch.Tensor:
    wrong = torch.zeros(rows, columns, dtype=torch.bool)
    for place in where:
        wrong[place] = True
    return wrong


ALL = slice(None)


@pytest.mark.parametrize(
    ("wrong", "summary"),
    [
        (pattern(4, 129, (ALL, 128)), "every row, only column 128 of 129 (the last)"),
        (pattern(4, 129, (ALL, slice(120, None))), "every row, columns 120 to 128 of 129 (the tail)"),
        (pattern(4, 129, (ALL, slice(8, 16))), "every row, columns 8 to 15 of 129"),
        (pattern(4, 64, (ALL, slice(1, None, 4))), "every row, one column in 4, from 1"),
        (pattern(9, 8, (slice(0, None, 2), ALL)), "one row in 2, from 0, every column"),
        (pattern(9, 8, (slice(0, None, 3), ALL)), "one row in 3, from 0, every column"),
        (pattern(9, 8, (2, ALL)), "only row 2 of 9, every column"),
        (pattern(9, 8, (8, 0)), "only row 8 of 9 (the last), only column 0 of 8"),
        (pattern(9, 8, (0, 0), (3, 5), (4, 1)), "3 of 9 rows, from 0 to 4, 3 of 8 columns, from 0 to 5"),
        (pattern(1, 8, (0, 7)), "only column 7 of 8 (the last)"),
        (pattern(6, 1, (slice(4, None), 0)), "rows 4 to 5 of 6 (the tail)"),
        (pattern(1, 1, (0, 0)), "the only element"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_in_words(wrong: torch.Tensor, summary: str) -> None:
    assert locate(wrong).summary == summary


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (8, 48), (9, 49), (100, 1000), (1, 20000), (4097, 3)])
def test_the_picture(shape: tuple[int, int]) -> None:
    rows, columns = shape
    where = locate(pattern(rows, columns, (rows - 1, columns - 1)))
    assert (where.rows, where.columns) == shape
    assert len(where.grid) == min(rows, GRID_ROWS)
    assert {len(row) for row in where.grid} == {min(columns, GRID_COLUMNS)}
    cells = [share for row in where.grid for share in row]
    assert cells[-1] > 0
    assert sum(share > 0 for share in cells) == 1
    assert {share for row in locate(torch.ones(shape, dtype=torch.bool)).grid for share in row} == {1.0}
