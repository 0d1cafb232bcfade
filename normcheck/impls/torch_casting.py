"""torch, op by op, for the two rmsnorms that cast otherwise, as Hugging Face's LlamaRMSNorm and GemmaRMSNorm do it.

Gradients come from autograd: of rmsnorm_llama it rounds dy * weight and every dy * xhat to the io dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_MODELS = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/"


def rmsnorm_llama(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> dict[str, Tensor]:
    """x (M, N) or (B, S, N), weight (N,) -> y as x, the product with an fp32 weight in fp32; rstd fp32 (..., 1)."""
    xhat, rstd = _normalized(x, eps)
    return {"y": (weight * xhat.to(x.dtype)).to(x.dtype), "rstd": rstd}


def rmsnorm_gemma(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> dict[str, Tensor]:
    """As rmsnorm_llama, with 1 + weight, all of it in fp32."""
    xhat, rstd = _normalized(x, eps)
    return {"y": (xhat * (1.0 + weight.float())).to(x.dtype), "rstd": rstd}


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """xhat before any rounding to the io dtype and rstd, both fp32."""
    import torch

    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd.detach()


IMPLEMENTATIONS = (
    Implementation(
        name="torch",
        op="rmsnorm_llama",
        forward=rmsnorm_llama,
        ranks=(2, 3),
        source=f"{_MODELS}llama/modeling_llama.py",
    ),
    Implementation(
        name="torch",
        op="rmsnorm_gemma",
        forward=rmsnorm_gemma,
        ranks=(2, 3),
        source=f"{_MODELS}gemma/modeling_gemma.py",
    ),
)
