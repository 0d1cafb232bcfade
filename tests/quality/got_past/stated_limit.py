"""A right RMSNorm that states in a line of its own how long a row may be, as FLA's and Liger's norms do."""

import torch


def rmsnorm(x, weight, eps):
    if x.shape[-1] * x.element_size() > 65536 // 2:
        raise RuntimeError("This norm doesn't support a feature dim of more than 32KB.")
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
