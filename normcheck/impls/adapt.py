"""Adapt a plain function or module to the forward of an implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def adapt(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Make a ``forward`` of a function or module f(x, weight, bias, eps), with or without bias, with any name for eps.

    Returns the forward and whether it takes a bias. An option is passed only to a parameter of its name.
    """
    import torch  # not at the top: commands that look through this package start without torch

    described = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(described).parameters.values()
    except (TypeError, ValueError):
        return function, True
    names = [p.name for p in parameters]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    tensors_taken = [p for p in positional if p not in ("eps", "epsilon", "lower_clip", "upper_clip")]
    takes_bias = any(p.kind is p.VAR_POSITIONAL for p in parameters) or "bias" in names or len(tensors_taken) >= 3
    eps_by_name = "eps" in names or any_name

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: float) -> Any:
        tensors = (x, weight, bias) if takes_bias else (x, weight)
        wanted = {k: v for k, v in options.items() if any_name or k in names}
        return function(*tensors, eps=eps, **wanted) if eps_by_name else function(*tensors, eps, **wanted)

    forward.__wrapped__ = function  # type: ignore[attr-defined]  # for source_location
    return forward, takes_bias
