"""How far all roundings of a kernel together can move what it computes, by interval arithmetic.

Each operation is (a op b)(1 + d) with |d| <= u, the standard model. By the mean value theorem the result moves by at
most the sum over all d of u times the largest derivative while every d runs from -u to u. mpmath's intervals enclose
those derivatives, so nothing of second order is left out.

For any fixed roundings a kernel is linear in its terms, and its bound is a sum of their magnitudes. So it holds for all
terms, of whatever signs, if it holds for each of them alone. What only multiplies a term is 1: an error is relative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from mpmath import iv

from tests.quality.rounded_kernels import Order

Interval = Any
"""A number of mpmath's interval context."""


@dataclass
class Roundings:
    """The largest |d| of each rounding so far; ``unit`` is that of one which is not known."""

    unit: Fraction
    sizes: list[Fraction] = field(default_factory=list)

    def rounded(self, value: Interval, slopes: Mapping[int, Interval], size: Fraction | None = None) -> Traced:
        size = self.unit if size is None else size
        factor = 1 + _interval(-size, size)
        moved = {at: slope * factor for at, slope in slopes.items()}
        moved[len(self.sizes)] = value
        self.sizes.append(size)
        return Traced(self, value * factor, moved)


@dataclass(frozen=True)
class Traced:
    """An enclosure of a computed value and of its derivatives by each d; ``known``: the value of a constant."""

    roundings: Roundings
    value: Interval
    slopes: Mapping[int, Interval]
    known: Fraction | None = None

    def __add__(self, other: Traced) -> Traced:
        return self.roundings.rounded(self.value + other.value, self._slopes(other, iv.mpf(1), iv.mpf(1)))

    def __sub__(self, other: Traced) -> Traced:
        return self.roundings.rounded(self.value - other.value, self._slopes(other, iv.mpf(1), iv.mpf(-1)))

    def __mul__(self, other: Traced) -> Traced:
        value, slopes = self.value * other.value, self._slopes(other, other.value, self.value)
        if _is_power_of_two(self.known) or _is_power_of_two(other.known):
            return Traced(self.roundings, value, slopes)
        return self.roundings.rounded(value, slopes)

    def __truediv__(self, other: Traced) -> Traced:
        value = self.value / other.value
        if self.known is None or other.known is None:
            slopes = self._slopes(other, 1 / other.value, -value / other.value)
            return (
                Traced(self.roundings, value, slopes)
                if _is_power_of_two(other.known)
                else self.roundings.rounded(value, slopes)
            )
        exact = self.known / other.known
        error = Fraction(float(np.float32(float(self.known)) / np.float32(float(other.known)))) - exact
        if error:  # the rounding of a constant is known, and never the worst one
            return self.roundings.rounded(value, {}, min(self.roundings.unit, abs(error / exact)))
        return Traced(self.roundings, value, {}, exact)

    def _slopes(self, other: Traced, by_self: Interval, by_other: Interval) -> dict[int, Interval]:
        zero = iv.mpf(0)
        return {
            at: self.slopes.get(at, zero) * by_self + other.slopes.get(at, zero) * by_other
            for at in self.slopes.keys() | other.slopes.keys()
        }


def _interval(low: Fraction, high: Fraction) -> Interval:
    return iv.mpf([iv.mpf(low.numerator) / low.denominator, iv.mpf(high.numerator) / high.denominator])


def _is_power_of_two(value: Fraction | None) -> bool:
    return value is not None and (
        value.numerator & (value.numerator - 1),
        value.denominator & (value.denominator - 1),
    ) == (0, 0)


class Tracing:
    """The arithmetic that traces. ``alone``: the one term that is not 0."""

    def __init__(self, order: Order, alone: str, unit: Fraction) -> None:
        self.order, self.alone, self.roundings = order, alone, Roundings(unit)

    def leaf(self, name: str) -> Traced:
        absent = (name in self.order.terms and name != self.alone) or name in self.order.negligible
        return Traced(self.roundings, iv.mpf(0 if absent else 1), {})

    def difference(self, name: str, less: str) -> Traced:
        return self.roundings.rounded(self.leaf(name).value, {})

    def one_plus(self, name: str) -> Traced:
        return self.roundings.rounded(self.leaf(name).value, {})

    def constant(self, value: int) -> Traced:
        return Traced(self.roundings, iv.mpf(value), {}, Fraction(value))

    def fused(self, a: Traced, b: Traced) -> Traced:
        return Traced(self.roundings, a.value * b.value, a._slopes(b, b.value, a.value))


def most_moved(order: Order, unit: Fraction) -> float:
    """An upper bound of |computed - exact| / the sum of the terms' magnitudes, with roundings of up to ``unit``."""
    return max(_moved_alone(order, term, unit) for term in order.terms)


def _moved_alone(order: Order, term: str, unit: Fraction) -> float:
    exact = order.kernel(Tracing(order, term, Fraction(0))).value
    tracing = Tracing(order, term, unit)
    computed, moved = order.kernel(tracing), iv.mpf(0)
    for at, slope in computed.slopes.items():
        size = tracing.roundings.sizes[at]
        moved += abs(slope) * _interval(size, size)
    return float((moved / abs(exact)).b)
