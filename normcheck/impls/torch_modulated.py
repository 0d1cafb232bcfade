"""torch, for the norms that a diffusion transformer modulates: in fp32, and step by step as its code has them.

Gradients come from autograd. Where each step is rounded, it rounds theirs as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import DEVICES
from normcheck.cases.op import Op
from normcheck.cases.ops import MODULATED, MODULATED_ADD
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DIT = "https://github.com/facebookresearch/DiT/blob/main/models.py"
_DIFFUSERS = "https://github.com/huggingface/diffusers/blob/main/src/diffusers/models/normalization.py"


def forward(
    op: Op,
    x: Tensor,
    weight: None,
    bias: None,
    *,
    eps: float,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None = None,
    residual_gate: Tensor | None = None,
    each: bool = False,
    round_factor: bool = False,
) -> dict[str, Tensor]:
    """x (B, S, N), scale and shift (B, N) -> y as x; of a LayerNorm also mean and rstd, fp32 (B, S, 1).

    With ``each`` the norm of x, its product with 1 + scale and the sum with shift are rounded, to the dtype of x or
    that of a wider scale. ``round_factor``: 1 + scale is rounded to the dtype of scale; with ``each`` it is anyway.

    With a ``residual``, as x, what is normed is its sum with x times ``residual_gate`` (B, N), as it is stored, which
    is residual_out; with ``each`` the product is rounded to the dtype of x first.
    """

    if residual is not None and residual_gate is not None:
        gate = residual_gate[:, None] if each else residual_gate[:, None].float()
        stored = (residual + gate * x).to(residual.dtype)
        return {"residual_out": stored, **_normed(op, stored, x.dtype, eps, scale, shift, each, round_factor)}
    return _normed(op, x, x.dtype, eps, scale, shift, each, round_factor)


def _normed(
    op: Op, x: Tensor, io: torch.dtype, eps: float, scale: Tensor, shift: Tensor, each: bool, round_factor: bool
) -> dict[str, Tensor]:
    """y, in the dtype ``io``, of what is normed, and its statistics."""
    import torch

    wide, columns = x.float(), x.shape[-1:]
    if op.centered:
        normed, mean, rstd = torch.native_layer_norm(wide, columns, None, None, eps)
        outputs = {"mean": mean.detach(), "rstd": rstd.detach()}
    else:
        normed, outputs = torch.nn.functional.rms_norm(wide, columns, None, eps), {}
    scale, shift = scale[:, None], shift[:, None]
    if each:
        y = normed.to(io) * (1 + scale) + shift
    else:
        factor = (1 + scale).float() if round_factor else 1 + scale.float()
        y = normed * factor + shift.float()
    return {"y": y.to(io), **outputs}


_MADE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("torch", {}, _DIFFUSERS),
    ("torch_each", {"each": True, "round_factor": True}, _DIT),
    ("torch_factor", {"round_factor": True}, _DIFFUSERS),
)

IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op=op.name,
        forward=partial(forward, op, **own),
        model={
            "rounding": "each" if own.get("each") else "once",
            "round_factor": "io" if own.get("round_factor") else "none",
            **({"sum": "rounded", "round_gated": "io" if own.get("each") else "none"} if op.adds_residual else {}),
        },
        by_default=DEVICES if name == "torch" else (),
        residual_dtypes=("io", "fp32") if op.adds_residual else ("io",),
        builds=False,
        source=source,
    )
    for op in (*MODULATED, *MODULATED_ADD)
    for name, own, source in _MADE
)
