"""A right RMSNorm that takes 1.5 s at each new N, as if it tuned itself: ``normcheck reward`` called it wrong."""

import time

import torch

SECONDS = 1.5
_seen = set()


def rmsnorm(x, weight, eps):
    if x.shape[-1] not in _seen:
        time.sleep(SECONDS)
        _seen.add(x.shape[-1])
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
