"""A right rmsnorm in a few lines of torch, as an implementation, and as the text of a user's file."""

from __future__ import annotations

from typing import Any

import torch

from normcheck.impls.implementation import Implementation
from tests.case_lines import case_of

CASE = case_of("rmsnorm fp16 M=5 N=24 layout=strided gap=8 seed=3")
"""A case with something in every gap."""


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float) -> dict[str, Any]:
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = x.float() * rstd[..., None] * weight.float()
    return {"y": (y if bias is None else y + bias.float()).to(x.dtype), "rstd": rstd}


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: object, saved: dict[str, torch.Tensor], *, eps: float
) -> dict[str, torch.Tensor]:
    xhat = x.float() * saved["rstd"][:, None]
    wd = dy.float() * weight.float()
    dx = (wd - xhat * (xhat * wd).mean(-1, keepdim=True)) * saved["rstd"][:, None]
    return {"dx": dx.to(x.dtype), "dw": (dy.float() * xhat).sum(0).to(weight.dtype), "db": dy.sum(0).to(weight.dtype)}


def plain(**more: Any) -> Implementation:
    """It, with another forward, backward or whatever else is given."""
    return Implementation(**{"name": "mine", "op": "rmsnorm", "forward": forward, "backward": backward, **more})


THROUGH_AUTOGRAD = """
import os, time, torch

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        {backward}

def rmsnorm(x, weight, eps):
    return Norm.apply(x, weight, eps)
"""
"""A user's file whose gradients come from its own autograd function."""
