"""Correct kernels, transcribed line by line from libraries that many models run on; gradients come from autograd.

Each declares the dtypes in which it is right. With a half x, timm's ``rms_norm`` squares and averages in that dtype. On
a CPU, torch's ``layer_norm`` saves its statistics in it, so that the backward that reads them is off. T5's dx is a sum
of two parts that were rounded to it, off by up to 1.6 times the bound, or infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normcheck.impls.implementation import Implementation

_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/src/transformers/models"
_TIMM = "https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/fast_norm.py"
_TORCH = "https://docs.pytorch.org/docs/stable/generated/torch.nn"


def llama(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """LlamaRMSNorm.forward, x (M, N) or (B, S, N)."""
    dtype = x.dtype
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return weight * hidden.to(dtype)


def t5(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """T5LayerNorm.forward, x (M, N) or (B, S, N)."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden = x * torch.rsqrt(variance + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        hidden = hidden.to(weight.dtype)
    return weight * hidden


def timm(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """timm's rms_norm, x (M, N) or (B, S, N)."""
    v = torch.mean(x.pow(2), dim=(-1,), keepdim=True)
    x = x * torch.rsqrt(v + eps)
    return x * weight


def rms_norm(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """torch.nn.RMSNorm's forward, x (M, N) or (B, S, N)."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch.nn.LayerNorm's forward, x (M, N) or (B, S, N)."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _control(name: str, op: str, forward: Callable[..., Tensor], **fields: Any) -> Implementation:
    return Implementation(name=name, op=op, forward=forward, ranks=(2, 3), **fields)


_ONE_DTYPE: Mapping[str, Any] = {"dtypes": ("fp32",), "biases": (False,)}

CONTROLS: tuple[Implementation, ...] = (
    _control("transformers_llama", "rmsnorm_llama", llama, source=f"{_TRANSFORMERS}/llama/modeling_llama.py"),
    _control("transformers_t5", "rmsnorm_llama", t5, source=f"{_TRANSFORMERS}/t5/modeling_t5.py", **_ONE_DTYPE),
    _control("timm_rms_norm", "rmsnorm", timm, source=_TIMM, **_ONE_DTYPE),
    _control(
        "torch_nn_rms_norm",
        "rmsnorm",
        rms_norm,
        source=f"{_TORCH}.modules.normalization.RMSNorm.html",
        **_ONE_DTYPE,
    ),
    _control(
        "torch_nn_layer_norm",
        "layernorm",
        layer_norm,
        source=f"{_TORCH}.modules.normalization.LayerNorm.html",
        dtypes=("fp32",),
    ),
)
"""The correct kernels: the gate must never accuse one."""

IMPLEMENTATIONS = CONTROLS
