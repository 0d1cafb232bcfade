"""A plain function or module as the forward of an implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def adapt(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """A plain function or module as a ``forward``: f(x, weight, bias, eps), with or without bias, any name for eps.

    Returns the forward and whether it takes a bias. Options are passed only to parameters of their names.
    """
    import torch  # this package is looked through by commands that start without it

    described = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(described).parameters.values()
    except (TypeError, ValueError):
        return function, True
    names = [p.name for p in parameters]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    tensors_taken = [p for p in positional if p not in ("eps", "epsilon", "lower_clip", "upper_clip")]
    takes_bias = any(p.kind is p.VAR_POSITIONAL for p in parameters) or "bias" in names or len(tensors_taken) >= 3
    eps_by_name = "eps" in names or anything

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: float) -> Any:
        tensors = (x, weight, bias) if takes_bias else (x, weight)
        wanted = {k: v for k, v in options.items() if anything or k in names}
        return function(*tensors, eps=eps, **wanted) if eps_by_name else function(*tensors, eps, **wanted)

    forward.__wrapped__ = function  # type: ignore[attr-defined]  # where it is defined
    return forward, takes_bias
