"""The packed bitmask: the order of its bits, and which of them a correct kernel may give either way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normcheck.cases.dtypes import FORMATS
from normcheck.oracle import bitmask
from tests.inner_loop import parametrize

LIMITS = {"lower_clip": 0.0, "upper_clip": 6.0}


@parametrize("n", range(1, 71), inner=11)
def test_round_trip(n: int) -> None:
    @settings(max_examples=25)
    @given(st.integers(1, 3).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, 2 ** (rows * n) - 1))))
    def holds(drawn: tuple[int, int]) -> None:
        rows, bits = drawn
        mask = torch.tensor([bits >> i & 1 == 1 for i in range(rows * n)]).view(rows, n)
        packed = bitmask.pack(mask)
        assert packed.shape == (rows, bitmask.packed_columns(n))
        assert packed.dtype == torch.uint8
        assert torch.equal(bitmask.unpack(packed, n), mask)

    holds()


def test_least_significant_bit_first_and_pad_bits_zero() -> None:
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 0] = mask[0, 3] = mask[0, 8] = mask[1, 7] = mask[1, 10] = True
    assert bitmask.pack(mask).tolist() == [[0b1001, 0b1], [0b1000_0000, 0b100]]
    assert bitmask.pack(torch.ones(1, 11, dtype=torch.bool)).tolist() == [[0xFF, 0b111]]


def test_pad_bits_are_ignored() -> None:
    assert bitmask.unpack(torch.tensor([[0xFF, 0b1111_1000]], dtype=torch.uint8), 11).tolist() == [
        [True] * 8 + [False] * 3
    ]


def doubtful(z: list[float], error: list[float], compare: str, fmt: str = "fp16") -> list[bool]:
    row = torch.tensor([z, error], dtype=torch.float64)
    return bitmask.doubtful(row[:1], row[1:], LIMITS, FORMATS[fmt], compare)[0].tolist()


def test_in_doubt_within_the_error_of_either_limit() -> None:
    z = [-2e-3, -1e-3, 0.5e-3, 1e-3, 2e-3, 3.0, 6 - 1e-3, 6 + 0.5e-3, 6.002]
    expected = [False, True, True, True, False, False, True, True, False]
    # the subtraction of 6 in fp64 is not exact: a hair more than the distance
    assert doubtful(z, [1e-3 * (1 + 1e-9)] * len(z), "fp32") == expected


def test_a_comparison_after_the_store_adds_half_an_ulp() -> None:
    half = 2.0**-9  # of fp16 just below 8 and above 4
    z = [6 - half, 6 + half, 6 - 1.01 * half, 6 + 1.01 * half, 2.0**-25, 2.0**-24]
    assert doubtful(z, [0.0] * 6, "fp32") == [False] * 6
    assert (
        doubtful(z, [0.0] * 6, "rounded") == doubtful(z, [0.0] * 6, "either") == [True, True, False, False, True, False]
    )


@pytest.mark.parametrize("compare", ["fp32", "rounded", "either"])
def test_an_exact_tie_is_never_in_doubt(compare: str) -> None:
    assert doubtful([0.0, 6.0], [0.0, 0.0], compare) == [False, False]
    assert doubtful([0.0, 6.0], [1e-9, 1e-9], compare) == [True, True]


def test_without_a_finite_error_a_bit_is_free() -> None:
    assert doubtful([3.0, 3.0], [math.inf, math.nan], "either") == [True, True]


def test_ties() -> None:
    z = torch.tensor([[0.0, -0.0, 6.0, 5.999, 1e-30]], dtype=torch.float64)
    assert bitmask.ties(z, LIMITS).tolist() == [[True, True, True, False, False]]
