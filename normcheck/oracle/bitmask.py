"""The packed bitmask of a clamped op: packing, unpacking, and the bits that a correct kernel may set or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.oracle.rounding import half_ulp


def packed_columns(n: int) -> int:
    """Bytes in a packed row of ``n`` bits."""
    return (n + 7) // 8


def pack(mask: Tensor) -> Tensor:
    """bool (M, N) -> uint8 (M, ceil(N / 8)), least significant bit first, pad bits 0."""
    rows, n = mask.shape
    padded = torch.zeros((rows, packed_columns(n) * 8), dtype=torch.uint8, device=mask.device)
    padded[:, :n] = mask
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded.view(rows, packed_columns(n), 8) * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """uint8 (M, ceil(N / 8)), least significant bit first -> bool (M, N); pad bits are ignored."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    ones = (packed.unsqueeze(-1) >> shifts) & 1
    return ones.flatten(1)[:, :n].bool()


def band(z: Tensor, before_store: Tensor, fmt: Format, compare: str) -> Tensor:
    """The distance (m, N) of z from a limit up to which its bit is in doubt, see ``doubtful``."""
    return before_store if compare == "fp32" else before_store + half_ulp(z.abs() + before_store, fmt)


def doubtful(z: Tensor, before_store: Tensor, options: Mapping[str, float], fmt: Format, compare: str) -> Tensor:
    """bool (m, N): the elements whose bit is in doubt, because z lies within its own error of a limit.

    ``before_store`` is E of z (fp64). A kernel that compares after the store (``compare`` is not "fp32") may also round
    a z within half an ulp to the limit itself. An exact tie (E == 0 and z == limit) is a tie in every correct kernel.
    """
    reach = band(z, before_store, fmt, compare)
    exact = before_store == 0
    doubt = torch.zeros_like(z, dtype=torch.bool)
    for limit in options.values():
        distance = (z - limit).abs()
        doubt |= ~(distance > reach) & (reach != 0) & ~(exact & (distance == 0))  # a NaN distance is in doubt
    return doubt


def ties(z: Tensor, options: Mapping[str, float]) -> Tensor:
    """bool (m, N): the elements of ``z`` that equal a limit."""
    return (z == options["lower_clip"]) | (z == options["upper_clip"])
