"""Gated RMSNorms of fla and of mamba, whichever is installed: no convention is declared, but groups of columns."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from normcheck import Implementation

found = []

if find_spec("fla"):
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError:  # before 0.6
        from fla.modules.fused_norm_gate import rms_norm_gated

    def of_fla(activation):
        def forward(x, weight, bias, *, eps, gate):
            return rms_norm_gated(x, gate, weight, None, activation=activation, eps=eps)

        return forward

    found += [("fla_silu", of_fla("swish"), {}), ("fla_sigmoid", of_fla("sigmoid"), {})]

if SPEC := find_spec("mamba_ssm"):  # its package imports CUDA extensions that this kernel does not use
    sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
    sys.modules["mamba_ssm"].__path__ = list(SPEC.submodule_search_locations)

    def of_mamba(after, group=None):
        def forward(x, weight, bias, *, eps, gate):
            norm = import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
            return norm(x, weight, None, z=gate, eps=eps, group_size=group, norm_before_gate=after)

        return forward

    found += [("mamba_after", of_mamba(True), {}), ("mamba_before", of_mamba(False), {})]
    found += [("mamba_groups", of_mamba(False, 128), {"model": {"group": 128}})]


def short(case):
    return "takes rows of at most 64 KiB" if 65536 // (4 if case.dtype == "fp32" else 2) < case.N else None


IMPLEMENTATIONS = tuple(
    Implementation(name=name, op="rmsnorm_gated", forward=forward, weights=(True,), supports=short, **more)
    for name, forward, more in found
)
