"""The fp32 form of each op but those of models, compiled by torch: forward, and the backward that torch derives.

It is written out in fp32 (upcast, mean and variance around it, one rounding at the end) and compiled with dynamic
shapes: eps and the limits are tensors and the rows are packed, so that one compilation serves all values and nearly all
shapes. Each dtype still needs its own, and so do a missing bias and a single row or column, which torch takes for a
constant size. A graph's backward frees the buffers that the forward gave it, so it runs once and refuses
``retain_graph=True``.

On a CPU the first case costs 5 to 20 seconds of C++, hence it is not in the default set there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.op import Op
from normcheck.cases.ops import TABLE
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

_OPS = tuple(op for op in TABLE if not op.of_models)
_SHAPES = ((2, 16), (3, 7), (1, 24), (33, 127), (17, 1000), (2, 4097), (64, 768), (3, 8200), (4096, 128), (2, 65536))
"""(M, N): some round, some ragged, and a single row."""
_VARIANTS = 64
"""Compilations of an op: 3 dtypes, 2 of the weight, with or without a bias, one row or more, one column or more."""


def _normalized(op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, eps: Tensor) -> tuple[Tensor, ...]:
    """x (M, N), weight and bias (N,), eps () -> y before its store (M, N), mean and rstd (M, 1), all fp32."""
    import torch

    wide = x.float()
    if op.centered:
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    else:
        mean = torch.zeros_like(wide[:, :1])
        variance = wide.square().mean(-1, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    z = (wide - mean) * rstd * (weight.float() + 1 if op.zero_centered else weight.float())
    return (z if bias is None else z + bias.float()), mean, rstd


def _norm(op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, eps: Tensor, clips: Any) -> dict[str, Tensor]:
    """The function that is compiled. ``clips``: the limits, each a tensor (), of the clamped op; otherwise None."""
    import torch

    z, mean, rstd = _normalized(op, x, weight, bias, eps)
    outputs = {"mean": mean, "rstd": rstd} if op.centered else {"rstd": rstd}
    if clips is None:
        return {"y": z.to(x.dtype), **outputs}
    lower, upper = clips
    bitmask = (z > lower) & (z < upper)
    clamped = torch.minimum(torch.maximum(z.detach(), lower), upper)  # NaN stays NaN
    return {"y": torch.where(bitmask, z, clamped).to(x.dtype), **outputs, "bitmask": bitmask}


@cache
def _compiled() -> Callable[..., dict[str, Tensor]]:
    import torch
    from torch._inductor import config

    config.compile_threads = 1  # a pool of processes, each with torch, takes longer to start than these to compile
    return torch.compile(_norm, dynamic=True, fullgraph=True)


def forward(
    op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: float
) -> dict[str, Tensor]:
    """x (M, N) with packed rows, weight and bias (N,) -> y as x; rstd and mean (M, 1) fp32; bitmask."""
    import torch
    from torch._dynamo import config

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=x.device)

    clips = (number(options["lower_clip"]), number(options["upper_clip"])) if options else None
    with config.patch(recompile_limit=_VARIANTS * len(_OPS)):
        return _compiled()(op, x, weight, bias, number(eps), clips)


def _model(op: Op) -> dict[str, Any]:
    """The known facts about the compiled arithmetic, to declare."""
    reason = "on a GPU y comes from another sum of x than the mean"
    model: dict[str, Any] = {"y_given_stats": False, "reason": reason} if op.centered else {}
    return model | ({"bitmask_compare": "fp32"} if op.clamped else {})


def unavailable(device: str) -> str | None:
    """Why nothing can be compiled for ``cpu`` or ``cuda``, or None."""
    from importlib.util import find_spec

    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on a CPU: {compiler} is not there; install it or set CXX"
    if device == "cuda" and find_spec("triton") is None:
        return "torch.compile needs triton on a GPU, which is not installed"
    if device == "cuda":
        from normcheck.impls.triton import unavailable as no_triton

        return no_triton(device)
    return None


IMPLEMENTATIONS = tuple(
    Implementation(
        name="torch_compile",
        op=op.name,
        forward=partial(forward, op),
        unavailable=unavailable,
        strided=False,
        shapes=_SHAPES,
        model=_model(op),
        by_default=("cuda",),
        source="https://pytorch.org/docs/stable/generated/torch.compile.html",
    )
    for op in _OPS
)
