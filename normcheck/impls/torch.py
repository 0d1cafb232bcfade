"""torch, in fp32: the inputs are upcast, torch's own norm runs on them, and y goes back to the io dtype.

Gradients come from autograd through y, so they too are sums in fp32 that are rounded once. An RMSNorm returns no
rstd: ``rms_norm`` does not return the one that it used, and another one would be judged in its place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.ops import FUSED_ADD, TABLE, Op
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_DOCS = "https://pytorch.org/docs/stable/generated/torch.nn.functional."


def forward(
    op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **limits: float
) -> dict[str, Tensor]:
    """x (M, N) or (B, S, N), weight and bias (N,) or None -> y as x.

    A LayerNorm also returns mean, rstd in fp32 with a last dimension of 1. A clamped op, with ``limits`` lower_clip and
    upper_clip, also returns bitmask: bool, shaped as x, True strictly between them.
    """
    import torch

    gamma, shift = (None if t is None else t.float() for t in (weight, bias))
    if gamma is not None and op.zero_centered:
        gamma = 1 + gamma
    wide, shape = x.float(), x.shape[-1:]
    outputs = {}
    if op.centered:  # what F.layer_norm calls
        z, outputs["mean"], outputs["rstd"] = torch.native_layer_norm(wide, shape, gamma, shift, eps)
    else:
        z = torch.nn.functional.rms_norm(wide, shape, gamma, eps)
        z = z if shift is None else z + shift
    if op.clamped:
        lower, upper = limits["lower_clip"], limits["upper_clip"]
        outputs["bitmask"] = (z > lower) & (z < upper)
        # Gradient flows only where the bit is set: torch.clamp would pass it at z == limit too. NaN stays NaN in y.
        z = torch.where(outputs["bitmask"], z, z.detach().clamp(lower, upper))
    return {"y": z.to(x.dtype), **outputs}


def add_forward(
    op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, residual: Tensor
) -> dict[str, Tensor]:
    """As ``forward``, of the stored sum of x and ``residual`` (shaped as x), which is residual_out."""
    stored = (x.float() + residual.float()).to(residual.dtype)
    outputs = forward(op, stored, weight, bias, eps=eps)
    return {**outputs, "y": outputs["y"].to(x.dtype), "residual_out": stored}


IMPLEMENTATIONS = tuple(
    Implementation(
        name="torch",
        op=op.name,
        forward=partial(forward, op),
        ranks=(2, 3),
        weights=(False, True),
        heads=True,
        model={"bitmask_compare": "fp32"} if op.clamped else {},
        source=f"{_DOCS}{'layer_norm' if op.centered else 'rms_norm'}.html",
    )
    for op in TABLE
    if not op.of_models
) + tuple(
    Implementation(
        name="torch",
        op=op.name,
        forward=partial(add_forward, op),
        ranks=(2, 3),
        weights=(False, True),
        residual_dtypes=("io", "fp32"),
        model={"sum": "rounded"},
        source=f"{_DOCS}{'layer_norm' if op.centered else 'rms_norm'}.html",
    )
    for op in FUSED_ADD
)
