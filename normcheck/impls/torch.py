"""torch, in fp32: the inputs are upcast, torch's own norm runs on them, and y goes back to the io dtype.

Gradients come from autograd through y, so they too are sums in fp32 that are rounded once. An RMSNorm returns no
rstd: ``rms_norm`` does not return the one that it used, and another one would be judged in its place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from normcheck.cases.declared import DEVICES
from normcheck.cases.dtypes import CODES
from normcheck.cases.op import Op
from normcheck.cases.ops import FUSED_ADD, QUANTISED, TABLE
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_DOCS = "https://pytorch.org/docs/stable/generated/torch.nn.functional."


def forward(
    op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **limits: float
) -> dict[str, Tensor]:
    """x (M, N) or (B, S, N), weight and bias (N,) or None -> y as x.

    A LayerNorm also returns mean, rstd in fp32 with a last dimension of 1. A clamped op, with ``limits`` lower_clip and
    upper_clip, also returns bitmask: bool, shaped as x, True strictly between them.
    """
    import torch

    gamma, shift = (None if t is None else t.float() for t in (weight, bias))
    if gamma is not None and op.zero_centered:
        gamma = 1 + gamma
    wide, shape = x.float(), x.shape[-1:] if weight is None else weight.shape
    outputs = {}
    if op.centered:  # what F.layer_norm calls
        z, outputs["mean"], outputs["rstd"] = torch.native_layer_norm(wide, shape, gamma, shift, eps)
    else:
        z = torch.nn.functional.rms_norm(wide, shape, gamma, eps)
        z = z if shift is None else z + shift
    if op.clamped:
        lower, upper = limits["lower_clip"], limits["upper_clip"]
        outputs["bitmask"] = (z > lower) & (z < upper)
        # Gradient flows only where the bit is set: torch.clamp would pass it at z == limit too. NaN stays NaN in y.
        z = torch.where(outputs["bitmask"], z, z.detach().clamp(lower, upper))
    return {"y": z.to(x.dtype), **outputs}


def add_forward(
    op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, residual: Tensor
) -> dict[str, Tensor]:
    """As ``forward``, of the stored sum of x and ``residual`` (shaped as x), which is residual_out."""
    stored = (x.float() + residual.float()).to(residual.dtype)
    outputs = forward(op, stored, weight, bias, eps=eps)
    return {**outputs, "y": outputs["y"].to(x.dtype), "residual_out": stored}


def quant_forward(
    op: Op,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    fmt: str,
    columns: int = 0,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    scale_ub: float | None = None,
) -> dict[str, Tensor]:
    """The codes q of y, shaped as x, in ``fmt``, one of ``cases.dtypes.CODES``; y is kept in fp32.

    A ``scale`` of one element is given, or one (M, G) is returned, for each row (``columns`` 0) or each block of so
    many columns; ``scale_ub`` limits the largest |y|. With a ``residual``, shaped as x, of the stored sum, which is
    residual_out.
    """
    import torch

    outputs = {}
    if residual is not None:
        x = outputs["residual_out"] = (x.float() + residual.float()).to(residual.dtype)
    gamma = None if weight is None else weight.float()
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], gamma, eps)
    largest, dtype = CODES[fmt].max, getattr(torch, CODES[fmt].torch_name)
    if scale is not None:
        divisor = scale
    else:
        width = columns or x.shape[-1]
        count = -(-x.shape[-1] // width)
        blocks = torch.nn.functional.pad(y.abs(), (0, count * width - x.shape[-1])).view(*x.shape[:-1], count, width)
        most = blocks.amax(-1)
        most = most if scale_ub is None else most.clamp(max=scale_ub)
        outputs["scale"] = (most / largest).clamp(min=_LEAST_SCALE)
        divisor = outputs["scale"].repeat_interleave(width, -1)[..., : x.shape[-1]]
    t = (y / divisor).clamp(-largest, largest)
    return {"q": (t.round() if fmt == "int8" else t).to(dtype), **outputs}


_LEAST_SCALE = 2.0**-20


IMPLEMENTATIONS = (
    tuple(
        Implementation(
            name="torch",
            op=op.name,
            forward=partial(forward, op),
            ranks=(2, 3, 4),
            weights=(False, True),
            heads=True,
            model={"bitmask_compare": "fp32"} if op.clamped else {},
            builds=False,
            source=f"{_DOCS}{'layer_norm' if op.centered else 'rms_norm'}.html",
        )
        for op in TABLE
        if not op.of_models
    )
    + tuple(
        Implementation(
            name="torch",
            op=op.name,
            forward=partial(add_forward, op),
            ranks=(2, 3, 4),
            weights=(False, True),
            residual_dtypes=("io", "fp32"),
            model={"sum": "rounded"},
            builds=False,
            source=f"{_DOCS}{'layer_norm' if op.centered else 'rms_norm'}.html",
        )
        for op in FUSED_ADD
        if not op.rounds_xhat
    )
    + tuple(
        Implementation(
            name=name,
            op=op.name,
            forward=partial(quant_forward, op, fmt=fmt, columns=columns),
            ranks=(2, 3, 4),
            weights=(False, True),
            residual_dtypes=("io", "fp32") if op.adds_residual else ("io",),
            model={
                "scale": scale,
                "round_before_quant": "none",
                "scaling": "division",
                **({} if scale == "given" else {"scale_limit": True, "scale_floor": _LEAST_SCALE}),
                **({"sum": "rounded"} if op.adds_residual else {}),
            },
            by_default=DEVICES if scale == "given" else (),
            builds=False,
            source=f"{_DOCS}rms_norm.html",
        )
        for op in QUANTISED
        for name, fmt, scale, columns in (
            ("torch", "e4m3fn", "given", 0),
            ("torch_token_int8", "int8", "token", 0),
            ("torch_block128", "e4m3fn", "block128", 128),
        )
    )
)
