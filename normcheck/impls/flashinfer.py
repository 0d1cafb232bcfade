"""FlashInfer's rmsnorm, a forward for inference in half precision. Not run by this project yet.

Written from its documentation, and so in no default set: ``--impl flashinfer`` tries it if it is installed. The report
says that there is no backward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.case import Case
from normcheck.impls._optional import missing, no_bias, one_dtype
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """x (M, N), weight (N,) -> y as x, without an autograd graph."""
    import flashinfer

    y: Tensor = flashinfer.norm.rmsnorm(x.detach(), weight.detach(), eps=eps)
    return y


def _supports(case: Case) -> str | None:
    return no_bias(case) or one_dtype(case)


IMPLEMENTATIONS = (
    Implementation(
        name="flashinfer",
        op="rmsnorm",
        forward=rmsnorm,
        supports=_supports,
        biases=(False,),
        unavailable=partial(missing, "flashinfer.norm", "flashinfer"),
        dtypes=("fp16", "bf16"),
        by_default=(),
        source="https://docs.flashinfer.ai/api/norm.html",
    ),
)
