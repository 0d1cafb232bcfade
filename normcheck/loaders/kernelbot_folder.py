"""``normcheck kernelbot init OP DIR``: the files of a problem for the GPU-mode kernel bot."""

from __future__ import annotations

from pathlib import Path

from normcheck.cases.dtypes import DTYPES, named
from normcheck.cases.ops import OPS
from normcheck.errors import check_names
from normcheck.files import write_new

TENSORS = {
    "rmsnorm": ("x", "weight"),
    "layernorm": ("x", "weight", "bias"),
    "fused_add_rmsnorm": ("x", "residual", "weight"),
}
"""Op -> the tensors of its data, before eps."""

_TESTS = (
    (1, 1, "normal"), (3, 129, "shifted"), (20, 1024, "blend"), (33, 768, "mixed"), (5, 8200, "tail"),
    (57, 1000, "blend"), (257, 4096, "blend"), (2, 4097, "offset"), (19, 64, "large"), (4, 256, "zero"),
    (20, 1024, "normal"), (33, 768, "shifted"),
)  # fmt: skip
"""Rows, columns and kind of data. Two shapes come twice: what is kept from the first is wrong then. The bot reads words
of letters and integers only."""

_BENCHMARKS = ((4096, 1024), (4096, 4096), (1151, 8192), (32768, 1024))

_TASK = """\
# name: "{op}"

files:
  - {{"name": "submission.py", "source": "@SUBMISSION@"}}
  - {{"name": "task.py", "source": "task.py"}}
  - {{"name": "utils.py", "source": "../utils.py"}}
  - {{"name": "reference.py", "source": "reference.py"}}
  - {{"name": "eval.py", "source": "../eval.py"}}

lang: "py"

description: |
  Write {op} in {dtype}, forward only: {formula}
  Input: ({tensors}, eps). Output: {outputs}.
  The rows of x are all kinds of data, so that a variance that cancels shows. normcheck judges every element against
  fp64 under a derived bound; it has to be installed where this runs.

config:
  main: "eval.py"

templates:
  Python: "template.py"

tests:
{tests}

benchmarks:
{benchmarks}

test_timeout: 180
benchmark_timeout: 180
ranked_timeout: 420

ranking_by: "geom"
"""

_TASK_TYPES = """\
from typing import Any, TypedDict

import torch

input_t = tuple[Any, ...]  # {tensors}: tensors; eps: a float
output_t = {output_type}


class TestSpec(TypedDict):
    rows: int
    columns: int
    kind: str
    seed: int
"""

_REFERENCE = """\
from task import input_t, output_t

from normcheck.loaders import kernelbot

OP, DTYPE = "{op}", "{dtype}"


def generate_input(rows: int, columns: int, kind: str, seed: int) -> input_t:
    return kernelbot.generate_input(OP, DTYPE, rows=rows, columns=columns, kind=kind, seed=seed)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    return kernelbot.check_implementation(OP, data, output)
"""

_TEMPLATE = """\
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    \"\"\"Return {outputs} of data, which is ({tensors}, eps).\"\"\"
    {tensors}, eps = data
    raise NotImplementedError("write it here")
"""


def write_problem(op: str, folder: str, dtype: str) -> tuple[str, ...]:
    """Write the files of a problem into the new ``folder``; returns their names. Raises UsageError."""
    check_names("op", (op,), tuple(TENSORS))
    dtype = named(dtype)
    check_names("dtype", (dtype,), DTYPES)
    adds = OPS[op].adds_residual
    words = {
        "op": op,
        "dtype": dtype,
        "formula": OPS[op].formula,
        "tensors": ", ".join(TENSORS[op]),
        "outputs": "(y, x + residual)" if adds else "y",
        "output_type": "tuple[torch.Tensor, torch.Tensor]" if adds else "torch.Tensor",
        "tests": _listed([(*shape, number) for number, shape in enumerate(_TESTS, 4001)]),
        "benchmarks": _listed([(*shape, "normal", number) for number, shape in enumerate(_BENCHMARKS, 9001)]),
    }
    texts = {"task.yml": _TASK, "task.py": _TASK_TYPES, "reference.py": _REFERENCE, "template.py": _TEMPLATE}
    files = {name: text.format(**words).encode() for name, text in texts.items()}
    write_new(Path(folder), files, "DIR")
    return tuple(files)


def _listed(specs: list[tuple[int, int, str, int]]) -> str:
    lines = (f'  - {{"rows": {m}, "columns": {n}, "kind": "{kind}", "seed": {seed}}}' for m, n, kind, seed in specs)
    return "\n".join(lines)
