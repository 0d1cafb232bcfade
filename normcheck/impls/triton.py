"""This project's own Triton kernels, for every op that does not round xhat: on a GPU, and interpreted on a CPU.

After a residual the stored sum is normed, so that a backward has of it what the forward normed. Codes are made of y in
fp32, by the reciprocal of their scale.

torch, triton and the kernels are imported when the first case runs: discovery reads this module on machines without
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from normcheck.cases.dtypes import CODES
from normcheck.cases.ops import CODES as Q
from normcheck.cases.ops import DGATE, DRESIDUAL, FUSED_ADD, GATED, MODULATED, OPS, QUANTISED, RESIDUAL_OUT, names_of
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_MATRICES = ("y", Q, RESIDUAL_OUT, "dx", DRESIDUAL, DGATE)

ON_GPUS = ("cuda",)
"""Where the ops of models are checked by default: on a CPU, interpreted, they would take the most of a run of all."""

Kernels = Callable[[str], Any]
"""Name of a part, ``forward``, ``backward``, ``quantised``, ``gated`` or ``modulated`` -> its module."""

CODED: Mapping[str, tuple[str, str, int | None]] = MappingProxyType(
    {
        "triton": ("e4m3fn", "given", None),
        "triton_token_int8": ("int8", "token", 0),
        "triton_block128": ("e4m3fn", "block128", 128),
    }
)
"""Name -> the format of its codes, what shares a scale, and how many columns do: 0 a row's, None if it is given."""


@cache
def own_kernels(part: str) -> Any:
    """The module of ``normcheck.impls.kernels`` that has ``part``."""
    return import_module(f"normcheck.impls.kernels.{part}")


GATES: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {"triton": (False, False), "triton_sigmoid": (False, True), "triton_before": (True, False)}
)
"""Name -> whether the gate comes before the norm, and whether its activation is sigmoid."""

LEAST_SCALE = 2.0**-20
"""The least scale that is returned: that of rows of zeros."""


def unavailable(device: str) -> str | None:
    """Why no kernel can run on ``cpu`` or ``cuda``, or None."""
    from normcheck.impls.kernels.interpreted import enabled

    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu" and not enabled():
        return "on a CPU Triton kernels need the interpreter: set TRITON_INTERPRET=1"
    if device == "cuda" and enabled():
        return "TRITON_INTERPRET is set: kernels would be interpreted on the CPU; unset it to use the GPU"
    return None


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


def implementation(
    op: str,
    *,
    name: str = "triton",
    kernels: Kernels = own_kernels,
    source: str = "normcheck/impls/kernels",
    **fields: Any,
) -> Implementation:
    """An op computed by ``kernels``; ``fields`` are Implementation's."""
    facts = OPS[op]
    if facts.adds_residual:
        own = {"model": {"sum": "rounded"}, "residual_dtypes": ("io", "fp32"), "weights": (False, True)}
        fields = {**own, **fields}
    return Implementation(
        name=name,
        op=op,
        forward=partial(forward, centered=facts.centered, zero_centered=facts.zero_centered, kernels=kernels),
        backward=partial(backward, zero_centered=facts.zero_centered, kernels=kernels),
        unavailable=unavailable,
        ranks=(2, 3),
        source=source,
        **fields,
    )


def quantising(
    op: str,
    *,
    name: str,
    coded: str = "",
    kernels: Kernels = own_kernels,
    source: str = "normcheck/impls/kernels",
) -> Implementation:
    """An op that returns codes, as ``coded`` of ``CODED`` does, or else ``name``."""
    fmt, scale, columns = CODED[coded or name]
    given, adds = scale == "given", OPS[op].adds_residual
    return Implementation(
        name=name,
        op=op,
        forward=partial(quantise, fmt=fmt, columns=columns, kernels=kernels),
        unavailable=unavailable,
        ranks=(2, 3),
        weights=(False, True),
        residual_dtypes=("io", "fp32") if adds else ("io",),
        model={
            "scale": scale,
            "round_before_quant": "none",
            "scaling": "reciprocal",
            **({} if given else {"scale_limit": True, "scale_floor": LEAST_SCALE}),
            **({"sum": "rounded"} if adds else {}),
        },
        by_default=ON_GPUS if given else (),
        source=source,
    )


def gated(op: str, *, name: str, kernels: Kernels = own_kernels) -> Implementation:
    """A gated op, as ``name`` of ``GATES`` gates."""
    before, sigmoid = GATES[name]
    own: dict[str, Any] = {"before": before, "sigmoid": sigmoid, "kernels": kernels}
    return Implementation(
        name=name,
        op=op,
        forward=partial(gate_forward, **own),
        backward=partial(gate_backward, **own),
        unavailable=unavailable,
        ranks=(2, 3),
        weights=(False, True),
        model={
            "gate": "before" if before else "after",
            "activation": "sigmoid" if sigmoid else "silu",
            "rounding": "once",
            "group": 0,
        },
        by_default=ON_GPUS if name == "triton" else (),
        source="normcheck/impls/kernels/gated.py",
    )


def modulated(op: str, *, kernels: Kernels = own_kernels) -> Implementation:
    """A modulated op."""
    return Implementation(
        name="triton",
        op=op,
        forward=partial(modulated_forward, centered=OPS[op].centered, kernels=kernels),
        backward=partial(modulated_backward, kernels=kernels),
        unavailable=unavailable,
        model={"rounding": "once", "round_factor": "none"},
        by_default=ON_GPUS,
        source="normcheck/impls/kernels/modulated.py",
    )


IMPLEMENTATIONS = (
    *(implementation(op) for op in names_of(lambda op: not op.rounds_xhat)),
    *(implementation(op.name, by_default=ON_GPUS) for op in FUSED_ADD if not op.rounds_xhat),
    *(quantising(op.name, name=name) for op in QUANTISED for name in CODED),
    *(gated(op.name, name=name) for op in GATED for name in GATES),
    *(modulated(op.name) for op in MODULATED),
)
