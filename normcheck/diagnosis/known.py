"""The list of known faults.

Every one was made by somebody. A fault is in it if its formula predicts the wrong numbers; one whose numbers hang on
the order of its sums, or on what memory held before, is not.
"""

from __future__ import annotations

from normcheck.cases.op import Op
from normcheck.diagnosis.faults import adding, affine, bits, codes, dx, statistics, sums
from normcheck.diagnosis.faults.fault import Fault
from normcheck.diagnosis.formula import BACKWARD

FAULTS: tuple[Fault, ...] = (
    *statistics.FAULTS,
    *affine.FAULTS,
    *adding.FAULTS,
    *codes.FAULTS,
    *bits.FAULTS,
    *dx.FAULTS,
    *sums.FAULTS,
)
"""Every known fault, those of the statistics first."""


_OF_WEIGHT = frozenset(("gamma", "gamma_b", "casts"))
"""The steps that make the weight's factor, or round xhat for its product with it."""

_NOT_OF_CODES = BACKWARD - {"read"} | {"store", "keep", "mean_out", "rstd_out"}
"""The steps that change nothing that an op returns which quantises."""


def known(op: Op, dtype: str, *, weight: bool = True) -> tuple[Fault, ...]:
    """The faults that a kernel of ``op`` with io ``dtype`` can have; ``weight``: whether it was given a weight."""
    every = (f for f in FAULTS if f.takes(op) and f.but != dtype and not (f.narrow and dtype == "fp32"))
    if op.quantises:
        every = (f for f in every if f.formula.changed - _NOT_OF_CODES)
    return tuple(f for f in every if weight or not f.formula.changed & _OF_WEIGHT)
