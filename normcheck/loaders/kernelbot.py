"""What a problem folder of the GPU-mode kernel bot calls: inputs of ours, and an output judged by the bounds.

The bot calls both in the process of the submission. So it trusts that process; ``normcheck verify`` does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from normcheck.cases.case import MAX_ELEMENTS, Case
from normcheck.cases.data_kinds import ROW_KINDS
from normcheck.cases.inputs import format_of, inputs_of, make
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.checks.contract import usable_outputs
from normcheck.errors import UsageError, check_names, error_text, one_line, shown
from normcheck.loaders.kernelbot_folder import TENSORS
from normcheck.oracle.compare import Comparison
from normcheck.oracle.conventions import candidates, with_convention
from normcheck.oracle.judge import Checked, judge_of
from normcheck.oracle.judging import judge_forward
from normcheck.oracle.tolerances import table

EPSILONS = (1e-5, 1e-3, 1e-6)
"""The eps of a call, by its seed: a kernel that has one of its own is wrong in the others."""
_SEEDS = 1 << 31


def generate_input(op: str, dtype: str, *, rows: int, columns: int, kind: str, seed: int) -> tuple[Any, ...]:
    """The data of one call: the tensors of TENSORS[op] and eps. x and residual are (rows, columns), the others
    (columns,), all in ``dtype`` (fp16, bf16, fp32), on the GPU if there is one. Raises UsageError for a wrong value.
    """
    check_names("op", (op,), tuple(TENSORS))
    check_names("kind", (kind,), ROW_KINDS)
    if not (rows >= 1 and columns >= 1 and rows * columns <= MAX_ELEMENTS):
        raise UsageError(f"rows={rows} columns={columns}: expected 1 or more, at most {MAX_ELEMENTS:,} elements")
    eps = EPSILONS[seed % len(EPSILONS)]
    case = replace(_case(op, dtype, rows, columns, eps), rows=kind, seed=seed % _SEEDS)
    made = dict(make(case, OPS[op], "cuda" if torch.cuda.is_available() else "cpu").named())
    return (*(made[name] for name in TENSORS[op]), eps)


def check_implementation(op: str, data: tuple[Any, ...], output: Any) -> tuple[bool, str]:
    """Whether ``output`` is right for ``data``, and if not why, in one line.

    ``output``: y, of the shape and dtype of x; of an op that adds a residual (y, x + residual).
    """
    *tensors, eps = data
    given = dict(zip(TENSORS[op], tensors, strict=True))
    inputs = inputs_of({**given, "dresidual_out": tensors[0]} if OPS[op].adds_residual else given)  # it is not judged
    x = inputs.x
    rows, columns = x.shape
    case = _case(op, format_of(x.dtype).name, rows, columns, eps)
    try:
        named = _named(OPS[op], output)
        usable, problems = usable_outputs(OPS[op], case, inputs, named)
    except Exception as error:  # a tensor of somebody's own class may raise anything
        return False, one_line(error_text(error), 300)
    if problems:
        return False, one_line(problems[0].message, 300)
    model, wrong = table().model, ""
    for convention in candidates(OPS[op], model):  # of the sums that may be normed, any one
        judge = judge_of(OPS[op], case, inputs, with_convention(model, convention), {})
        checked, _ = judge_forward(judge, usable)
        failed = [one for one in checked if not one.comparison.ratio <= 1]
        if not failed:
            return True, ""
        wrong = wrong or _in_words(failed[0])
    return False, wrong


def _case(op: str, dtype: str, rows: int, columns: int, eps: float) -> Case:
    return Case(op=op, dtype=dtype, M=rows, N=columns, eps=eps, bias="bias" in TENSORS[op])


def _named(op: Op, output: Any) -> dict[str, torch.Tensor]:
    several = output if isinstance(output, tuple | list) else (output,)
    names = op.outputs[: 1 + op.adds_residual]
    if len(several) != len(names) or not all(type(tensor) is torch.Tensor for tensor in several):
        raise UsageError(f"output={shown(type(output).__name__)}: expected plain tensors: {', '.join(names)}")
    return dict(zip(names, several, strict=True))


def _in_words(wrong: Checked) -> str:
    found: Comparison = wrong.comparison
    count = 0 if found.wrong is None else int(found.wrong.sum())
    text = f"{wrong.output} is wrong in {count:,} of {found.numel:,} elements"
    worst = found.worst
    if worst is None:
        return text
    at = f"at {worst.index} got {worst.actual:.9g}, expected {worst.expected:.9g}"
    return f"{text}: {at}, off by {worst.error:.3g} where {worst.bound:.3g} is allowed"
