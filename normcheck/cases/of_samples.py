"""What each sample of a case, or each group of its rows, has of its own: those of the next are twice as large."""

from __future__ import annotations

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import modulation, residual_gate
from normcheck.cases.ops import Op
from normcheck.cases.rng import hashed, normal

SLAB_ELEMENTS = 1 << 22
"""How many elements are made at a time, so that temporary memory stays small."""

_OF_SAMPLES, _RESIDUAL_GATE = 9, 10  # streams of a seed beside those of ``inputs``


def fill_both(case: Case, op: Op, scale: Tensor, shift: Tensor) -> None:
    """Write scale and shift (B, N) of the samples of a case, or weight and bias (G, N) of its groups of rows."""
    n = scale.shape[1]
    height = max(1, SLAB_ELEMENTS // n)
    for first in range(0, scale.shape[0], height):
        samples = slice(first, min(first + height, scale.shape[0]))
        count = (samples.stop - samples.start) * n
        pieces = [(_OF_SAMPLES, (part * scale.shape[0] + first) * n, count) for part in range(2)]
        own = normal(hashed(case.seed, pieces, scale.device.type)).view(2, -1, n)
        for tensor, values in zip((scale, shift), modulation(case, op, own, first), strict=True):
            tensor[samples] = values.float()  # rounded to fp32 first, as a weight


def fill_residual_gate(case: Case, gate: Tensor) -> None:
    """Write the gates (B, N) of x, the magnitudes of which are those of scale and shift: each sample has its own."""
    n = gate.shape[1]
    height = max(1, SLAB_ELEMENTS // n)
    for first in range(0, gate.shape[0], height):
        samples = slice(first, min(first + height, gate.shape[0]))
        pieces = [(_RESIDUAL_GATE, first * n, (samples.stop - first) * n)]
        own = normal(hashed(case.seed, pieces, gate.device.type)).view(-1, n)
        gate[samples] = residual_gate(case, own, first).float()
