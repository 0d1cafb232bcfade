"""Advice for a kernel that takes no missing bias."""

from __future__ import annotations

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.contract import Problem


def advice(problem: Problem, case: Case) -> str:
    """What to do about an exception over a bias that is None; "" if the problem is another.

    It is over the bias if its message names None, or the line that raised it the bias.
    """
    if problem.kind != "exception" or problem.gpu_failed or case.bias or not (case.weight and OPS[case.op].takes_bias):
        return ""
    code = problem.frames[-1].partition(" in ")[2] if problem.frames else ""  # without the name of the file
    if "None" not in problem.message and "bias" not in code:
        return ""
    return "bias is None in this case. If the kernel always has a bias, declare biases=(True,); else add none here."
