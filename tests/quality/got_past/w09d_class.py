"""pytorch/pytorch#69208 as a module: without a bias the weight is forgotten.

Its constructor has a parameter `bias`, so cases without one are run: `--impl w09d_class.py:Norm --op layernorm`.
"""

import torch


class Norm(torch.nn.LayerNorm):
    def __init__(self, n, eps=1e-5, bias=True):
        super().__init__(n, eps=eps, bias=bias)

    def forward(self, x):
        pair = (None, None) if self.bias is None else (self.weight.float(), self.bias.float())
        return torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), *pair, self.eps).to(x.dtype)
