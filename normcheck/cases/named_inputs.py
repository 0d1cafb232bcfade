"""The numbers of what a function gets by name beside x: gates, modulations, and what rotates heads.

Each is a hash of its position, as those of ``inputs.py`` are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import (
    ANGLE_VALUES,
    GATE_VALUES,
    ROWS,
    Field,
    modulation,
    residual_gate,
    weights,
)
from normcheck.cases.ops import COS, K_WEIGHT, Q_WEIGHT, SIN, Op
from normcheck.cases.rng import hashed, normal, uniform


class Stream(IntEnum):
    """Independent streams of one seed."""

    X, DY, ROW, WEIGHT, BIAS, RESIDUAL, DRESIDUAL_OUT, SCALE, GATE, OF_SAMPLES, RESIDUAL_GATE, ANGLES = range(12)


SLAB_ELEMENTS = 1 << 22


def slab_height(case: Case) -> int:
    """How many rows ``fill`` makes at a time: "blend" repeats after as many rows as there are kinds."""
    return max(1, SLAB_ELEMENTS // (case.N * len(ROWS))) * len(ROWS)


def fill_gate(case: Case, gate: Tensor) -> None:
    """Write the gate, which is (M, N) yet."""
    device, height = gate.device.type, slab_height(case)
    for first in range(0, case.M, height):
        rows = slice(first, min(first + height, case.M))
        count = (rows.stop - rows.start) * case.N
        bits = hashed(case.seed, [(Stream.GATE, first * case.N, count)], device)
        n, u = normal(bits).view(-1, case.N), uniform(bits).view(-1, case.N)
        gate[rows] = GATE_VALUES[case.gate](Field(n, u, u[:, :1], case.dtype)).float()


def fill_modulation(case: Case, op: Op, scale: Tensor, shift: Tensor) -> None:
    """Write scale and shift (B, N)."""
    n = scale.shape[1]
    height = max(1, SLAB_ELEMENTS // n)
    for first in range(0, scale.shape[0], height):
        samples = slice(first, min(first + height, scale.shape[0]))
        count = (samples.stop - samples.start) * n
        pieces = [(Stream.OF_SAMPLES, (part * scale.shape[0] + first) * n, count) for part in range(2)]
        own = normal(hashed(case.seed, pieces, scale.device.type)).view(2, -1, n)
        for tensor, values in zip((scale, shift), modulation(case, op, own, first), strict=True):
            tensor[samples] = values.float()  # rounded to fp32 first, as a weight


def fill_residual_gate(case: Case, gate: Tensor) -> None:
    """Write the gates (B, N) of x, the magnitudes of which are those of scale and shift: each sample has its own."""
    n = gate.shape[1]
    height = max(1, SLAB_ELEMENTS // n)
    for first in range(0, gate.shape[0], height):
        samples = slice(first, min(first + height, gate.shape[0]))
        pieces = [(Stream.RESIDUAL_GATE, first * n, (samples.stop - first) * n)]
        own = normal(hashed(case.seed, pieces, gate.device.type)).view(-1, n)
        gate[samples] = residual_gate(case, own, first).float()


def fill_rotation(case: Case, op: Op, named: Mapping[str, Tensor]) -> None:
    """Write the weights of q and k (D,), and cos and sin (M, pairs).

    Those of k are the next numbers of a row of weights, four times as large, so that no other weight will do.
    """
    device, pairs = named[COS].device.type, case.of_heads.pairs
    own = normal(hashed(case.seed, [(Stream.WEIGHT, 0, case.N), (Stream.BIAS, 0, case.N)], device)).view(2, -1)
    of_q, of_k = weights(case, op, own)[0][: 2 * case.of_heads.columns].chunk(2)
    named[Q_WEIGHT].copy_(of_q.float())
    named[K_WEIGHT].copy_((of_k * 4).float())
    height = max(1, SLAB_ELEMENTS // max(pairs, 1))
    for first in range(0, case.M, height):
        rows = slice(first, min(first + height, case.M))
        count = (rows.stop - first) * pairs
        bits = hashed(case.seed, [(Stream.ANGLES, first * pairs, count)], device).view(
            -1 if count else rows.stop - first, pairs
        )
        both = ANGLE_VALUES[case.angles or "normal"](
            uniform(bits), uniform(bits >> 32), torch.arange(first, rows.stop, device=device)
        )
        for name, values in zip((COS, SIN), both, strict=True):
            named[name][rows] = values.float()
