"""ply-ai: PlyRMSNorm, with the weight of the case."""

import torch
from ply.rmsnorm import PlyRMSNorm

from normcheck import Implementation


def rmsnorm(x, weight, bias, *, eps):
    norm = PlyRMSNorm(x.shape[-1], eps)
    norm.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    return norm(x.detach())


IMPLEMENTATIONS = (Implementation(name="ply", op="rmsnorm", forward=rmsnorm, biases=(False,)),)
