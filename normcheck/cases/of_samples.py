"""What each sample of a case, or each group of its rows, has of its own: those of the next are twice as large; and the
weights and angles of heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import ANGLE_VALUES, modulation, residual_gate, weights
from normcheck.cases.guard_bands import placed
from normcheck.cases.op import Op
from normcheck.cases.rng import hashed, normal, uniform
from normcheck.cases.strides import angle_stride, shift_of
from normcheck.cases.tensor_names import COS, K_WEIGHT, Q_WEIGHT, SIN

SLAB_ELEMENTS = 1 << 22
"""How many elements are made at a time, so that temporary memory stays small."""

_OF_SAMPLES, _RESIDUAL_GATE, _ANGLES, _HEAD_WEIGHTS = 9, 10, 11, 12  # streams of a seed beside those of ``inputs``


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


def heads_unfilled(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The weights of q and k (D,), and cos and sin (M, pairs), unfilled."""
    heads = case.of_heads
    of_tokens = (case.M, heads.pairs), (angle_stride(case), 1)
    places = dict.fromkeys((Q_WEIGHT, K_WEIGHT), ((heads.columns,), (1,))) | dict.fromkeys((COS, SIN), of_tokens)
    return {
        name: placed(shape, stride, dtype, device, shift=shift_of(case, name, dtype.itemsize))
        for name, (shape, stride) in places.items()
    }


def fill_rotation(case: Case, op: Op, named: Mapping[str, Tensor]) -> None:
    """Write the weights of q and k (D,), and cos and sin (M, pairs).

    Those of k are the next numbers of a row of weights, four times as large, so that no other weight will do.
    """
    device, pairs = named[COS].device.type, case.of_heads.pairs
    own = normal(hashed(case.seed, [(_HEAD_WEIGHTS, 0, 2 * case.N)], device)).view(2, -1)
    of_q, of_k = weights(case, op, own)[0][: 2 * case.of_heads.columns].chunk(2)
    named[Q_WEIGHT].copy_(of_q.float())
    named[K_WEIGHT].copy_((of_k * 4).float())
    height = max(1, SLAB_ELEMENTS // max(pairs, 1))
    for first in range(0, case.M, height):
        rows = slice(first, min(first + height, case.M))
        count = (rows.stop - first) * pairs
        bits = hashed(case.seed, [(_ANGLES, first * pairs, count)], device).view(rows.stop - first, pairs)
        kind, at = ANGLE_VALUES[case.angles or "normal"], torch.arange(first, rows.stop, device=device)
        both = kind(uniform(bits), uniform(bits >> 32), at)
        for name, values in zip((COS, SIN), both, strict=True):
            named[name][rows] = values.float()
