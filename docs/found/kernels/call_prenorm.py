"""flash-attention's and mamba's Triton LayerNorm, which are one file in two versions.

Their packages import CUDA extensions that take an hour to build, and these kernels do not use. So a package is empty
here, and its folders are looked into.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from normcheck import Implementation

PACKAGE = "flash_attn" if find_spec("flash_attn") else "mamba_ssm"
SPEC = find_spec(PACKAGE)
sys.modules[PACKAGE] = ModuleType(PACKAGE)
sys.modules[PACKAGE].__spec__ = SPEC
sys.modules[PACKAGE].__path__ = list(SPEC.submodule_search_locations)


def kernels():
    return import_module(f"{PACKAGE}.ops.triton.layer_norm")


def layernorm(x, weight, bias, *, eps):
    return kernels().layer_norm_fn(x, weight, bias, eps=eps)


def rmsnorm(x, weight, bias, *, eps):
    return kernels().rms_norm_fn(x, weight, bias, eps=eps)


def fused_add(x, weight, bias, *, eps, residual):
    return kernels().rms_norm_fn(x, weight, bias, residual=residual, eps=eps, prenorm=True)


def fused_add_into(x, weight, bias, *, eps, residual):
    """With a tensor of the caller's for the sum, which flash-attention takes."""
    import torch

    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    call = kernels().rms_norm_fn
    return call(x, weight, bias, residual=residual, eps=eps, prenorm=True, residual_out=out.detach())


def short(case):
    wide = case.dtype == "fp32" or getattr(case, "residual_dtype", "") == "fp32"
    return "takes rows of at most 64 KiB" if 65536 // (4 if wide else 2) < case.N else None


SHAPES = ((1, 320), (7, 100), (64, 1024), (33, 4096))
"""A kernel that tunes itself compiles and times a dozen variants for each N."""

ANY = {"supports": short, "shapes": SHAPES, "ranks": (2, 3)}
IMPLEMENTATIONS = (
    Implementation(name=PACKAGE, op="layernorm", forward=layernorm, **ANY),
    Implementation(name=PACKAGE, op="rmsnorm", forward=rmsnorm, **ANY),
    Implementation(name=PACKAGE, op="fused_add_rmsnorm", forward=fused_add, residual_dtypes=("io", "fp32"), **ANY),
    *(
        [Implementation(name="flash_attn_residual_out", op="fused_add_rmsnorm", forward=fused_add_into, **ANY)]
        if PACKAGE == "flash_attn"
        else import_module("call_gates").IMPLEMENTATIONS
    ),
)
