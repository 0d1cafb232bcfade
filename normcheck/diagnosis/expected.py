"""What a formula predicts of one output, and how a store and an error before it make an interval of a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.diagnosis.formula import Call
from normcheck.oracle.forward_bounds import StatisticsBound


@dataclass(frozen=True, slots=True)
class Expected:
    """What a formula predicts of one output: each element lies from ``low`` to ``high``."""

    output: str
    low: Tensor
    high: Tensor

    @property
    def unbounded(self) -> Tensor:
        """Bool: the elements of which nothing is said."""
        return (self.low == -torch.inf) & (self.high == torch.inf)

    def holds(self, returned: Tensor) -> Tensor:
        """Bool: whether each element that was ``returned`` lies within, or nothing is said of it."""
        got = returned.double().reshape(self.low.shape)
        inside = (got >= self.low) & (got <= self.high)
        unknown = ~(torch.isfinite(self.low) & torch.isfinite(self.high))
        overflow = unknown & ~torch.isfinite(got)
        return inside | overflow | self.unbounded


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward of a formula: its results, the errors of its statistics, the bits in doubt, what it predicts, and
    whether that ``fits`` what was returned (only of the textbook's).
    """

    call: Call
    given: StatisticsBound
    doubt: Tensor | None
    expected: tuple[Expected, ...]
    fits: bool = False


def bounded(error: Tensor) -> Tensor:
    """``error`` with inf for NaN, which 0 * inf gives: there is no bound then."""
    return torch.where(torch.isnan(error), torch.inf, error)


def moved(call: Call, output: str, value: Tensor, error: Tensor, fmt: Format) -> Expected:
    """The numbers that a store may make of ``value`` moved by ``error`` either way."""
    store, error = call.formula.store, bounded(error)
    low, high = store(call, value - error, fmt, output), store(call, value + error, fmt, output)
    if fmt.name == "fp32":
        low, high = (
            low.nextafter(torch.tensor(-torch.inf, dtype=low.dtype)),
            high.nextafter(torch.tensor(torch.inf, dtype=high.dtype)),
        )
    return Expected(output, low, high)
