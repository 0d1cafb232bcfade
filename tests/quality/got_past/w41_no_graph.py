"""Packed rows go to a path that has no backward, and their y has no graph; rows that lie apart have gradients.

From a report on huggingface/candle, 2168. Each case alone is right.
"""

import torch


def rmsnorm(x, weight, eps):
    if x.is_contiguous():
        with torch.no_grad():
            return norm(x, weight, eps)
    return norm(x, weight, eps)


def norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
