"""Documents and problems of our own in the forms of flashinfer-bench, SOL-ExecBench and KernelBench."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOT_THE_JUDGE = f"""
import os
if os.getpid() == {os.getpid()}:
    raise SystemExit("this runs in the process that judges")
"""
"""Every file of a stranger begins with this."""

RMS = """
def normed(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""

RMS_REFERENCE = f"""{NOT_THE_JUDGE}
import torch
{RMS}
def run(hidden_states, weight):
    assert hidden_states.shape[-1] == 96
    return normed(hidden_states, weight, 1e-5)
"""

ADD_REFERENCE = f"""{NOT_THE_JUDGE}
import torch
{RMS}
def run(hidden, residual, gamma, eps):
    both = hidden + residual
    return normed(both, gamma, eps), both
"""


def tensor(*axes: str, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"shape": list(axes), "dtype": dtype, "description": None}


def rmsnorm_definition(reference: str = RMS_REFERENCE) -> dict[str, Any]:
    return {
        "name": "rms_h96",
        "op_type": "rmsnorm",
        "axes": {"tokens": {"type": "var"}, "hidden": {"type": "const", "value": 96, "description": "of a model"}},
        "inputs": {"hidden_states": tensor("tokens", "hidden"), "weight": tensor("hidden")},
        "outputs": {"output": tensor("tokens", "hidden")},
        "reference": reference,
        "tags": ["status:draft"],
    }


def added_definition() -> dict[str, Any]:
    x = tensor("batch", "length", "hidden", dtype="float16")
    return {
        "name": "add_rms_h64",
        "axes": {
            "batch": {"type": "var"},
            "length": {"type": "var"},
            "hidden": {"type": "const", "value": 64},
        },
        "inputs": {
            "hidden": x,
            "residual": x,
            "gamma": tensor("hidden", dtype="float16"),
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"y": x, "new_residual": x},
        "reference": ADD_REFERENCE,
    }


def solution(code: str, definition: str = "rms_h96", *, into: bool = True, **spec: Any) -> dict[str, Any]:
    """The function ``kernel`` of ``code``, which imports torch and has ``normed``, in a package of two files."""
    return {
        "name": "ours",
        "definition": definition,
        "author": "somebody",
        "spec": {
            "language": "python",
            "target_hardware": ["cpu"],
            "entry_point": "src/main.py::kernel",
            "destination_passing_style": into,
            **spec,
        },
        "sources": [
            {"path": "src/main.py", "content": f"{NOT_THE_JUDGE}import torch\nfrom parts import normed\n{code}"},
            {"path": "src/parts.py", "content": f"import torch\n{RMS}"},
        ],
    }


def workload(uuid: str, inputs: Mapping[str, Any] | None = None, **axes: int) -> dict[str, Any]:
    return {"uuid": uuid, "axes": axes, "inputs": dict(inputs or {"hidden_states": {"type": "random"}})}


def written(folder: Path, **documents: Any) -> list[str]:
    """``--NAME PATH`` for each document, written as JSON; a list is written as lines."""
    words = []
    for name, document in documents.items():
        path = folder / f"{name}.json"
        lines = document if isinstance(document, list) else [document]
        path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
        words += [f"--{name}", str(path)]
    return words


def problem(forward: str, shape: Sequence[int], init: str, body: str = "") -> str:
    """A problem in the form of KernelBench: ``body`` is of ``__init__(self, size, eps=1e-4)``."""
    return f"""{NOT_THE_JUDGE}
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, size, eps=1e-4):
        super().__init__()
        self.size, self.eps = size, eps
        {body}

    def forward(self, x):
        {forward}

def get_inputs():
    return [torch.rand({tuple(shape)})]

def get_init_inputs():
    return [{init}]
"""


RMS_PROBLEM = problem("return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)", (4, 24, 6, 5), "24")
LN_PROBLEM = problem("return self.norm(x)", (6, 4, 5, 8), "(4, 5, 8)", "self.norm = nn.LayerNorm(size)")


def answer(forward: str, body: str = "pass") -> str:
    return f"""{NOT_THE_JUDGE}
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, size, eps=1e-4):
        super().__init__()
        self.size, self.eps = size, eps
        {body}

    def forward(self, x):
        {forward}
"""
