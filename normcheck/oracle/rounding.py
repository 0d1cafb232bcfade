"""The parts of every bound, which says how far each element of a correct output may lie from the fp64 reference.

Every bound is  E + one rounding of the store.  E bounds the error of fp32 arithmetic before the store:  unit roundoff
x a counted number of roundings x condition sums of the data, computed in fp64 with the reference. Standard rounding
analysis (Higham, Accuracy and Stability, ch. 3 and 4): ``gam(k)`` = k u / (1 - k u). This file has the numbers and the
store; ``forward_bounds.py`` and ``backward_bounds.py`` have the E of each output.

The numbers come from tolerances.toml. No implementation is named here; ``Model`` has the facts that one declares about
its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.op import Op
from normcheck.oracle.tolerances import Model, table

FLT_MAX = FORMATS["fp32"].max
NO_ROOM = 1e-300  # stands for a bound of exactly 0: no error is a ratio of 0, any error is a huge one
_EXPONENT = 0x7FF0000000000000  # the exponent field of an fp64 a: alone it is 2^floor(log2(a))


LANES = 1024
"""The most threads of a block. In a row of more numbers some thread has two or more, and no sum of them is in doubt."""


@dataclass(frozen=True)
class Rules:
    """The numbers of one op under one model, ready for the formulas.

    ``u``: unit roundoff, ``eta``: the largest error by underflow, both of the accumulation format; ``c_var``: 1 if the
    variance need not be two-pass; ``k_y``: roundings of y; ``doubt``: the name of the term from a ``Doubt``.
    """

    model: Model
    centered: bool
    doubt: str
    u: float
    eta: float
    c_var: float
    k_y: int
    count: Mapping[str, int]
    store: Mapping[str, float]
    safety: float

    def chain(self, n: int) -> int:
        """H(n): the longest chain of adds that a summand passes through in a sum of n terms."""
        chain = self.model.chain
        if not isinstance(chain, int) or n <= chain:
            return n
        return chain + math.ceil(math.log2(n / chain))

    @property
    def alone(self) -> float:
        """The error of a product with the weight alone, to which xhat is added: as a factor of the two, as they are."""
        return self.count["factor"] * self.u * (1 + (self.k_y + 2) * self.u)

    def saved_rstd(self, n: int) -> float:
        """How far apart, relative to it, the rstd that is used for y and the saved one of a row of n numbers may be."""
        return (self.count["stats_saved"] + self.count["lanes"] * (n <= LANES)) * self.u

    def gam(self, k: int) -> float:
        """k u / (1 - k u): the bound of k roundings in a row (Higham, lemma 3.1)."""
        ku = k * self.u
        return ku / (1 - ku) if ku < 0.5 else math.inf


def rules(op: Op, model: Model, *, weight: bool = True) -> Rules:
    """The numbers of the table for ``op`` under ``model``, called with a weight or without one."""
    numbers = table()
    of_y = "y_zero_centered" if op.weight_offset else "y"
    accumulate = FORMATS[model.accumulate]
    return Rules(
        model=model,
        centered=op.centered,
        doubt="weight alone"
        if op.zero_centered
        else "bits in doubt"
        if op.clamped
        else "factor and roundings"
        if op.modulated
        else "silu"
        if op.grouped
        else "rotation"
        if op.rotary
        else "roundings to the io dtype",
        u=accumulate.u,
        eta=2.0 ** (accumulate.emin if model.ftz else accumulate.emin - accumulate.p),
        c_var=1.0 if model.variance == "any" else 0.0,
        k_y=numbers.count[of_y if weight else "y_without_weight"],
        count=numbers.count,
        store=numbers.store,
        safety=numbers.safety,
    )


def half_ulp(a: Tensor, fmt: Format) -> Tensor:
    """Half the spacing of ``fmt`` at ``a`` >= 0 (fp64): 2^(max(floor(log2 a), emin) - p), with gradual underflow."""
    power = a.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    return power.clamp_(min=2.0**fmt.emin).mul_(2.0**-fmt.p)


def store(rules: Rules, a: Tensor, fmt: Format, output: str) -> Tensor | float:
    """Error of one rounding to ``fmt`` at magnitude ``a`` (fp64); 0 for the accumulation format, which E includes."""
    if fmt.name == rules.model.accumulate:
        return 0.0
    half = half_ulp(a, fmt)
    if rules.store[output] != 1.0:
        half *= rules.store[output]
    if rules.model.ftz and fmt.emin == FORMATS["fp32"].emin:
        half += torch.where(a < 2.0**-125, 2.0**-126, 0.0)  # with fp32's range a subnormal may be flushed
    return half


def plus_store(rules: Rules, e: Tensor, size: Tensor, fmt: Format, output: str) -> Tensor:
    """``e`` plus the error of one rounding to ``fmt`` at magnitude ``size`` + ``e`` (fp64), in fewer passes.

    The result has the bits of ``e + store(rules, size + e, fmt, output)``: the rounding is a power of two.
    """
    if fmt.name == rules.model.accumulate:
        return e.clone()
    a = size + e
    if rules.store[output] != 1.0:
        return e + store(rules, a, fmt, output)
    a.view(torch.int64).bitwise_and_(_EXPONENT)  # now a is a power of two
    least = 2.0**fmt.emin
    if rules.model.ftz and fmt.emin == FORMATS["fp32"].emin:  # below 2 least: the smallest spacing, and 2^-126 more
        torch.threshold_(a, least, least + 2.0 ** (fmt.p - 126))
    else:
        a.clamp_(min=least)
    return torch.add(e, a, alpha=2.0**-fmt.p)


@dataclass(frozen=True, slots=True)
class Bound:
    """``upper`` bounds actual - expected, ``lower`` (None: the same) expected - actual, both >= 0 in fp64.

    ``terms`` computes the parts of the bound, name -> tensor, for reports.
    """

    upper: Tensor
    lower: Tensor | None
    terms: Callable[[], Mapping[str, Tensor]]
