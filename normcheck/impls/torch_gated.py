"""torch, in fp32, for the gated norms of models: as fla, Qwen3-Next, Mamba2 and Nemotron-H write theirs.

Gradients come from autograd. Where each product is rounded, it rounds theirs as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import DEVICES
from normcheck.cases.ops import GATED
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/"
_FLA = "https://github.com/fla-org/flash-linear-attention/blob/main/fla/modules/fused_norm_gate.py"


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: None,
    *,
    eps: float,
    gate: Tensor,
    before: bool = False,
    each: bool = False,
    activation: str = "silu",
    group: int = 0,
) -> dict[str, Tensor]:
    """x, gate (M, N) or of more dimensions, weight (N,) or None -> y as x; rstd fp32 (..., N / group), or (..., 1).

    The gate's ``activation`` multiplies x ``before`` the norm, or what is normed of it. The mean is over each ``group``
    of columns, or the row. With ``each``, xhat is rounded to the dtype of x, and its products with weight and gate.
    """
    import torch

    factor = torch.nn.functional.silu(gate.float()) if activation == "silu" else torch.sigmoid(gate.float())
    wide = x.float() * factor if before else x.float()
    columns = group or x.shape[-1]
    groups = wide.reshape(*x.shape[:-1], x.shape[-1] // columns, columns)
    rstd = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    y = (groups * rstd).flatten(-2)
    gamma = None if weight is None else weight if each else weight.float()
    if each:
        y = y.to(x.dtype)
    if gamma is not None:
        y = gamma.flatten() * y
    if not before:
        y = y * factor
    return {"y": y.to(x.dtype), "rstd": rstd.detach().squeeze(-1)}


_MADE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("torch", {}, _FLA),
    ("torch_sigmoid", {"activation": "sigmoid"}, _FLA),
    ("torch_qwen3_next", {"each": True}, f"{_TRANSFORMERS}qwen3_next/modeling_qwen3_next.py"),
    ("torch_mamba2", {"before": True, "each": True}, f"{_TRANSFORMERS}mamba2/modeling_mamba2.py"),
    ("torch_nemotron_h", {"before": True, "group": 128}, f"{_TRANSFORMERS}nemotron_h/modeling_nemotron_h.py"),
)

IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op=op.name,
        forward=partial(forward, **own),
        ranks=(2, 3, 4),
        weights=(False, True),
        model={
            "gate": "before" if own.get("before") else "after",
            "activation": own.get("activation", "silu"),
            "group": own.get("group", 0),
            "rounding": "each" if own.get("each") else "once",
            **({"round_gated": "none"} if own.get("before") and own.get("each") else {}),
        },
        by_default=DEVICES if name == "torch" else (),
        builds=False,
        source=source,
    )
    for op in GATED
    for name, own, source in _MADE
)
