"""torch, op by op, for the RMSNorms of models, written like Hugging Face's LlamaRMSNorm and GemmaRMSNorm.

After a residual, LlamaRMSNorm of the stored sum; that of Gemma needs no more than ``torch.py`` has.

Gradients come from autograd: if xhat is rounded, autograd rounds dy * weight and every dy * xhat to the io dtype.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.op import Op
from normcheck.cases.ops import FUSED_ADD, TABLE
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_MODELS = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/"


def forward(
    op: Op, x: Tensor, weight: Tensor | None, bias: None, *, eps: float, residual: Tensor | None = None
) -> dict[str, Tensor]:
    """x (M, N) or (B, S, N), weight (N,) or None -> y as x, rounded once from fp32; rstd fp32 (..., 1).

    For Llama xhat is rounded first, and its product is in fp32 only with an fp32 weight. With a ``residual``, shaped as
    x, of the stored sum, which is residual_out.
    """
    import torch

    stored = None if residual is None else (x.float() + residual.float()).to(residual.dtype)
    wide = x.float() if stored is None else stored.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    xhat = wide * rstd
    if weight is None:
        y = xhat
    elif op.rounds_xhat:
        y = weight * xhat.to(x.dtype)
    else:
        y = xhat * (1.0 + weight.float() if op.zero_centered else weight.float())
    outputs = {"y": y.to(x.dtype), "rstd": rstd.detach()}
    return outputs if stored is None else {**outputs, "residual_out": stored}


IMPLEMENTATIONS = tuple(
    Implementation(
        name="torch",
        op=op.name,
        forward=partial(forward, op),
        ranks=(2, 3),
        weights=(False, True),
        residual_dtypes=("io", "fp32") if op.adds_residual else ("io",),
        model={"sum": "rounded"} if op.adds_residual else {},
        builds=False,
        source=_MODELS + ("llama/modeling_llama.py" if op.rounds_xhat else "gemma/modeling_gemma.py"),
    )
    for op in (*TABLE, *FUSED_ADD)
    if op.of_models or op.rounds_xhat
)
