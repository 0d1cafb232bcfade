"""dlblas: forwards for inference, each from its own file; the package imports all kernels at once and tunes them.

The packages above these files are empty here, as is the register of its ops.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from normcheck import Implementation

HERE = Path(importlib.util.find_spec("dlblas").submodule_search_locations[0])


def bare(name, **names):
    module = ModuleType(name)
    module.__path__ = [str(HERE.joinpath(*name.split(".")[1:]))]
    vars(module).update(names)
    sys.modules[name] = module


def nothing(*_, **__):
    return None


for path in ("", ".kernels", ".kernels.layer_norm"):
    bare(f"dlblas{path}")
bare("dlblas.utils", SymVar=nothing, Tensor=nothing, register_dlblas_op=nothing)
bare("dlblas.utils.device_utils", infer_device=lambda: "cuda")

from dlblas.kernels.add_rms_norm import call as add_rms_norm  # noqa: E402
from dlblas.kernels.layer_norm.layernorm_normal import call as layernorm_normal  # noqa: E402
from dlblas.kernels.layer_norm.layernorm_opt import call as layernorm_opt  # noqa: E402
from dlblas.kernels.layer_norm.layernorm_opt_2D import call as layernorm_opt_2d  # noqa: E402
from dlblas.kernels.rms_norm import rms_norm  # noqa: E402


def rms(x, weight, bias, *, eps):
    return rms_norm(x.detach(), weight.detach(), eps)


def rms_add(x, weight, bias, *, eps, residual):
    return rms_norm(x.detach(), weight.detach(), eps, residual=residual.detach())


def registered(x, weight, bias, *, eps):
    return add_rms_norm(x.detach(), weight.detach(), eps)


def registered_add(x, weight, bias, *, eps, residual):
    return add_rms_norm(x.detach(), weight.detach(), eps, residual.detach())


def layernorm(call):
    return lambda x, weight, bias, *, eps: call(x.detach(), weight.detach(), bias.detach(), eps)


RMS = {"biases": (False,)}
LAYER = {"op": "layernorm", "biases": (True,), "dtypes": ("bf16",), "weight_dtypes": ("io",)}
IMPLEMENTATIONS = (
    Implementation(name="dlblas", op="rmsnorm", forward=rms, **RMS),
    Implementation(name="dlblas", op="fused_add_rmsnorm", forward=rms_add, **RMS),
    Implementation(name="dlblas_packed", op="fused_add_rmsnorm", forward=rms_add, strided=False, **RMS),
    Implementation(name="dlblas_registered", op="rmsnorm_llama", forward=registered, **RMS),
    Implementation(name="dlblas_registered_packed", op="rmsnorm_llama", forward=registered, strided=False, **RMS),
    Implementation(name="dlblas_registered", op="fused_add_rmsnorm_llama", forward=registered_add, **RMS),
    Implementation(name="dlblas_normal", forward=layernorm(layernorm_normal), **LAYER),
    Implementation(name="dlblas_opt", forward=layernorm(layernorm_opt), **LAYER),
    Implementation(name="dlblas_opt_2d", forward=layernorm(layernorm_opt_2d), **LAYER),
)
