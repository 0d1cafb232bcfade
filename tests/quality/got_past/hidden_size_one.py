"""A LayerNorm that takes rows of one element for a mistake of its caller, by an exception that declares nothing."""

import torch


def layernorm(x, weight, bias, eps):
    if x.shape[-1] == 1:
        raise RuntimeError("hidden size 1")
    y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return y.to(x.dtype)
