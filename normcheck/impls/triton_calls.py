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
    rounds_xhat: bool = False,
    residual: Tensor | None = None,
    kernels: Kernels = own_kernels,
    **options: float,
) -> dict[str, Tensor]:
    """Normalise x (M, N) or (B, S, N) by weight and bias (N,), or None.

    Returns y in x's shape, rstd, and the op's mean and bitmask.
    ``residual``, shaped as x, is added first; the sum is residual_out, also in x's shape. ``options``: lower_clip and
    upper_clip, of the op that clamps.
    """
    of_op: dict[str, Any] = {} if residual is None else {"residual": _rows(residual)}
    if options:
        of_op["clips"] = (options["lower_clip"], options["upper_clip"])
    of_op |= {"eps": eps, "centered": centered, "zero_centered": zero_centered}
    of_op |= {"rounds_xhat": True} if rounds_xhat else {}
    return _called(kernels, "forward", "forward", x, _rows(x), weight, bias, **of_op)


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

    return _called(
        kernels,
        "quantised",
        "forward",
        x,
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


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    saved: Mapping[str, Tensor],
    *,
    eps: float,
    zero_centered: bool = False,
    rounds_xhat: bool = False,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    kernels: Kernels = own_kernels,
    **options: float,
) -> dict[str, Tensor]:
    """Gradients in the shapes of x, weight and bias. eps and the clip limits are in the saved rstd and bitmask.

    With ``dresidual_out``, shaped as x, also dresidual; the sum of x and the residual is the saved residual_out.
    """
    of_op: dict[str, Any] = {} if dresidual_out is None else {"added": _rows(dresidual_out)}
    of_op |= {"rounds_xhat": True} if rounds_xhat else {}
    return _called(
        kernels,
        "backward",
        "backward",
        x,
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
    own = {"eps": eps, "before": before, "sigmoid": sigmoid}
    return _called(kernels, "gated", "forward", x, _rows(x), _rows(gate), weight, **own)


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
    own = {"rstd": saved["rstd"], "before": before, "sigmoid": sigmoid}
    return _called(kernels, "gated", "backward", x, _rows(dy), _rows(x), _rows(gate), weight, **own)


def length_forward(
    x: Tensor, weight: None, bias: None, *, eps: float, how: str, kernels: Kernels = own_kernels
) -> dict[str, Tensor]:
    """y in the shape of x (M, N) or (B, S, N), each row over its length; and rstd."""
    return _called(kernels, "l2norm", "forward", x, _rows(x), eps=eps, how=how)


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
    return _called(kernels, "l2norm", "backward", x, _rows(dy), _rows(x), rstd=saved["rstd"], eps=eps, how=how)


def modulated_forward(
    x: Tensor,
    weight: None,
    bias: None,
    *,
    eps: float,
    scale: Tensor,
    shift: Tensor,
    centered: bool,
    residual: Tensor | None = None,
    residual_gate: Tensor | None = None,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """y in the shape of x (B, S, N), modulated by scale and shift (B, N); and the statistics.

    With ``residual``, shaped as x, x times ``residual_gate`` (B, N) is added to it first; the sum is residual_out.
    """
    own: dict[str, Any] = {"eps": eps, "centered": centered}
    scale, shift, residual_gate = _of_one_stride(scale, shift, residual_gate)
    if residual is not None:
        own |= {"residual": _rows(residual), "gate": residual_gate}
    return _called(kernels, "modulated", "forward", x, _rows(x), scale, shift, **own)


def _of_one_stride(scale: Tensor, shift: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """These of each sample (B, N), packed unless they have one row stride, which is all that a kernel takes."""
    if len({tensor.stride(0) for tensor in (scale, shift, gate) if tensor is not None}) > 1:
        return scale.contiguous(), shift.contiguous(), gate if gate is None else gate.contiguous()
    return scale, shift, gate


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
    residual: Tensor | None = None,
    residual_gate: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    kernels: Kernels = own_kernels,
) -> dict[str, Tensor]:
    """Gradients in the shapes of x and of scale and shift.

    With ``dresidual_out``, shaped as x, also dresidual and dresidual_gate; what was normed is the saved residual_out.
    """
    own: dict[str, Any] = {"rstd": saved["rstd"], "mean": saved.get("mean")}
    scale, _, residual_gate = _of_one_stride(scale, scale, residual_gate)
    normed = x
    if dresidual_out is not None:
        own |= {"source": _rows(x), "gate": residual_gate, "added": _rows(dresidual_out)}
        normed = saved[RESIDUAL_OUT]
    return _called(kernels, "modulated", "backward", x, _rows(dy), _rows(normed), scale, **own)


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
    return _called(kernels, "grouped", "forward", x, x, weight, bias, eps=eps, groups=groups, silu=silu)


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
    own = {"mean": saved["mean"], "rstd": saved["rstd"], "groups": groups, "silu": silu}
    return _called(kernels, "grouped", "backward", x, dy, x, weight, bias, **own)


def rotary_forward(
    x: Tensor, weight: None, bias: None, *, interleaved: bool, kernels: Kernels = own_kernels, **named: Any
) -> dict[str, Tensor]:
    """y (T, N) as x, and rstd of each head of q and k. ``named``: eps and what a rotary op gets by name."""
    return _called(kernels, "rotary", "forward", x, x, interleaved=interleaved, **named)


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
    own = {"rstd": saved["rstd"], "interleaved": interleaved}
    return _called(kernels, "rotary", "backward", x, dy, x, **own, **named)


def _called(kernels: Kernels, part: str, way: str, x: Tensor, *tensors: Tensor | None, **own: Any) -> dict[str, Tensor]:
    """What ``way`` of ``part``, forward or backward, returns of ``tensors``, its matrices (M, N) in the shape of x."""
    interpret_on_cpu(x)
    returned: dict[str, Tensor] = getattr(kernels(part), way)(*tensors, **own)
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
