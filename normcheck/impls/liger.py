"""Liger-Kernel's layer_norm and rms_norm: its Triton kernels, called directly with the statistics that they save.

Its fused_add_rms_norm is called as a model calls it, and gradients are its own, by autograd. The sum is made in the
dtype of x, which a residual must have, and stored before it is normed.

rms_norm does not run in place, because in place it writes dx over dy. It takes no bias. In either, casting_mode="gemma"
is fp32 throughout: with an offset of 0 that is rmsnorm, with 1 rmsnorm_gemma; "llama", the default, is rmsnorm_llama.

``liger_without_bias`` is the backward as PyTorch's LayerNormBackward benchmark calls it, with fp32 mean and rstd and
None for the bias, which then has no gradient. 0.8.5 raises AttributeError there, on ``None.dtype``: a finding, so
it is in no default set.

On a CPU Triton's interpreter runs it, where it is named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.cases.ops import FUSED_ADD, TABLE
from normcheck.impls import triton
from normcheck.impls._optional import no_bias, not_working
from normcheck.impls.implementation import Implementation, Outputs

if TYPE_CHECKING:
    from torch import Tensor

_SOURCE = "https://github.com/linkedin/Liger-Kernel/tree/main/src/liger_kernel/ops"
_MAX_N = 65536
_RMSNORMS, _ADDING = (
    tuple(sorted((op for op in t if not op.centered and not op.clamped), key=lambda op: (op.rounds_xhat, op.name)))
    for t in (TABLE, FUSED_ADD)
)
"""The ops of its rms_norm and of its fused_add_rms_norm; an op that rounds xhat needs another casting_mode."""


def _casting(op: Op) -> tuple[float, str]:
    """The number added to the weight, and Liger's casting_mode."""
    return op.weight_offset, "llama" if op.rounds_xhat else "gemma"


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Outputs:
    """x (M, N) or (B, S, N), weight and bias (N,) -> y as x; mean, rstd (M,) fp32."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    y, _, mean, rstd, *_ = layer_norm_forward(x, weight, bias, eps)
    return {"y": y, "mean": mean, "rstd": rstd}


def layernorm_backward(
    with_bias: bool, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, saved: Outputs, *, eps: float
) -> Outputs:
    """dy and x, with what forward returned -> dx as x; dw as weight; db, which torch sums if Liger does not."""
    from liger_kernel.ops.layer_norm import layer_norm_backward

    rows, statistics = x.flatten(0, -2), (saved["mean"], saved["rstd"])
    dx, dw, db = layer_norm_backward(dy, rows, weight, bias if with_bias else None, *statistics)
    if not with_bias:
        db = dy.flatten(0, -2).float().sum(0).to(bias.dtype)
    return {"dx": dx, "dw": dw, "db": db}


def rmsnorm(op: Op, x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Outputs:
    """x (M, N) or (B, S, N), weight (N,) -> y as x; rstd (M,) fp32."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    y, _, rstd, *_ = rms_norm_forward(x, weight, eps, *_casting(op), None)
    return {"y": y, "rstd": rstd}


def rmsnorm_backward(
    op: Op, dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Outputs, *, eps: float
) -> Outputs:
    """dy and x, with what forward returned -> dx as x; dw as weight."""
    from liger_kernel.ops.rms_norm import _str_to_casting_mode, rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    block, warps = calculate_settings(x.shape[-1])
    offset, mode = _casting(op)
    rows, casting = x.flatten(0, -2), _str_to_casting_mode[mode]
    dx, dw = rms_norm_backward(dy, rows, weight, saved["rstd"], offset, casting, block, warps, False, None)
    return {"dx": dx, "dw": dw}


def fused_add_rmsnorm(
    op: Op, x: Tensor, weight: Tensor, bias: None, *, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """x and residual (M, N) or (B, S, N) of one dtype, weight (N,) -> y and residual_out as x, in autograd's graph."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    y, residual_out = LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, *_casting(op), False)
    return y, residual_out


def _supports(case: Case) -> str | None:
    return f"takes at most {_MAX_N} columns" if case.N > _MAX_N else None


def _supports_rmsnorm(case: Case) -> str | None:
    return no_bias(case) or _supports(case)


def _unavailable(device: str) -> str | None:
    """Why Liger's kernels cannot run on ``cpu`` or ``cuda``, or None."""
    with _without_peft():
        return triton.unavailable(device) or not_working("liger_kernel.ops.layer_norm", "liger-kernel")


def _without_fused_add(device: str) -> str | None:
    """The same of the kernel that adds a residual, which older versions do not have."""
    return _unavailable(device) or not_working("liger_kernel.ops.fused_add_rms_norm", "liger-kernel")


@contextmanager
def _without_peft() -> Iterator[None]:
    """In the block, peft is as if it were not installed, unless it was imported before.

    Liger imports it if it can, and with it transformers, for some seconds, to patch models; its kernels need neither.
    """
    hidden = "peft" not in sys.modules
    if hidden:
        sys.modules["peft"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop("peft", None)


def _layernorm(name: str, *, with_bias: bool, by_default: tuple[str, ...]) -> Implementation:
    return Implementation(
        name=name,
        op="layernorm",
        forward=layernorm,
        backward=partial(layernorm_backward, with_bias),
        supports=_supports,
        biases=(True,),
        unavailable=_unavailable,
        ranks=(2, 3),
        by_default=by_default,
        source=_SOURCE,
    )


IMPLEMENTATIONS = (
    _layernorm("liger", with_bias=True, by_default=("cuda",)),
    *(
        Implementation(
            name="liger",
            op=op.name,
            forward=partial(rmsnorm, op),
            backward=partial(rmsnorm_backward, op),
            supports=_supports_rmsnorm,
            biases=(False,),
            unavailable=_unavailable,
            ranks=(2, 3),
            by_default=("cuda",),
            source=_SOURCE,
        )
        for op in _RMSNORMS
    ),
    *(
        Implementation(
            name="liger",
            op=op.name,
            forward=partial(fused_add_rmsnorm, op),
            supports=_supports,
            unavailable=_without_fused_add,
            ranks=(2, 3),
            model={"sum": "rounded"},
            by_default=("cuda",),
            source=_SOURCE,
        )
        for op in _ADDING
    ),
    _layernorm("liger_without_bias", with_bias=False, by_default=()),
)
