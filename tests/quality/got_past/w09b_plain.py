"""After pytorch/pytorch#69208, right: a LayerNorm without a bias as a plain function, so that no case has one."""

import torch


def layernorm(x, weight, eps):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    return ((wide - mean) * rstd * weight.float()).to(x.dtype)
