"""torch.nn, timm and transformers: norms that are modules, with the weights of the case."""

import importlib
import sys
from functools import partial

from normcheck import Implementation


def module(path, name, x, weight, bias, *, eps):
    norm = getattr(importlib.import_module(path), name)(x.shape[-1], eps=eps)
    for parameter, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            delattr(norm, parameter)
            setattr(norm, parameter, value)
    return norm(x)


def of(path, name, op, **fields):
    short = f"{path.split('.')[0]}.{name}"
    return Implementation(name=short, op=op, forward=partial(module, path, name), **fields)


ONE = {"weight_dtypes": ("io",), "ranks": (2, 3)}
LLAMA, GEMMA = "transformers.models.llama.modeling_llama", "transformers.models.gemma.modeling_gemma"
IMPLEMENTATIONS = (
    of("torch.nn", "RMSNorm", "rmsnorm", biases=(False,), **ONE),
    *(
        [
            of("timm.layers", "RmsNorm", "rmsnorm", biases=(False,), **ONE),
            of("timm.layers", "LayerNorm", "layernorm", biases=(True,), **ONE),
        ]
        if any("timm-" in folder for folder in sys.path)
        else [of(LLAMA, "LlamaRMSNorm", "rmsnorm_llama", **ONE), of(GEMMA, "GemmaRMSNorm", "rmsnorm_gemma", **ONE)]
    ),
)
