"""torch's own norms, called as they are in the io dtype: no upcast before and no cast after.

layernorm: ``torch.native_layer_norm`` with its mean and rstd, and the backward that autograd would call, so that it can
be fed with a reference's statistics. rmsnorm: ``rms_norm``, which returns no rstd; its gradients come from autograd.

Not in the default set on a CPU, where it fails in half precision, and rightly: mean and rstd are saved in the io dtype,
and dw and db are several ulps off. In fp32 the CPU's backward works with raw moments, as autograd's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.errors import UnsupportedCase
from normcheck.impls._optional import no_bias
from normcheck.impls.implementation import Implementation, Outputs

if TYPE_CHECKING:
    from torch import Tensor

_DOCS = "https://pytorch.org/docs/stable/generated/torch.nn.functional."
_RAW = "torch's backward on a CPU works with raw moments"


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Outputs:
    """x (M, N) or (B, S, N), weight and bias (N,) or None -> y as x; mean, rstd (M, 1) in the dtype torch saves."""
    import torch

    _require_one_dtype(x, weight)
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return {"y": y, "mean": mean, "rstd": rstd}


def layernorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, saved: Outputs, *, eps: float
) -> Outputs:
    """dy and x, with what forward returned -> dx as x; dw, db as weight and bias, if given. eps is in rstd already."""
    import torch

    backward = torch.ops.aten.native_layer_norm_backward
    shape, statistics = x.shape[-1:], (saved["mean"], saved["rstd"])
    wanted = (True, weight is not None, bias is not None)
    gradients = zip(("dx", "dw", "db"), backward(dy, x, shape, *statistics, weight, bias, wanted), strict=True)
    return {name: gradient for name, gradient in gradients if gradient is not None}


def rmsnorm(x: Tensor, weight: Tensor | None, bias: None, *, eps: float) -> Tensor:
    """x (M, N) or (B, S, N), weight (N,) or None -> y as x."""
    from torch.nn import functional

    _require_one_dtype(x, weight)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _require_one_dtype(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and x.is_cuda and x.dtype != weight.dtype:
        raise UnsupportedCase(f"torch's norms on a GPU take no {weight.dtype} weight beside x in {x.dtype}")


def _model(case: Case) -> Mapping[str, Any]:
    """What layernorm declares. A case does not name its device, but kernels are interpreted on a CPU only."""
    from normcheck.impls.kernels.interpreted import enabled

    return {"bwd_form": "raw", "reason": _RAW} if enabled() else {}


IMPLEMENTATIONS = (
    Implementation(
        name="torch_native",
        op="layernorm",
        forward=layernorm,
        backward=layernorm_backward,
        ranks=(2, 3),
        weights=(False, True),
        heads=True,
        model=_model,
        by_default=("cuda",),
        builds=False,
        source=f"{_DOCS}layer_norm.html",
    ),
    Implementation(
        name="torch_native",
        op="rmsnorm",
        forward=rmsnorm,
        supports=no_bias,
        biases=(False,),
        ranks=(2, 3),
        weights=(False, True),
        heads=True,
        by_default=("cuda",),
        builds=False,
        source=f"{_DOCS}rms_norm.html",
    ),
)
