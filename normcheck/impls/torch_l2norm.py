"""torch, in fp32, for norms by the length of x: as fla, MLX and torch.nn.functional.normalize write theirs.

Gradients come from autograd.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.declared import DEVICES
from normcheck.cases.ops import LENGTHS
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_FLA = "https://github.com/fla-org/flash-linear-attention/blob/main/fla/modules/l2norm.py"
_MLX = "https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/qwen3_next.py"
_TORCH = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html"


def forward(x: Tensor, weight: None, bias: None, *, eps: float, how: str) -> dict[str, Tensor]:
    """x (M, N) or of more dimensions -> y as x, each row over its length; rstd fp32 (..., 1).

    ``how``: "sum", "mean" or "max", what eps is added to, or that the length is eps at least.
    """
    import torch

    wide = x.float()
    if how == "max":
        rstd = 1 / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=eps)
    elif how == "mean":
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * x.shape[-1] ** -0.5
    else:
        rstd = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return {"y": (wide * rstd).to(x.dtype), "rstd": rstd.detach()}


_MADE = (("torch", "sum", _FLA), ("torch_normalize", "max", _TORCH), ("torch_mlx", "mean", _MLX))

IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op=op.name,
        forward=partial(forward, how=how),
        ranks=(2, 3, 4),
        heads=True,
        model={"eps": how},
        by_default=DEVICES if name == "torch" else (),
        builds=False,
        source=source,
    )
    for op in LENGTHS
    for name, how, source in _MADE
)
