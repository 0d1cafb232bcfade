"""A distance in units in the last place is a number up to a million, and "far" from there on."""

from __future__ import annotations

import math

import pytest

from normcheck.reports._text import in_ulps, most_ulps, ulps


@pytest.mark.parametrize(
    ("value", "number", "words", "most"),
    [
        (0.5, "0.5", "0.5 ulp", "at most 0.5 ulp"),
        (1234.0, "1,234", "1,234 ulp", "at most 1,234 ulp"),
        (999_999.0, "999,999", "999,999 ulp", "at most 999,999 ulp"),
        (1e6, "far", "far", "some of them far"),
        (2.6e44, "far", "far", "some of them far"),
        (math.inf, "far", "far", "some of them far"),
        (None, "-", "- ulp", "at most - ulp"),
    ],
)
def test_a_distance_in_ulps(value: float | None, number: str, words: str, most: str) -> None:
    assert (ulps(value), in_ulps(value), most_ulps(value)) == (number, words, most)
