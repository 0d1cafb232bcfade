"""flashinfer: ``rms_norm`` and ``rms_norm_add_residual`` of its Triton kernels, without the import of the rest."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from normcheck import Implementation

HERE = Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0])
for name, folder in (("flashinfer", HERE), ("flashinfer.triton", HERE / "triton")):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]

from flashinfer.triton.norm import rms_norm, rms_norm_add_residual  # noqa: E402


def rmsnorm(x, weight, bias, *, eps):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm(x.detach(), weight.detach(), y, eps)
    return y


def fused_add(x, weight, bias, *, eps, residual):
    x, residual = x.detach(), residual.detach()
    rms_norm_add_residual(x, residual, weight.detach(), eps)
    return x, residual


def one_stride(case):
    return "takes x and the residual with one row stride" if case.layout in ("x_strided", "strided") else None


IMPLEMENTATIONS = (
    Implementation(name="flashinfer_triton", op="rmsnorm", forward=rmsnorm, biases=(False,)),
    Implementation(
        name="flashinfer_triton",
        op="fused_add_rmsnorm",
        forward=fused_add,
        supports=one_stride,
        overwrites=("x", "residual"),
        dtypes=("fp16", "bf16"),
    ),
)
