"""Codes and their scale: rounding to a code, the codes that are right, and what codes say of how they were made."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from normcheck.audit.mutants.quantised import ADDING, BOTH, PLAIN, Quantising
from normcheck.cases.case import GIVEN_SCALES, Case
from normcheck.cases.data_kinds import SCALE_VALUES
from normcheck.cases.dtypes import CODES, DTYPES, FORMATS
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import check
from normcheck.oracle import quantised
from normcheck.oracle.conventions import candidates, in_words, plainest
from normcheck.oracle.judge import Checked, judge_of
from normcheck.oracle.judging import judge_forward
from normcheck.oracle.tolerances import Model, table
from tests.some import some

TOKEN = replace(table().model, scale="token")


def case_of(dtype: str = "bf16", **fields: Any) -> Case:
    return Case(**{"op": PLAIN, "dtype": dtype, "M": 5, "N": 129, "seed": 3, "bias": False, **fields})


def inputs_of(case: Case) -> Inputs:
    return make(case, OPS[case.op], "cpu")


def values_of(fmt: str) -> list[float]:
    """Every finite number that a code of this format stands for, as torch decodes it."""
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, CODES[fmt].torch_name)).double()
    return sorted(set(every[torch.isfinite(every)].tolist()))


@pytest.mark.parametrize("fmt", CODES)
def test_a_number_becomes_the_nearest_code(fmt: str) -> None:
    """By exact distances to all codes: no arithmetic of torch or of a CPU says what is nearest."""
    values = values_of(fmt)
    random = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    asked = [*(random * 0.01).tolist(), *(random * 300).tolist(), *(random * 1e5).tolist(), *values]
    asked += [(a + b) / 2 for a, b in itertools.pairwise(values)]
    got = quantised.quantised(torch.tensor(asked, dtype=torch.float64), CODES[fmt]).tolist()
    for t, code in some(zip(asked, got, strict=True)):
        at = bisect(values, t)
        around = values[max(at - 2, 0) : at + 2]
        least = min(abs(Fraction(t) - Fraction(v)) for v in around)
        near = [v for v in around if abs(Fraction(t) - Fraction(v)) == least]
        assert code in near
        if len(near) == 2:  # the code whose last bit is 0, which the number is without a rest by two steps
            even = [v for v in near if (Fraction(v) / Fraction(abs(near[0] - near[1]))) % 2 == 0]
            assert code == (even or near)[0]


def test_every_kind_of_scale_has_values() -> None:
    assert tuple(SCALE_VALUES) == GIVEN_SCALES
    for kind in GIVEN_SCALES:
        scale = inputs_of(case_of(scale=kind)).scale
        assert scale is not None and scale.shape == (1,) and scale.dtype == torch.float32 and float(scale) > 0
    assert inputs_of(case_of()).scale is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", CODES)
@pytest.mark.parametrize("rows", ["normal", "outlier", "mixed", "zero"])
def test_scale_and_codes_are_those_of_mpmath(fmt: str, dtype: str, rows: str) -> None:
    """The reference by 50 digits: the largest |y| over the largest code, and y over it to the nearest code."""
    case = case_of(dtype, M=2, N=33, rows=rows)
    inputs = inputs_of(case)
    judge = judge_of(OPS[case.op], case, inputs, TOKEN, {})
    span = quantised.span_of(judge, judge.truth(slice(0, 2)))
    scale, nothing = quantised.expected_scale(judge, span, CODES[fmt], "token")
    values = values_of(fmt)
    assert inputs.weight is not None
    with mpmath.workdps(50):
        weight = [mpmath.mpf(w) for w in inputs.weight.double().tolist()]
        for row in range(2):
            x = [mpmath.mpf(v) for v in inputs.x[row].double().tolist()]
            rstd = 1 / mpmath.sqrt(sum(v * v for v in x) / case.N + mpmath.mpf(case.eps))
            y = [v * rstd * w for v, w in zip(x, weight, strict=True)]
            own = max(map(abs, y)) / mpmath.mpf(CODES[fmt].max)
            assert float(scale.low[row]) <= own <= float(scale.high[row])
            assert abs(float(scale.value[row]) - own) <= own * 2.0**-45
            assert bool(nothing[row]) == (rows == "zero")
            if rows == "zero":
                continue
            rounded = float(torch.tensor(float(own)))
            right = quantised.codes_of(span, torch.full((2, 1), rounded, dtype=torch.float64), CODES[fmt], judge.rules)
            for column in range(case.N):
                t = y[column] / mpmath.mpf(rounded)
                at = bisect(values, float(t))
                code = min(values[max(at - 2, 0) : at + 2], key=lambda v: abs(t - v))
                assert float(right.low[row, column]) <= code <= float(right.high[row, column])


def judged(case: Case, model: Model, outputs: dict[str, Tensor]) -> dict[str, Checked]:
    judge = judge_of(OPS[case.op], case, inputs_of(case), model, {})
    return {c.output: c for c in judge_forward(judge, outputs)[0]}


def returned(kernel: Quantising, case: Case) -> dict[str, Tensor]:
    i = inputs_of(case)
    named = {name: t for name, t in (("residual", i.residual), ("scale", i.scale)) if t is not None}
    return kernel.forward(i.x, i.weight, i.bias, eps=case.eps, **named, **case.option_values)


@pytest.mark.parametrize("fmt", CODES)
def test_the_next_code_is_wrong_and_one_in_doubt_is_not(fmt: str) -> None:
    case, kernel = case_of(), Quantising(fmt=fmt, shares="token")
    outputs = returned(kernel, case)
    right = judged(case, TOKEN, outputs)
    assert right["q"].comparison.ratio <= 1 and right["scale"].comparison.ratio <= 1
    judge = judge_of(OPS[case.op], case, inputs_of(case), TOKEN, {})
    span = quantised.span_of(judge, judge.truth(slice(0, 5)))
    allowed = quantised.codes_of(span, outputs["scale"].double(), CODES[fmt], judge.rules)
    doubt = allowed.low < allowed.high
    assert right["q"].comparison.uncheckable == int(doubt.sum())
    values = values_of(fmt)
    for row, column in ((0, 0), (2, 64), (4, 128)):
        at = values.index(float(outputs["q"][row, column]))
        for neighbour in {max(at - 1, 0), min(at + 1, len(values) - 1)} - {at}:
            wrong = {**outputs, "q": outputs["q"].clone()}
            wrong["q"][row, column] = torch.tensor(values[neighbour]).to(wrong["q"].dtype)
            inside = float(allowed.low[row, column]) <= values[neighbour] <= float(allowed.high[row, column])
            assert (judged(case, TOKEN, wrong)["q"].comparison.ratio <= 1) == inside


@pytest.mark.parametrize("factor", [1 + 2.0**-19, 1 - 2.0**-19, 0.5, 2.0, -1.0, math.nan, math.inf, 0.0])
def test_a_scale_that_is_off_is_wrong(factor: float) -> None:
    case = case_of(N=16)
    outputs = returned(Quantising(shares="token"), case)
    off = {**outputs, "scale": outputs["scale"] * factor}
    assert judged(case, TOKEN, outputs)["scale"].comparison.ratio <= 1
    assert not judged(case, TOKEN, off)["scale"].comparison.ratio <= 1


def test_a_floor_is_one_number_for_all_tiny_scales() -> None:
    case = case_of(rows="normal", weights="small", eps=0.5, M=4)
    inputs = inputs_of(case)
    tiny = {
        "q": torch.zeros_like(inputs.x).to(torch.float8_e5m2),
        "scale": torch.full((4, 1), 2.0**-17),
    }
    judge = judge_of(OPS[case.op], case, inputs, TOKEN, {})
    span = quantised.span_of(judge, judge.truth(slice(0, 4)))
    expected, _ = quantised.expected_scale(judge, span, CODES["e5m2"], "token")
    assert float(expected.high.max()) < 2.0**-17  # e5m2 has large codes, so all scales are below it
    assert judged(case, TOKEN, tiny)["scale"].comparison.ratio <= 1
    uneven = {**tiny, "scale": tiny["scale"] * torch.tensor([[1.0], [1.0], [1.5], [1.0]])}
    assert not judged(case, TOKEN, uneven)["scale"].comparison.ratio <= 1
    assert not judged(case, TOKEN, {**tiny, "scale": tiny["scale"] * 4})["scale"].comparison.ratio <= 1
    assert judged(case, replace(TOKEN, scale_floor=2.0**-17), tiny)["scale"].comparison.ratio <= 1
    assert not judged(case, replace(TOKEN, scale_floor=2.0**-18), tiny)["scale"].comparison.ratio <= 1


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 128, 129])
def test_the_shape_of_a_scale_says_what_shares_it(columns: int) -> None:
    case = case_of(N=columns)
    assert quantised.granularity(case, torch.ones(5), "any") == "token"
    assert quantised.granularity(case, torch.ones(5, 1), "token") == "token"
    for name, width in quantised.BLOCKS.items():
        own = torch.ones(-(-columns // width), 5).t()  # as some engines lay it out
        assert quantised.granularity(case, own, name) == name
        assert quantised.granularity(case, own, "any") == ("token" if columns <= width else name)
    assert quantised.granularity(case, torch.ones(5, 7), "any") == ""
    assert quantised.granularity(case, torch.ones(5, 2), "token") == ""


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (Quantising(fmt="int8"), ["quantises y in fp32, as flashinfer does"]),
        (
            Quantising(fmt="int8", before=lambda y, io: y.to(io).float()),
            [
                "rounds y to the dtype of x before it quantises it, as a norm that is not fused does",
                "divides by the scale",
            ],
        ),
        (
            Quantising(fmt="int8", before=lambda y, io: y.to(io).float(), by=lambda v, scale: v * (1 / scale)),
            [
                "rounds y to the dtype of x before it quantises it, as a norm that is not fused does",
                "multiplies by the reciprocal of the scale",
            ],
        ),
    ],
)
def test_a_few_cases_say_how_codes_are_made(kernel: Quantising, words: list[str], dtype: str) -> None:
    implementation, left = kernel.implementation("mine", PLAIN), None
    for case in (
        case_of(dtype, M=20, N=513, scale="normal"),
        case_of(dtype, rows="alternating", weights="codes", scale="ties"),
        case_of(dtype, M=20, N=1025, rows="shifted", scale="normal"),
    ):
        result = check(implementation, OPS[PLAIN], case, "cpu", Ask(conventions=left))
        assert not result.failed, case
        left = result.conventions
    assert left is not None and in_words(OPS[PLAIN], left) == words


@pytest.mark.parametrize("op", BOTH)
def test_what_is_declared_is_left_open_no_more(op: str) -> None:
    free = candidates(OPS[op], table().model)
    assert len(free) == (27 if op == ADDING else 9)
    declared = replace(table().model, round_before_quant="io", sum="exact")
    assert {dict(each).get("round_before_quant") for each in candidates(OPS[op], declared)} == {None}
    assert len(candidates(OPS[op], replace(declared, scaling="division"))) == 1
    fp32 = {plainest(each, case_of("fp32", op=op)) for each in free}
    assert len(fp32) == len(quantised.SCALINGS)


def test_ties_are_where_dividing_and_multiplying_part() -> None:
    """In each format some quotient of weights=codes by the scale ``ties`` is a middle that the product misses."""
    case = case_of("bf16", rows="alternating", weights="codes", scale="ties", N=257)
    inputs = inputs_of(case)
    assert inputs.weight is not None and inputs.scale is not None
    v, scale = inputs.weight.double(), inputs.scale.double()
    for fmt in CODES.values():
        divided = quantised.quantised((v / scale).float().double(), fmt)
        multiplied = quantised.quantised((v * (1 / scale).float().double()).float().double(), fmt)
        assert bool((divided != multiplied).any()), fmt.name


def test_int8_is_a_format_of_whole_numbers() -> None:
    asked = torch.tensor([0.5, 1.5, -2.5, 127.6, -128.9], dtype=torch.float64)
    assert quantised.quantised(asked, CODES["int8"]).tolist() == [0.0, 2.0, -2.0, 127.0, -128.0]
    assert not set(CODES) & set(FORMATS)


def test_each_count_widens_what_it_is_about() -> None:
    case = case_of("fp32")
    inputs = inputs_of(case)

    def widths(**counts: int) -> tuple[float, float]:
        judge = judge_of(OPS[case.op], case, inputs, TOKEN, {})
        judge = replace(judge, rules=replace(judge.rules, count={**judge.rules.count, **counts}))
        span = quantised.span_of(judge, judge.truth(slice(0, 5)))
        scale, _ = quantised.expected_scale(judge, span, CODES["int8"], "token")
        codes = quantised.codes_of(span, scale.value.float().double() / 2.0**16, CODES["int8"], judge.rules)
        fine = quantised.codes_of(span, scale.value.float().double(), replace(CODES["int8"], p=30), judge.rules)
        assert bool((codes.low <= codes.high).all())
        return float((scale.high - scale.low).sum()), float((fine.high - fine.low).sum())

    plain, scale, code = widths(), widths(scale=5000), widths(code=5000)
    assert scale[0] > plain[0] and scale[1] == plain[1]
    assert code[0] == plain[0] and code[1] > plain[1]
