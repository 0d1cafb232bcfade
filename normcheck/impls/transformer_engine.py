"""Transformer Engine's LayerNorm and RMSNorm modules, zero-centred gamma included. Not run by this project yet.

Written from its documentation, and so in no default set: ``--impl transformer_engine`` tries it if it is installed.
A module owns its weights, so each call makes one with the weights of the case; the backward runs the forward again, to
get its graph. The statistics stay inside. x is cast to the dtype of the weights, so both must have the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.cases.ops import GRADIENTS, OPS, names_of
from normcheck.impls._optional import missing, no_bias, one_dtype
from normcheck.impls.implementation import Implementation, Outputs

if TYPE_CHECKING:
    from torch import Tensor

_OPS = names_of(lambda op: not op.clamped and not op.rounds_xhat and op.zero_centered <= op.centered)
"""The ops of its modules, except an RMSNorm with a zero-centred gamma, which is not tried."""


def _module(name: str, weight: Tensor, bias: Tensor | None, eps: float) -> Any:
    """A module with copies of these weights."""
    import torch
    from transformer_engine import pytorch

    op = OPS[name]
    norm = pytorch.LayerNorm if op.centered else pytorch.RMSNorm
    module = norm(len(weight), eps=eps, zero_centered_gamma=op.zero_centered, dtype=weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


def forward(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Outputs:
    """x (M, N) or (B, S, N), weight and bias (N,) -> y as x."""
    return {"y": _module(op, weight, bias, eps)(x).detach()}


def backward(
    op: str, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, saved: Outputs, *, eps: float
) -> Outputs:
    """dy and x -> dx as x; dw as weight and, with a bias, db, by the module's own backward."""
    import torch

    module, leaf = _module(op, weight, bias, eps), x.detach().requires_grad_()
    with torch.enable_grad():
        leaves = (leaf, module.weight) if bias is None else (leaf, module.weight, module.bias)
        gradients = torch.autograd.grad(module(leaf), leaves, dy)
    return dict(zip(GRADIENTS, gradients, strict=False))


def _supports(case: Case) -> str | None:
    return one_dtype(case) or (None if OPS[case.op].centered else no_bias(case))


IMPLEMENTATIONS = tuple(
    Implementation(
        name="transformer_engine",
        op=op,
        forward=partial(forward, op),
        backward=partial(backward, op),
        supports=_supports,
        biases=(OPS[op].centered,),
        unavailable=partial(missing, "transformer_engine.pytorch", "Transformer Engine"),
        ranks=(2, 3),
        by_default=(),
        source="https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html",
    )
    for op in _OPS
)
