"""A plain RMSNorm in torch: the kernel whose cases a second ``normcheck bench --suite judge`` counts."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.impls.implementation import Implementation


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """y in the dtype of x (M, N) or (B, S, N), computed in fp32; ``weight``, ``bias`` (N,)."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


PLAIN = Implementation(name="plain", op="rmsnorm", forward=rms_norm, ranks=(2, 3))
