"""torch, in fp32: the inputs are upcast, torch's own norm runs on them, and y goes back to the io dtype.

Gradients come from autograd through y, so they too are sums in fp32 that are rounded once. rmsnorm returns no rstd:
``rms_norm`` does not tell the number that it used, and another one would be judged in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_DOCS = "https://pytorch.org/docs/stable/generated/torch.nn.functional."


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """x (M, N) or (B, S, N), weight and bias (N,) -> y as x; mean, rstd fp32 with a last dimension of 1."""
    return _layernorm(x, weight.float(), bias, eps)


def layernorm_zero_centered(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    """As layernorm, with 1 + weight (added in fp32) in place of weight."""
    return _layernorm(x, 1 + weight.float(), bias, eps)


def layernorm_relu_bitmask(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, lower_clip: float, upper_clip: float
) -> dict[str, Tensor]:
    """As layernorm, then y clamped to [lower_clip, upper_clip]; bitmask: bool, shaped as x, strictly between them."""
    import torch

    z, mean, rstd = _normalized(x, weight.float(), bias, eps)
    bitmask = (z > lower_clip) & (z < upper_clip)
    # Gradient flows only where the bit is set: torch.clamp would pass it at z == limit too. NaN stays NaN in y.
    y = torch.where(bitmask, z, z.detach().clamp(lower_clip, upper_clip))
    return {"y": y.to(x.dtype), "mean": mean, "rstd": rstd, "bitmask": bitmask}


def rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """x (M, N) or (B, S, N), weight (N,), bias (N,) or None -> y as x."""
    from torch.nn import functional

    y = functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> dict[str, Tensor]:
    y, mean, rstd = _normalized(x, weight, bias, eps)
    return {"y": y.to(x.dtype), "mean": mean, "rstd": rstd}


def _normalized(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y before its store, mean and rstd, all fp32; ``weight`` is fp32. This is what F.layer_norm calls."""
    import torch

    return torch.native_layer_norm(x.float(), x.shape[-1:], weight, None if bias is None else bias.float(), eps)


IMPLEMENTATIONS = (
    Implementation(name="torch", op="layernorm", forward=layernorm, ranks=(2, 3), source=f"{_DOCS}layer_norm.html"),
    Implementation(
        name="torch",
        op="layernorm_zero_centered",
        forward=layernorm_zero_centered,
        ranks=(2, 3),
        source=f"{_DOCS}layer_norm.html",
    ),
    Implementation(
        name="torch",
        op="layernorm_relu_bitmask",
        forward=layernorm_relu_bitmask,
        ranks=(2, 3),
        model={"bitmask_compare": "fp32"},
        source=f"{_DOCS}layer_norm.html",
    ),
    Implementation(
        name="torch",
        op="rmsnorm",
        forward=rmsnorm,
        ranks=(2, 3),
        source=f"{_DOCS}rms_norm.html",
    ),
)
