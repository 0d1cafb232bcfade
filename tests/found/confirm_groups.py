"""Norms of groups of channels: each function is one defect of docs/found.md, in plain torch; without it, it fails."""

from __future__ import annotations

from typing import Any

import torch
from exact import BF16, F16, F32, F64, bare, error, gradients, half_ulps, hollow, numbers, shows

EPS = 1e-5


def groups(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, count: int, eps: float = EPS) -> torch.Tensor:
    """The exact GroupNorm of (B, C, ...), in fp64."""
    rows = x.to(F64).reshape(x.shape[0], count, -1)
    centred = rows - rows.mean(-1, keepdim=True)
    normed = (centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()).reshape(x.shape)
    per_channel = (-1, *[1] * (x.dim() - 2))
    return normed * w.to(F64).reshape(per_channel) + b.to(F64).reshape(per_channel)


def liger(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, count: int) -> torch.Tensor:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction as Liger

    y: torch.Tensor = Liger.apply(x, w, b, x.shape[1], count, EPS)
    return y


def weights(channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(channels, dtype=dtype, seed=1, grad=True), numbers(channels, dtype=dtype, seed=2, grad=True)


@shows("liger-kernel-0.8.0", gpu=True)
def liger_groupnorm_squares_in_half() -> None:
    x, (w, b) = (300 * numbers(2, 8, 64)).to(F16), weights(8, F16)
    assert error(liger(x, w, b, 2), groups(x, w, b, 2)) > 0.1  # squares in fp32: 3e-4


@shows("liger-kernel-0.8.0", gpu=True)
def liger_groupnorm_subtracts_squares() -> None:
    x, (w, b) = 3000 + numbers(2, 8, 64), weights(8, F32)
    assert error(liger(x, w, b, 2), groups(x, w, b, 2)) > 0.01
    assert error(torch.nn.functional.group_norm(x, 2, w, b, EPS), groups(x, w, b, 2)) < 1e-3


@shows("liger-kernel-0.8.0", gpu=True)
def liger_groupnorm_statistics_in_half() -> None:
    x, (w, b) = (20 + numbers(2, 8, 64)).to(BF16).requires_grad_(), weights(8, BF16)
    dy = numbers(2, 8, 64, dtype=BF16, seed=3)
    _, dw, _ = torch.autograd.grad(liger(x, w, b, 2), (x, w, b), dy)
    _, exact, _ = gradients(lambda *t: groups(*t, 2), (x, w, b), dy)
    assert error(dw, exact) > 0.02  # statistics in fp32: 2e-3


@shows("liger-kernel-0.8.0", gpu=True)
def liger_groupnorm_rounds_fp16_gradients_to_bf16() -> None:
    x, (w, b) = numbers(1, 8, 64, dtype=F16).requires_grad_(), weights(8, F16)
    dy = numbers(1, 8, 64, dtype=F16, seed=3)
    *_, db = torch.autograd.grad(liger(x, w, b, 2), (x, w, b), dy)
    assert torch.equal(db, db.to(BF16).to(F16))
    assert half_ulps(db, dy.to(F64).sum((0, 2))) > 3


@shows("liger-kernel-0.8.0", gpu=True)
def liger_groupnorm_adds_dw_in_half() -> None:
    x, (w, b) = numbers(4096, 4, 8, dtype=BF16).requires_grad_(), weights(4, BF16)
    dy = torch.ones_like(x)
    *_, db = torch.autograd.grad(liger(x, w, b, 2), (x, w, b), dy)
    assert error(db, dy.to(F64).sum((0, 2))) > 0.5  # 32768; in bf16 a sum of eights ends at 2048


@shows("liger-kernel-0.8.0", gpu=True)
def liger_groupnorm_takes_the_width_of_an_image_for_its_size() -> None:
    x, (w, b) = numbers(2, 4, 8, 16, grad=True), weights(4, F32)
    y = liger(x, w, b, 2)
    try:
        y.backward(numbers(2, 4, 8, 16, seed=3))
    except RuntimeError as raised:
        said = str(raised)
    else:
        said = "it has a gradient"
    assert "'[2, 4, 8, 16]' is invalid for input of size 128" in said  # 2 * 4 * 16


# --- sglang ---


@shows("sglang-0.5.23")
def sglang_group_norm_silu_subtracts_squares() -> None:
    """Its kernel for groups below 2^18 elements, called as its launcher does, which asks for a GPU."""
    hollow("sglang", "srt", "kernels", "kernels.ops", "kernels.ops.diffusion", "kernels.ops.diffusion.norm")
    bare("sglang.srt.utils", is_hip=lambda: False)
    bare("sglang.srt.utils.custom_op", register_custom_op=lambda *_, **__: lambda function: function)
    from sglang.kernels.ops.diffusion.norm import group_norm_silu_triton as theirs

    kernel: Any = theirs._group_norm_silu_contiguous_kernel
    x, (w, b) = 3000 + numbers(2, 8, 64), (t.detach() for t in weights(8, F32))
    y = torch.empty_like(x)
    kernel[(2, 2)](x, w, b, y, 8, 64, 4, 4 * 64, EPS, BLOCK_SIZE=4096)
    silu = torch.nn.functional.silu
    assert error(y, silu(groups(x, w, b, 2))) > 0.01
    assert error(silu(torch.nn.functional.group_norm(x, 2, w, b, EPS)), silu(groups(x, w, b, 2))) < 1e-3
