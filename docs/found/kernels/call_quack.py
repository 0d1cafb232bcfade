"""quack-kernels: RMSNorm and its sum with a residual, in CuTe DSL, with gradients; LayerNorm's forward."""

import sys
from functools import partial
from pathlib import Path

import nvidia_cutlass_dsl

from normcheck import Implementation

sys.path.insert(0, str(Path(nvidia_cutlass_dsl.__path__[0], "dsl_packages")))  # its .pth file serves site-packages alone

from quack.rmsnorm import layernorm_fwd  # noqa: E402
from quack.rmsnorm import rmsnorm as kernel  # noqa: E402


def rmsnorm(offset, x, weight, bias, *, eps):
    return kernel(x, weight, bias=bias, eps=eps, weight_offset=offset)


def fused_add(offset, x, weight, bias, *, eps, residual):
    return kernel(x, weight, bias=bias, residual=residual, eps=eps, prenorm=True, weight_offset=offset)


def layernorm(x, weight, bias, *, eps):
    return layernorm_fwd(x.detach(), weight.detach(), None if bias is None else bias.detach(), eps)


def gpu(device):
    return None if device == "cuda" else "is compiled for a GPU"


IMPLEMENTATIONS = (
    Implementation(name="quack", op="rmsnorm", forward=partial(rmsnorm, 0.0), unavailable=gpu),
    Implementation(name="quack", op="rmsnorm_gemma", forward=partial(rmsnorm, 1.0), unavailable=gpu),
    Implementation(name="quack", op="fused_add_rmsnorm", forward=partial(fused_add, 0.0), unavailable=gpu),
    Implementation(name="quack", op="fused_add_rmsnorm_gemma", forward=partial(fused_add, 1.0), unavailable=gpu),
    Implementation(name="quack", op="layernorm", forward=layernorm, unavailable=gpu, weight_dtypes=("fp32",)),
)
