"""NVIDIA apex's FusedLayerNorm and FusedRMSNorm, as functions; gradients by autograd. Not run by this project yet.

Written from its sources, and so in no default set: ``--impl apex`` tries it if it is installed. With a weight in fp32
beside x in half precision its norms return y in fp32: that is another op, and left out.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.case import Case
from normcheck.impls._optional import missing, no_bias, one_dtype
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_MODULE = "apex.normalization.fused_layer_norm"
_SOURCE = "https://github.com/NVIDIA/apex/blob/master/apex/normalization/fused_layer_norm.py"


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """x (M, N) or (B, S, N), weight and bias (N,) -> y as x."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    y: Tensor = fused_layer_norm_affine(x, weight, bias, x.shape[-1:], eps)
    return y


def rmsnorm(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """x (M, N) or (B, S, N), weight (N,) -> y as x."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    y: Tensor = fused_rms_norm_affine(x, weight, x.shape[-1:], eps)
    return y


def _supports_rmsnorm(case: Case) -> str | None:
    return no_bias(case) or one_dtype(case)


_unavailable = partial(missing, _MODULE, "apex")

IMPLEMENTATIONS = (
    Implementation(
        name="apex",
        op="layernorm",
        forward=layernorm,
        supports=one_dtype,
        unavailable=_unavailable,
        ranks=(2, 3),
        by_default=(),
        source=_SOURCE,
    ),
    Implementation(
        name="apex",
        op="rmsnorm",
        forward=rmsnorm,
        supports=_supports_rmsnorm,
        biases=(False,),
        unavailable=_unavailable,
        ranks=(2, 3),
        by_default=(),
        source=_SOURCE,
    ),
)
