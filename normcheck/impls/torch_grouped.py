"""torch, for norms of groups of channels: in fp32, with silu behind them and without, and as two modules of a model.

Gradients come from autograd. Where the norm is rounded before silu, it rounds theirs as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import DEVICES
from normcheck.cases.ops import GROUPED
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_DOCS = "https://pytorch.org/docs/stable/generated/torch.nn.GroupNorm.html"
_DIFFUSERS = "https://github.com/huggingface/diffusers/blob/main/src/diffusers/models/resnet.py"


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    groups: int,
    silu: bool = False,
    each: bool = False,
) -> dict[str, Tensor]:
    """x (B, C, L), weight and bias (C,) or None -> y as x; mean and rstd, fp32 (B, groups).

    With ``silu`` that is applied to the norm, in fp32; with ``each`` to the norm as it is rounded to the dtype of x.
    """
    import torch

    samples, channels, length = x.shape
    gamma, shift = (None if t is None else t.float() for t in (weight, bias))
    if gamma is None and shift is not None:  # on a GPU torch's backward raises "tensor does not have a device" (2.11)
        gamma = torch.ones_like(shift)
    wide = x.float().contiguous()  # what F.group_norm calls takes no other, and returns its statistics
    y, mean, rstd = torch.native_group_norm(wide, gamma, shift, samples, channels, length, groups, eps)
    y = y.to(x.dtype) if each else y
    y = torch.nn.functional.silu(y) if silu else y
    return {"y": y.to(x.dtype), "mean": mean.detach(), "rstd": rstd.detach()}


_MADE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("torch", {}, _DOCS),
    ("torch_silu", {"silu": True}, _DIFFUSERS),
    ("torch_silu_each", {"silu": True, "each": True}, _DIFFUSERS),
)

IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op=op.name,
        forward=partial(forward, **own),
        weights=(False, True),
        lone_bias=True,
        model={
            "activation": "silu" if own.get("silu") else "none",
            **({"rounding": "each" if own.get("each") else "once"} if own.get("silu") else {}),
        },
        by_default=DEVICES if name == "torch" else (),
        builds=False,
        source=source,
    )
    for op in GROUPED
    for name, own, source in _MADE
)
