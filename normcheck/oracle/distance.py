"""How far two outputs of one dtype are apart: in ulps of that dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normcheck.cases.guard_bands import differing

_SIGN_AT = {torch.float16: 15, torch.bfloat16: 15, torch.float32: 31, torch.float8_e4m3fn: 7, torch.float8_e5m2: 7}
"""Dtype -> the number of its sign bit."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def moved(before: Tensor, after: Tensor) -> tuple[Tensor, float]:
    """Bool, True at the elements that differ, and the largest distance of one, in ulps.

    Both have one shape and one dtype: fp16, bf16, fp32, or one of codes. Two NaNs are equal; from a NaN to a number it
    is infinitely far. Integers are as many ulps apart as their difference.
    """
    changed = differing(before, after)
    if not bool(changed.any()):
        return changed, 0.0
    distance = (ranks(before) - ranks(after)).abs()
    if before.is_floating_point():
        nan = torch.isnan(before.float()) | torch.isnan(after.float())
        if bool((changed & nan).any()):
            return changed, math.inf
    return changed, float(distance[changed].max())


def ranks(values: Tensor) -> Tensor:
    """The values as int64 ranks: neighbouring numbers of the dtype differ by 1, and both zeros are 0."""
    if not values.is_floating_point():
        return values.long()
    shift = _SIGN_AT[values.dtype]
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).long()
    size = bits & ((1 << shift) - 1)
    return torch.where(bits < 0, -size, size)
