"""flashlib: ``flash_rmsnorm`` and ``flash_layernorm``, forwards, without the import of the rest."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from normcheck import Implementation

HERE = Path(importlib.util.find_spec("flashlib").submodule_search_locations[0])
for name in ("flashlib", "flashlib.kernels", "flashlib.kernels.norm", "flashlib.kernels.norm.triton"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(HERE.joinpath(*name.split(".")[1:]))]

from flashlib.kernels.norm.triton.norm import flash_layernorm, flash_rmsnorm  # noqa: E402


def rmsnorm(x, weight, bias, *, eps):
    return flash_rmsnorm(x.detach(), weight.detach(), eps)


def layernorm(x, weight, bias, *, eps):
    given = [None if t is None else t.detach() for t in (weight, bias)]
    return flash_layernorm(x.detach(), *given, eps)


def gpu(device):
    return None if device == "cuda" else "raises an error if x is not on a GPU"


ANY = {"unavailable": gpu, "ranks": (2, 3)}
IMPLEMENTATIONS = (
    Implementation(name="flashlib", op="rmsnorm", forward=rmsnorm, biases=(False,), **ANY),
    Implementation(name="flashlib", op="layernorm", forward=layernorm, weights=(False, True), lone_bias=True, **ANY),
)
