"""Ulps between two tensors: neighbouring numbers of a format are one apart, for every format that outputs have."""

from __future__ import annotations

import math

import pytest
import torch

from normcheck.oracle.distance import moved, ranks

FORMATS = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_numbers_of_a_format_in_order_are_one_apart(dtype: torch.dtype) -> None:
    """All of them, by what torch says they are worth."""
    bits = 8 * dtype.itemsize
    every = torch.arange(-(1 << bits - 1), 1 << bits - 1)
    every = every.to(torch.int16 if bits == 16 else torch.int8).view(dtype)
    worth = every.double()
    every, worth = every[~worth.isnan()], worth[~worth.isnan()]
    order = worth.argsort(stable=True)
    steps = ranks(every)[order].diff()
    zeros = worth[order].diff() == 0  # the two zeros
    assert int(zeros.sum()) == 1
    assert bool((steps == (~zeros).long()).all())


def test_fp32_is_one_apart_at_every_power_of_two() -> None:
    below = torch.tensor([sign * 2.0**power for power in range(-149, 128) for sign in (-1.0, 1.0)])
    above = torch.nextafter(below, torch.full_like(below, torch.inf))
    assert bool((ranks(above) - ranks(below) == 1).all())


def test_codes_are_as_far_apart_as_their_numbers() -> None:
    changed, ulps = moved(torch.tensor([-128, 5, 5], dtype=torch.int8), torch.tensor([127, 5, 4], dtype=torch.int8))
    assert (changed.tolist(), ulps) == ([True, False, True], 255.0)


@pytest.mark.parametrize("dtype", [torch.float32, *FORMATS])
def test_a_nan_is_infinitely_far_from_a_number_and_no_distance_from_another(dtype: torch.dtype) -> None:
    nan, one = torch.tensor([math.nan, 1.0]).to(dtype), torch.tensor([1.0, 1.0]).to(dtype)
    assert moved(nan, nan)[1] == 0.0
    assert not bool(moved(nan, nan)[0].any())
    changed, ulps = moved(nan, one)
    assert (changed.tolist(), ulps) == ([True, False], math.inf)
