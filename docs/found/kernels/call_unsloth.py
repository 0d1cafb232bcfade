"""unsloth: ``fast_layernorm`` and ``fast_rms_layernorm``, without the import of all that trains models.

Importing unsloth patches torch and transformers. So the two packages are empty here, and only the files of the kernels
are read; the few names that these want are made.
"""

import ast
import functools
import importlib.util
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import triton

from normcheck import Implementation

HERE = Path(importlib.util.find_spec("unsloth").submodule_search_locations[0])


def own(path, *wanted):
    """The functions of that file that are wanted, its plain constants among their globals, as they stand in it."""
    guard = torch.cuda.device if torch.cuda.device_count() > 1 else lambda _: nullcontext()  # as in that file
    names = {"torch_gpu_device": guard, "_NORM_ARCH_WARPS": False}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        constant = isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
        if constant or (isinstance(node, ast.FunctionDef) and node.name in wanted):
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names


def bare(name, folder, **names):
    """A module that is nothing but ``names``, in place of the one that this file would be."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    vars(module).update(names)
    sys.modules[name] = module
    return module


UTILS = own(HERE / "kernels" / "utils.py", "calculate_settings", "norm_num_warps")
UTILS.update(triton=triton, next_power_of_2=triton.next_power_of_2, torch=torch, functools=functools)
bare("unsloth", HERE, DEVICE_TYPE="cuda", DEVICE_COUNT=torch.cuda.device_count())
bare("unsloth.kernels", HERE / "kernels")
if (HERE / "kernels" / "indexing.py").is_file():
    UTILS["long_indexing"] = importlib.import_module("unsloth.kernels.indexing").long_indexing
bare("unsloth.kernels.utils", HERE / "kernels", **UTILS)
bare("unsloth_zoo", HERE)
bare("unsloth_zoo.patching_utils", HERE, patch_layernorm=None)

from unsloth.kernels.layernorm import fast_layernorm  # noqa: E402
from unsloth.kernels.rms_layernorm import fast_rms_layernorm  # noqa: E402


def layernorm(x, weight, bias, *, eps):
    return fast_layernorm(SimpleNamespace(weight=weight, bias=bias, eps=eps, elementwise_affine=True), x)


def rmsnorm(gemma, x, weight, bias, *, eps):
    return fast_rms_layernorm(SimpleNamespace(weight=weight, eps=eps), x, gemma=gemma)


def packed_dy(case):
    """Which shows what is left where the cotangent may be written: that there is no gradient of the weights."""
    return None if case.layout == "contiguous" else "dy as autograd makes it of a sum"


ONE = {"weight_dtypes": ("io",)}
IMPLEMENTATIONS = tuple(
    Implementation(
        name=name,
        op=op,
        forward=forward,
        biases=(op == "layernorm",),
        overwrites=overwrites,
        supports=supports,
        **ONE,
    )
    for name, overwrites, supports in (
        ("unsloth", (), None),
        ("unsloth_dy", ("dy",), None),
        ("unsloth_packed_dy", ("dy",), packed_dy),
    )
    for op, forward in (
        ("layernorm", layernorm),
        ("rmsnorm_llama", partial(rmsnorm, False)),
        ("rmsnorm_gemma", partial(rmsnorm, True)),
    )
)
