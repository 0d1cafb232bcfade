"""lmdeploy: the RMSNorm of its PyTorch engine, a forward, without the import of the server.

The packages above this file are empty here.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from normcheck import Implementation

HERE = Path(importlib.util.find_spec("lmdeploy").submodule_search_locations[0])

for name in ("lmdeploy", "lmdeploy.pytorch", "lmdeploy.pytorch.kernels", "lmdeploy.pytorch.kernels.cuda"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(HERE.joinpath(*name.split(".")[1:]))]

from lmdeploy.pytorch.kernels.cuda.rms_norm import rms_norm  # noqa: E402


def norm(x, weight, bias, *, eps):
    return rms_norm(x.detach(), weight.detach(), eps)


def fused_add(x, weight, bias, *, eps, residual):
    return rms_norm(x.detach(), weight.detach(), eps, residual=residual.detach())


def gpu(device):
    return None if device == "cuda" else "asks for the GPU's properties"


IMPLEMENTATIONS = (
    Implementation(name="lmdeploy", op="rmsnorm", forward=norm, biases=(False,), unavailable=gpu),
    Implementation(name="lmdeploy", op="fused_add_rmsnorm", forward=fused_add, biases=(False,), unavailable=gpu),
)
