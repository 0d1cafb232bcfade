"""One output against its reference: what is wrong, what is excused, and how its place is told."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.where import GRID_COLUMNS, GRID_ROWS, locate
from normcheck.oracle import judge
from normcheck.oracle.compare import Comparison, Expectation, compare
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.rounding import NO_ROOM, Bound
from normcheck.oracle.tolerances import Model

INF, NAN = math.inf, math.nan
FP16, FP32 = FORMATS["fp16"], FORMATS["fp32"]


def held(expected: torch.Tensor, bound: Bound, fmt: Format = FP32) -> Expectation:
    return Expectation("y", judge.END_TO_END, 0, expected, bound, fmt)


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
    return compare(row(actual), held(row(expected), bound, fmt))


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
    result = compare(torch.tensor([NAN, 3.0]), held(torch.zeros(2).double(), bound))
    assert (result.ratio, result.uncheckable) == (3.0, 1)
    assert result.worst is not None
    assert result.worst.index == (1,)


def test_nothing_to_compare() -> None:
    empty = torch.empty(0, 5, dtype=torch.float64)
    assert compare(empty, held(empty, Bound(empty, None, dict))) == Comparison(0.0, 0, 0)


def test_below_the_floor_details_are_left_out() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    right = held(ones, Bound(ones, None, dict))
    assert compare(ones * 1.5, right, floor=0.6).worst is None
    assert compare(ones * 1.5, right, floor=0.4).worst is not None
    assert compare(ones * 2.5, right, floor=9.0).worst is not None  # wrong is always wanted


CLIPS = (("lower_clip", -0.5), ("upper_clip", 1.0))


@pytest.mark.parametrize("rows", ["blend", "offset", "normal"])
@pytest.mark.parametrize("spoil", [False, True], ids=["right", "wrong"])
def test_blocks_are_judged_as_one(monkeypatch: pytest.MonkeyPatch, spoil: bool, rows: str) -> None:
    """A large case is judged in blocks of rows: the same ratios, counts and worst elements, whatever their height."""
    op = OPS["layernorm_relu_bitmask"]
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
        judging = judge_of(op, case, inputs, Model(), {})
        checked, saved = judge_forward(judging, outputs)
        for fed in (True, False):
            checked += judge_gradients(judging, gradients, saved, given=fed)
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
        (pattern(4, 129, (ALL, 128)), "only column 128 of 129 (the last), in every row"),
        (pattern(4, 129, (ALL, slice(120, None))), "only columns >= 120 of 129, in every row"),
        (pattern(4, 100, (ALL, slice(96, None))), "only columns >= 96 of 100 = N - N % 8, in every row"),
        (pattern(4, 1000, (ALL, slice(768, None))), "only columns >= 768 of 1000 = N - N % 256, in every row"),
        (pattern(40, 8, (slice(32, None), ALL)), "only rows >= 32 of 40 = M - M % 16, every column"),
        (pattern(4, 129, (ALL, slice(0, 16))), "only columns < 16 of 129, in every row"),
        (pattern(4, 129, (ALL, slice(8, 16))), "only columns 8 to 15 of 129, in every row"),
        (pattern(4, 64, (ALL, slice(1, None, 4))), "every 4th column, from 1 on, in every row"),
        (pattern(4, 64, (ALL, slice(0, None, 8))), "every 8th column, in every row"),
        (pattern(256, 4, (slice(63, None, 64), ALL)), "the last row of each 64, every column"),
        (pattern(4, 100, (ALL, slice(31, None, 32))), "the last column of each 32, in every row"),
        (pattern(9, 8, (slice(0, None, 2), ALL)), "every 2nd row, every column"),
        (pattern(9, 8, (slice(0, None, 3), ALL)), "every 3rd row, every column"),
        (pattern(9, 8, (2, ALL)), "all of row 2 of 9"),
        (pattern(9, 8, (8, ALL)), "all of row 8 of 9 (the last)"),
        (pattern(9, 8, (ALL, ALL)), "every element"),
        (pattern(9, 8, (8, 0)), "only row 8 of 9 (the last), only column 0 of 8"),
        (
            pattern(9, 8, (0, 0), (3, 5), (4, 1)),
            "3 of 9 rows, from 0 to 4, 3 of 8 columns, from 0 to 5: 3 of the 9 elements in them",
        ),
        (pattern(9, 64, (2, 3), (2, 11), (2, 19)), "only row 2 of 9, 3 of 64 columns, from 3 to 19"),
        (pattern(1, 8, (0, 7)), "only column 7 of 8 (the last)"),
        (
            pattern(40, 64, (slice(0, None, 2), slice(48, 56)), (slice(1, None, 2), slice(56, None))),
            "every row, only columns >= 48 of 64: 320 of the 640 elements in them",
        ),
        (  # some element of each but the last: what chance leaves alone is no pattern
            pattern(8, 8, *((i, (3 * i) % 7) for i in range(8)), (0, 5)),
            "every row, 7 of 8 columns, from 0 to 6: 9 of the 56 elements in them",
        ),
        (pattern(6, 1, (slice(4, None), 0)), "only rows >= 4 of 6"),
        (pattern(1, 1, (0, 0)), "the only element"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_in_words(wrong: torch.Tensor, summary: str) -> None:
    assert locate(wrong).summary == summary


PLANTED = st.one_of(
    st.tuples(st.just("only {name}s >= {a} of"), st.integers(1, 60), st.just(0)),
    st.tuples(st.just("only {name}s < {a} of"), st.integers(2, 60), st.just(0)),
    st.tuples(st.just("every {a}th {name}"), st.integers(4, 20), st.just(0)),
    st.tuples(st.just("the last {name} of each {a}"), st.integers(4, 20), st.just(0)),
    st.tuples(st.just("the last {b} {name}s of each {a}"), st.integers(5, 20), st.integers(2, 3)),
    st.tuples(st.just("the first {b} {name}s of each {a}"), st.integers(5, 20), st.integers(2, 3)),
    st.tuples(st.just("all of {name} {a} of"), st.integers(0, 60), st.just(0)),
)


def hit_by(words: str, a: int, b: int, i: int) -> bool:
    """Whether the words are true of index i."""
    if ">=" in words or "<" in words:
        return i >= a if ">=" in words else i < a
    if "all of" in words:
        return i == a
    if "every" in words:
        return i % a == 0
    return i % a < b if "first" in words else i % a >= a - max(b, 1)


@given(PLANTED, st.integers(80, 300), st.integers(2, 9), st.booleans())
def test_a_planted_pattern_is_named(planted: tuple[str, int, int], total: int, across: int, by_row: bool) -> None:
    words, a, b = planted
    by_row |= "all of" in words  # all of a column is "only column a", in every row
    hits = torch.tensor([hit_by(words, a, b, i) for i in range(total)])
    wrong = hits[:, None].expand(total, across)
    said = locate(wrong if by_row else wrong.T).summary
    ordinal = {"21th": "21st", "22th": "22nd", "23th": "23rd"}
    expected = words.format(name="row" if by_row else "column", a=a, b=b)
    for wrong_ending, right in ordinal.items():
        expected = expected.replace(wrong_ending, right)
    assert said.startswith(expected), said


@given(st.integers(40, 200), st.integers(40, 200), st.sampled_from([0.005, 0.02, 0.3, 0.7]), st.integers(0, 10**6))
def test_no_pattern_is_seen_in_what_is_random(rows: int, columns: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(rows, columns, generator=generator) < share
    assume(int(wrong.sum()) >= 8)
    said = locate(wrong).summary
    every = said.replace("every row", "").replace("every column", "")
    assert "of the" in said
    assert not any(words in every for words in ("only", "each", "every", "all of", ">=", "<")), said


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


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm_relu_bitmask", "rmsnorm_llama", "fused_add_rmsnorm"])
def test_a_judge_and_its_tensors_are_freed_without_the_garbage_collector(op: str) -> None:
    options = OPS[op].clips((-0.5, 0.5)) if OPS[op].clamped else ()
    case = Case(op=op, dtype="bf16", M=3, N=17, options=options)
    inputs = make(case, OPS[op], "cpu")
    gc.disable()
    try:
        judging = judge_of(OPS[op], case, inputs, Model(), {})
        outputs = {"y": inputs.x.clone()}
        _, saved = judge_forward(judging, outputs)
        judge_gradients(judging, {"dx": inputs.x.clone()}, saved, given=False)
        truth = weakref.ref(judging.truth(slice(0, 3)))
        assert truth() is not None
        del judging
        assert truth() is None
    finally:
        gc.enable()


def test_the_ulps_of_the_worst_element_are_its_own() -> None:
    """A report said 268 ulp of an error of 1.3: those of another element, next to 0."""
    expected, off = (torch.tensor([row], dtype=torch.float64) for row in ([1.0, 2.0**-20], [2.0**-9, 2.0**-13]))
    bound = Bound(torch.tensor([[2.0**-12, 1.0]], dtype=torch.float64), None, dict)
    result = compare(expected + off, held(expected, bound, FP16))
    assert result.worst is not None
    assert (result.worst.index, result.worst.ulps, result.max_ulp) == ((0, 0), 2.0, 2.0**11)
