"""torch, for the norms that a diffusion transformer modulates: in fp32, and step by step as its code has them.

Gradients come from autograd. Where each step is rounded, it rounds theirs as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import DEVICES
from normcheck.cases.ops import MODULATED, Op
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
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
    each: bool = False,
    round_factor: bool = False,
) -> dict[str, Tensor]:
    """x (B, S, N), scale and shift (B, N) -> y as x; of a LayerNorm also mean and rstd, fp32 (B, S, 1).

    With ``each`` the norm of x, its product with 1 + scale and the sum with shift are rounded, to the dtype of x or
    that of a wider scale. ``round_factor``: 1 + scale is rounded to the dtype of scale; with ``each`` it is anyway.
    """
    import torch

    wide, columns = x.float(), x.shape[-1:]
    if op.centered:
        normed, mean, rstd = torch.native_layer_norm(wide, columns, None, None, eps)
        outputs = {"mean": mean.detach(), "rstd": rstd.detach()}
    else:
        normed, outputs = torch.nn.functional.rms_norm(wide, columns, None, eps), {}
    scale, shift = scale[:, None], shift[:, None]
    if each:
        y = normed.to(x.dtype) * (1 + scale) + shift
    else:
        factor = (1 + scale).float() if round_factor else 1 + scale.float()
        y = normed * factor + shift.float()
    return {"y": y.to(x.dtype), **outputs}


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
        },
        by_default=DEVICES if name == "torch" else (),
        builds=False,
        source=source,
    )
    for op in MODULATED
    for name, own, source in _MADE
)
