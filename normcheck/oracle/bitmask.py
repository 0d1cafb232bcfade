"""The packed bitmask of a clamped op: packing, unpacking, and which bits a correct kernel may give."""

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
    """How near to a limit z (fp64) has to be for its bit to be free, as ``doubtful`` says."""
    return before_store if compare == "fp32" else before_store + half_ulp(z.abs() + before_store, fmt)


def doubtful(z: Tensor, before_store: Tensor, options: Mapping[str, float], fmt: Format, compare: str) -> Tensor:
    """bool (m, N): the elements whose bit may go either way, z lying within its own error of a limit.

    ``before_store`` is E of z (fp64). A kernel that compares after the store (``compare`` not "fp32") may also take a z
    within half an ulp for the limit itself. An exact tie (E == 0 and z == limit) is never in doubt: all see the limit.
    """
    reach = band(z, before_store, fmt, compare)
    exact = before_store == 0
    free = torch.zeros_like(z, dtype=torch.bool)
    for limit in options.values():
        distance = (z - limit).abs()
        free |= ~(distance > reach) & (reach != 0) & ~(exact & (distance == 0))  # a NaN band is a free bit
    return free


def ties(z: Tensor, options: Mapping[str, float]) -> Tensor:
    """bool (m, N): the elements of ``z`` that equal a limit."""
    return (z == options["lower_clip"]) | (z == options["upper_clip"])
