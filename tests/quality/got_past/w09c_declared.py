"""After pytorch/pytorch#69208, right: a LayerNorm that declares that it never has a bias, and must get none."""

import torch

from normcheck import Implementation


def forward(x, weight, bias=None, *, eps):
    assert bias is None, "biases=(False,) is declared"
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    return ((wide - mean) * rstd * weight.float()).to(x.dtype)


IMPLEMENTATIONS = (Implementation(name="w09c", op="layernorm", forward=forward, biases=(False,)),)
