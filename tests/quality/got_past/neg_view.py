"""A right RMSNorm whose y torch negates only when it is read. A view of its bits raises, in whose code it is made."""

import torch


def rmsnorm(x, weight, eps):
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return torch._neg_view(-y)
