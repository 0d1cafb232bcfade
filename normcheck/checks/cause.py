"""What in a kernel makes a result wrong, in one line; only where a test of this very case says that it is the cause."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.cases.inputs import make
from normcheck.cases.ops.op import Op
from normcheck.checks.check import Result
from normcheck.checks.gradients import autograd_checks
from normcheck.oracle import reference
from normcheck.oracle.judge import Expectation, Judge, judge_forward, judge_of
from normcheck.oracle.rounding import half_ulp


def cause(op: Op, result: Result, device: str) -> str:
    """Why a failed ``result`` is wrong; "" where that is not known for sure.

    One cause is known: x is upcast more than once, so that autograd adds up gradients that it has rounded to half
    precision. The graph has to say so, and nothing may be wrong but dx, by no more than those roundings.
    """
    if result.joined < 2 or result.problems or {c.output for c in result.wrong} != {"dx"}:
        return ""
    if not _roundings_suffice(op, result, device):
        return ""
    times = "twice" if result.joined == 2 else f"{result.joined} times"
    half = result.case.dtype
    return f"x is upcast {times}; each gradient is rounded to {half} before they are added. Upcast once."


def _roundings_suffice(op: Op, result: Result, device: str) -> bool:
    """Whether dx is as right as it can be if each of its parts is rounded to the io dtype before they are added."""
    case, gradients = result.case, result.seen.gradients
    seen: dict[int, Expectation] = {}

    def watch(part: Expectation) -> None:
        if part.output == "dx":
            seen[part.first] = part  # what was judged again counts

    inputs = make(case, op, device)
    judge = judge_of(op, case, inputs, result.model, {})
    _, saved = judge_forward(judge, result.seen.outputs)
    autograd_checks(replace(judge, watch=watch), inputs, result.seen.outputs, gradients, saved)
    dx = gradients["dx"].reshape(case.M, case.N).double()
    for block in judge.blocks():
        expected, bound = seen[block.start].expected, seen[block.start].bound.upper
        dy = judge.dy[block].double()
        parts = _parts(judge, block, dy if saved.bits is None else dy * saved.bits[block])
        allowed = bound + _rounded_apart(parts, judge.io, result.joined)
        allowed = torch.where(torch.isnan(allowed), torch.inf, allowed)
        if not bool(((dx[block] - expected).abs() <= allowed).all()):
            return False
    return True


def _parts(judge: Judge, block: slice, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x that come by y itself, by the variance and by the mean: their sum is dx, each (m, N)."""
    rows = judge.truth(block).rows
    backward = reference.backward(judge.op, rows, judge.scale.g, dy)
    by_y, by_variance = backward.wd * rows.rstd, -rows.xh * backward.c1 * rows.rstd
    return by_y, by_variance, torch.zeros_like(by_y) if backward.c2 is None else -backward.c2 * rows.rstd + 0 * by_y


def _rounded_apart(parts: tuple[Tensor, Tensor, Tensor], fmt: Format, count: int) -> Tensor:
    """The most by which ``count`` roundings of the parts, and those of their sums but the last, move dx, (m, N).

    Which parts share an upcast, and so a rounding, depends on how the kernel is written: the worst of the ways.
    """
    y, variance, mean = parts

    def half(t: Tensor) -> Tensor:
        return half_ulp(t.abs(), fmt)

    pairs = ((y, variance + mean), (variance, y + mean), (mean, y + variance))
    two = torch.stack([half(one) + half(others) for one, others in pairs]).amax(0)
    if count == 2:
        return two
    sums = torch.stack([half(others) for _, others in pairs]).amax(0)
    return torch.maximum(two, half(y) + half(variance) + half(mean) + sums) * (count / 3)
