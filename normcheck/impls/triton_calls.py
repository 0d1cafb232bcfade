"""Calls of this project's Triton kernels: tensors of any rank become rows, and what comes back has the shape of x.

torch and the kernels are imported when the first case runs, see ``triton.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from normcheck.cases.dtypes import CODES
from normcheck.cases.tensor_names import CODES as Q
from normcheck.cases.tensor_names import DGATE, DRESIDUAL, RESIDUAL_OUT

if TYPE_CHECKING:
    from torch import Tensor

_MATRICES = ("y", Q, RESIDUAL_OUT, "dx", DRESIDUAL, DGATE)

Kernels = Callable[[str], Any]
"""Name of a part, such as ``forward``, ``gated`` or ``grouped`` -> its module."""

LEAST_SCALE = 2.0**-20
"""The least scale that is returned: that of rows of zeros."""


@cache
def own_kernels(part: str) -> Any:
    """The module of ``normcheck.impls.kernels`` that has ``part``."""
    return import_module(f"normcheck.impls.kernels.{part}")


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    centered: bool = True,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    kernels: Kernels = own_kernels,
    **options: float,
) -> dict[str, Tensor]:
    """Normalise x (M, N) or (B, S, N) by weight and bias (N,), or None.

    Returns y in x's shape, rstd, and the op's mean and bitmask.
    ``residual``, shaped as x, is added first; the sum is residual_out, also in x's shape. ``options``: lower_clip and
    upper_clip, of the op that clamps.
    """
    interpret_on_cpu(x)
    of_op: dict[str, Any] = {} if residual is None else {"residual": _rows(residual)}
    if options:
        of_op["clips"] = (options["lower_clip"], options["upper_clip"])
    outputs: dict[str, Tensor] = kernels("forward").forward(
        _rows(x), weight, bias, eps=eps, centered=centered, zero_centered=zero_centered, **of_op
    )
    return _shaped_as(x, outputs)


def quantise(
    x: Tensor,
    weight: Tensor | None,
    bias: None,
    *,
    eps: float,
    fmt: str,
    columns: int | None,
    scale: Tensor | None = None,
    scale_ub: float | None = None,
    residual: Tensor | None = None,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """The codes q of the normed x (M, N) or (B, S, N), in its shape and in ``fmt``; weight (N,) or None.

    ``columns``: see ``CODED``. A ``scale`` of one element is given, or one (M, G) is returned, made of |y| up to
    scale_ub. ``residual``, shaped as x, is added first; the sum is residual_out, also in x's shape.
    """
    import torch

    interpret_on_cpu(x)
    outputs: dict[str, Tensor] = kernels("quantised").forward(
        _rows(x),
        weight,
        eps=eps,
        dtype=getattr(torch, CODES[fmt].torch_name),
        columns=columns,
        scale=scale,
        scale_ub=scale_ub,
        least=LEAST_SCALE,
        residual=None if residual is None else _rows(residual),
    )
    return _shaped_as(x, outputs)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    kernels: Kernels = own_kernels,
    **options: float,
) -> dict[str, Tensor]:
    """Gradients in the shapes of x, weight and bias. eps and the clip limits are in the saved rstd and bitmask.

    With ``dresidual_out``, shaped as x, also dresidual; the sum of x and the residual is the saved residual_out.
    """
    interpret_on_cpu(x)
    of_op = {} if dresidual_out is None else {"added": _rows(dresidual_out)}
    gradients: dict[str, Tensor] = kernels("backward").backward(
        _rows(dy),
        _rows(x if dresidual_out is None else saved[RESIDUAL_OUT]),
        weight,
        bias,
        mean=saved.get("mean"),
        rstd=saved["rstd"],
        bitmask=saved.get("bitmask"),
        zero_centered=zero_centered,
        **of_op,
    )
    return _shaped_as(x, gradients)


def gate_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: None,
    *,
    eps: float,
    gate: Tensor,
    before: bool,
    sigmoid: bool,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """y in the shape of x (M, N) or (B, S, N), gated by ``gate``, shaped as x; and rstd."""
    interpret_on_cpu(x)
    own = {"eps": eps, "before": before, "sigmoid": sigmoid}
    outputs: dict[str, Tensor] = kernels("gated").forward(_rows(x), _rows(gate), weight, **own)
    return _shaped_as(x, outputs)


def gate_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    gate: Tensor,
    before: bool,
    sigmoid: bool,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """Gradients in the shapes of x, gate and weight."""
    interpret_on_cpu(x)
    own = {"rstd": saved["rstd"], "before": before, "sigmoid": sigmoid}
    gradients: dict[str, Tensor] = kernels("gated").backward(_rows(dy), _rows(x), _rows(gate), weight, **own)
    return _shaped_as(x, gradients)


def length_forward(
    x: Tensor, weight: None, bias: None, *, eps: float, how: str, kernels: Kernels = own_kernels
) -> dict[str, Tensor]:
    """y in the shape of x (M, N) or (B, S, N), each row over its length; and rstd."""
    interpret_on_cpu(x)
    outputs: dict[str, Tensor] = kernels("l2norm").forward(_rows(x), eps=eps, how=how)
    return _shaped_as(x, outputs)


def length_backward(
    dy: Tensor,
    x: Tensor,
    weight: None,
    bias: None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    how: str,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """dx in the shape of x."""
    interpret_on_cpu(x)
    gradients: dict[str, Tensor] = kernels("l2norm").backward(_rows(dy), _rows(x), rstd=saved["rstd"], eps=eps, how=how)
    return _shaped_as(x, gradients)


def modulated_forward(
    x: Tensor,
    weight: None,
    bias: None,
    *,
    eps: float,
    scale: Tensor,
    shift: Tensor,
    centered: bool,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """y in the shape of x (B, S, N), modulated by scale and shift (B, N); and the statistics."""
    interpret_on_cpu(x)
    own = {"eps": eps, "centered": centered}
    outputs: dict[str, Tensor] = kernels("modulated").forward(_rows(x), scale, shift, **own)
    return _shaped_as(x, outputs)


def modulated_backward(
    dy: Tensor,
    x: Tensor,
    weight: None,
    bias: None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    scale: Tensor,
    shift: Tensor,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """Gradients in the shapes of x and of scale and shift."""
    interpret_on_cpu(x)
    own = {"rstd": saved["rstd"], "mean": saved.get("mean")}
    gradients: dict[str, Tensor] = kernels("modulated").backward(_rows(dy), _rows(x), scale, **own)
    return _shaped_as(x, gradients)


def grouped_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    groups: int,
    silu: bool,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """y in the shape of x (B, C, L), and the statistics of each group."""
    interpret_on_cpu(x)
    outputs: dict[str, Tensor] = kernels("grouped").forward(x, weight, bias, eps=eps, groups=groups, silu=silu)
    return outputs


def grouped_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    groups: int,
    silu: bool,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """Gradients in the shapes of x, weight and bias."""
    interpret_on_cpu(x)
    own = {"mean": saved["mean"], "rstd": saved["rstd"], "groups": groups, "silu": silu}
    gradients: dict[str, Tensor] = kernels("grouped").backward(dy, x, weight, bias, **own)
    return gradients


def rotary_forward(
    x: Tensor, weight: None, bias: None, *, interleaved: bool, kernels: Kernels = own_kernels, **named: Any
) -> dict[str, Tensor]:
    """y (T, N) as x, and rstd of each head of q and k. ``named``: eps and what a rotary op gets by name."""
    interpret_on_cpu(x)
    outputs: dict[str, Tensor] = kernels("rotary").forward(x, interleaved=interleaved, **named)
    return outputs


def rotary_backward(
    dy: Tensor,
    x: Tensor,
    weight: None,
    bias: None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    interleaved: bool,
    kernels: Kernels = own_kernels,
    **named: Any,
) -> dict[str, Tensor]:
    """dx (T, N); ``named``: what a rotary op gets by name."""
    interpret_on_cpu(x)
    own = {"rstd": saved["rstd"], "interleaved": interleaved}
    gradients: dict[str, Tensor] = kernels("rotary").backward(dy, x, **own, **named)
    return gradients


def _shaped_as(x: Tensor, returned: dict[str, Tensor]) -> dict[str, Tensor]:
    """``returned`` with its matrices (M, N) in the shape of x."""
    if x.dim() == 2:
        return returned
    return {name: t.view(x.shape) if name in _MATRICES else t for name, t in returned.items()}


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2)


def interpret_on_cpu(x: Tensor) -> None:
    """On a CPU, apply the remedy to Triton's interpreter, which must come before the kernels are defined."""
    if not x.is_cuda:
        from normcheck.impls.kernels import interpreter

        interpreter.enable()
