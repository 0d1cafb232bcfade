"""cuDNN as torch's operators: ``layer_norm`` and ``rms_norm`` of ``cudnn.experimental.ops``, gradients by autograd.

The operators build and keep a graph for each shape, dtype and stride. Those of ``cudnn`` build the same nodes, so what
is known of its numbers holds here; this checks the operator around them: what it saves for backward, the copies that
it makes of rows that are not packed, its device and stream. Neither takes an input of no rows, and RMSNorm takes a
weight in the dtype of x alone. The first frontend known to have both is 1.32.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.impls import cudnn
from normcheck.impls._optional import not_working
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_MODULE = "cudnn.ops.norm.layernorm"


def _unavailable(op: str, device: str) -> str | None:
    """Why these operators cannot be used on ``device`` (cpu or cuda), or None."""
    reason = cudnn.unavailable(op, 0, device)
    return reason or not_working(_MODULE, "nvidia-cudnn-frontend, whose cudnn.experimental.ops has norms from 1.32 on,")


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """x (M, N) or (B, S, N), weight and bias (N,) or None -> y as x."""
    from cudnn.experimental.ops import layer_norm

    y: Tensor = layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return y


def rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """x (M, N) or (B, S, N), weight (N,), bias (N,) or None, all in one dtype -> y as x."""
    from cudnn.experimental.ops import rms_norm

    y: Tensor = rms_norm(x, weight, bias, eps)
    return y


def _supports(case: Case) -> str | None:
    return "cuDNN's operators take no input of no rows" if case.M == 0 else None


def _implementation(op: str, **fields: Any) -> Implementation:
    return Implementation(
        name="cudnn_ops",
        op=op,
        supports=_supports,
        unavailable=partial(_unavailable, op),
        ranks=(2, 3),
        by_default=("cuda",),
        source="https://github.com/NVIDIA/cudnn-frontend",
        **fields,
    )


IMPLEMENTATIONS = (
    _implementation("layernorm", forward=layernorm, biases=(False, True), weights=(False, True)),
    _implementation("rmsnorm", forward=rmsnorm, biases=(False, True), weight_dtypes=("io",)),
)
