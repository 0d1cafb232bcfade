"""What ``tuned.py`` does, on a CPU: for each new N, dtype of x and dtype of the weight it sleeps ten times."""

import time

import torch

CONFIGS, SECONDS = 10, 0.4
_tuned = set()


def rmsnorm(x, weight, eps):
    key = x.shape[-1], x.dtype, weight.dtype
    if key not in _tuned:
        for _ in range(CONFIGS):
            time.sleep(SECONDS)
        _tuned.add(key)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
