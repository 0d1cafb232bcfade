"""What most people do: torch.compile on a few lines. It gives up after eight recompilations, and says nothing."""

import torch


@torch.compile
def rmsnorm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
