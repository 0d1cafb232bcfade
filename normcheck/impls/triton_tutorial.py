"""The algorithm of Triton's LayerNorm tutorial, in kernels of this project's own, with and without its barrier.

``triton_tutorial`` waits for all threads before it releases a lock, ``triton_tutorial_no_barrier`` does not, as the
tutorial did not at first: a race, which shows on some GPUs in some runs. Neither is in a default set, since both have
a fault that is not fixed here: dw and db are summed in the dtype of x, so that in half precision every row and every
partial sum is rounded before the next is added. In fp32 they pass.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.impls.implementation import Implementation, Outputs
from normcheck.impls.triton import unavailable
from normcheck.impls.triton_calls import interpret_on_cpu

if TYPE_CHECKING:
    from torch import Tensor

_SOURCE = "https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html"
_MAX_BYTES = 65536


def _kernels(x: Tensor) -> Any:
    interpret_on_cpu(x)
    from normcheck.impls.kernels import tutorial

    return tutorial


def _forward(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Outputs:
    """x (M, N) or (B, S, N), weight and bias (N,) -> y in x's shape; mean, rstd (M,) fp32."""
    outputs: dict[str, Tensor] = _kernels(x).forward(x.flatten(0, -2), weight, bias, eps=eps)
    return {**outputs, "y": outputs["y"].view(x.shape)}


def _backward(
    barrier: bool, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, saved: Outputs, *, eps: float
) -> Outputs:
    """dy and x, with what forward returned -> dx in x's shape; dw and db as weight and bias. eps is in rstd already."""
    gradients: dict[str, Tensor] = _kernels(x).backward(
        dy.flatten(0, -2), x.flatten(0, -2), weight, bias, mean=saved["mean"], rstd=saved["rstd"], barrier=barrier
    )
    return {**gradients, "dx": gradients["dx"].view(x.shape)}


def _supports(case: Case) -> str | None:
    row = case.N * (4 if case.dtype == "fp32" else 2)
    return f"a row has {row} bytes: the tutorial takes at most {_MAX_BYTES}" if row > _MAX_BYTES else None


IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op="layernorm",
        forward=_forward,
        backward=partial(_backward, barrier),
        supports=_supports,
        biases=(True,),
        unavailable=unavailable,
        ranks=(2, 3),
        deterministic=False,
        by_default=(),
        source=_SOURCE,
    )
    for name, barrier in (("triton_tutorial", True), ("triton_tutorial_no_barrier", False))
)
