"""quack-kernels: RMSNorm and its sum with a residual, in CuTe DSL, with gradients; LayerNorm's forward."""

import sys
from functools import partial
from pathlib import Path

import nvidia_cutlass_dsl

from normcheck import Implementation

sys.path.insert(0, str(Path(nvidia_cutlass_dsl.__path__[0], "dsl_packages")))  # as its .pth file does

from quack.rmsnorm import layernorm_fwd
from quack.rmsnorm import rmsnorm as kernel


def rmsnorm(offset, x, weight, bias, *, eps):
    return kernel(x, weight, bias=bias, eps=eps, weight_offset=offset)


def fused_add(offset, x, weight, bias, *, eps, residual):
    return kernel(x, weight, bias=bias, residual=residual, eps=eps, prenorm=True, weight_offset=offset)


def layernorm(x, weight, bias, *, eps):
    return layernorm_fwd(x.detach(), weight.detach(), None if bias is None else bias.detach(), eps)


def gpu(device):
    return None if device == "cuda" else "is compiled for a GPU"


def fp32_weight(case):
    return "asserts that the weight is fp32" if "fp32" not in (case.dtype, case.weight_dtype) else odd(case)


def odd(case):
    return "takes an even number of columns in half precision" if case.N % 2 and case.dtype != "fp32" else None


EVEN = {"unavailable": gpu, "supports": odd}
IMPLEMENTATIONS = (
    Implementation(name="quack_odd", op="rmsnorm", forward=partial(rmsnorm, 0.0), unavailable=gpu),
    Implementation(name="quack", op="rmsnorm", forward=partial(rmsnorm, 0.0), **EVEN),
    Implementation(name="quack", op="rmsnorm_gemma", forward=partial(rmsnorm, 1.0), **EVEN),
    Implementation(name="quack", op="fused_add_rmsnorm", forward=partial(fused_add, 0.0), **EVEN),
    Implementation(name="quack", op="fused_add_rmsnorm_gemma", forward=partial(fused_add, 1.0), **EVEN),
    Implementation(name="quack", op="layernorm", forward=layernorm, unavailable=gpu, supports=fp32_weight),
    *(
        Implementation(name="quack_packed", op=op, forward=forward, strided=False, **EVEN)
        for op, forward in (
            ("rmsnorm", partial(rmsnorm, 0.0)),
            ("rmsnorm_gemma", partial(rmsnorm, 1.0)),
            ("fused_add_rmsnorm", partial(fused_add, 0.0)),
            ("fused_add_rmsnorm_gemma", partial(fused_add, 1.0)),
        )
    ),
)
