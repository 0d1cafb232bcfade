"""torch, for heads that are normed and rotated: in fp32, in both orders of columns, and step by step as a model's code.

Gradients come from autograd, which also gives those of the weights, of cos and of sin: dx alone is asked. Where a step
is rounded, it rounds the gradients as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import DEVICES
from normcheck.cases.ops import ROTARY
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_VLLM = "https://github.com/vllm-project/vllm/blob/main/csrc/fused_qknorm_rope_kernel.cu"
_QWEN3 = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen3/modeling_qwen3.py"


def forward(
    x: Tensor,
    weight: None,
    bias: None,
    *,
    eps: float,
    q_heads: int,
    k_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    rounding: str = "once",
) -> dict[str, Tensor]:
    """x (T, heads of q, k and v side by side), weights (D,), cos and sin (T, pairs) -> y as x.

    The first 2 * pairs columns of each head of q and k are rotated. ``rounding``: what is rounded to the dtype of x
    before y is: nothing, the normed heads, they and what rotates them, or each step.
    """
    import torch

    tokens, size = x.shape[0], q_weight.shape[0]
    of_q, of_k, of_v = x.tensor_split((q_heads * size, (q_heads + k_heads) * size), dim=1)
    rotated = []
    for heads, count, own in ((of_q, q_heads, q_weight), (of_k, k_heads, k_weight)):
        wide = heads.reshape(tokens, count, size).float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = normed.to(x.dtype) * own if rounding == "each" else normed * own.float()
        normed = normed.to(x.dtype) if rounding in ("normed", "rotated") else normed
        c, s = (cos, sin) if rounding in ("rotated", "each") else (cos.float(), sin.float())
        rotated.append(_rotated(normed, c[:, None], s[:, None], interleaved).to(x.dtype).reshape(heads.shape))
    return {"y": torch.cat((*rotated, of_v), dim=1)}


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``heads`` (T, H, D), rotated by cos and sin (T, 1, pairs)."""
    import torch

    pairs = cos.shape[-1]
    turned, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.tensor_split(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    both = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((both, rest.to(both.dtype)), -1)


_MADE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("torch", {}, _VLLM),
    ("torch_interleaved", {"interleaved": True}, _VLLM),
    ("torch_normed", {"rounding": "normed"}, _VLLM),
    ("torch_each", {"rounding": "each"}, _QWEN3),
)

IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op=op.name,
        forward=partial(forward, **own),
        model={
            "pairs": "interleaved" if own.get("interleaved") else "neox",
            "rounding": own.get("rounding", "once"),
        },
        by_default=DEVICES if name == "torch" else (),
        builds=False,
        source=source,
    )
    for op in ROTARY
    for name, own, source in _MADE
)
