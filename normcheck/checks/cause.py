"""The cause of a wrong result in the kernel's code, in one line, if a test of this very case proves it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.cases.inputs import make
from normcheck.cases.op import Op
from normcheck.checks.check import Result
from normcheck.checks.gradients import autograd_checks
from normcheck.oracle import grouped, reference, rotary
from normcheck.oracle.compare import Expectation
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.rounding import half_ulp


def cause(op: Op, result: Result) -> str:
    """Why a failed ``result`` is wrong; "" if the cause is not certain.

    One cause is known: x is upcast more than once, so that autograd adds gradients that it has rounded to half
    precision. It is certain if autograd's graph shows it, and only dx is wrong, by no more than those roundings.
    """
    if result.joined < 2 or result.problems or {c.output for c in result.wrong} != {"dx"}:
        return ""
    if not _roundings_suffice(op, result):
        return ""
    times = "twice" if result.joined == 2 else f"{result.joined} times"
    half = result.case.dtype
    return f"x is upcast {times}; each gradient is rounded to {half} before they are added. Upcast once."


def _roundings_suffice(op: Op, result: Result) -> bool:
    """Whether dx is within its bound plus the roundings of its parts to the io dtype before they are added."""
    case, gradients = result.case, result.seen.gradients
    expectations: dict[int, Expectation] = {}

    def watch(part: Expectation) -> None:
        if part.output == "dx":
            expectations[part.first] = part  # the last judgement of a block counts

    inputs = make(case, op, result.home)
    judge = judge_of(op, case, inputs, result.model, {})
    _, saved = judge_forward(judge, result.seen.outputs)
    autograd_checks(replace(judge, watch=watch), inputs, result.seen.outputs, gradients, saved)
    dx = gradients["dx"].reshape(case.M, case.N).double()
    for block in judge.blocks():
        expected, bound = expectations[block.start].expected, expectations[block.start].bound.upper
        dy = judge.dy[block].double()
        parts = _parts(judge, block, dy if saved.bits is None else dy * saved.bits[block])
        allowed = bound + _rounded_apart(parts, judge.io, result.joined)
        allowed = torch.where(torch.isnan(allowed), torch.inf, allowed)
        if not bool(((dx[block] - expected).abs() <= allowed).all()):
            return False
    return True


def _parts(judge: Judge, block: slice, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x through y itself, through the variance and through the mean: each (m, N), their sum is dx."""
    rows, shape = judge.truth(block).rows, dy.shape
    g = judge.formula.of(rows).scale.g
    if rows.grouping is not None:
        dy = grouped.cotangent(judge.op, judge.rules, rows, judge.scale, judge.formula.bias, dy.reshape(rows.x.shape))
        g = rows.of_channels(g)
    if rows.rotation is not None:
        dy, g = rotary.cotangent(judge.rules, rows, dy), rows.rotation.factor
    backward = reference.backward(judge.op, rows, g, dy)
    by_y, by_variance = backward.wd * rows.rstd, -rows.xh * backward.c1 * rows.rstd
    by_mean = torch.zeros_like(by_y) if backward.c2 is None else -backward.c2 * rows.rstd + 0 * by_y
    if rows.rotation is not None:
        v = torch.zeros_like(rows.rotation.rest)  # the gradient of v is dy itself: no part of it is rounded apart
        return rotary.whole(rows, by_y, v), rotary.whole(rows, by_variance, v), rotary.whole(rows, by_mean, v)
    return by_y.reshape(shape), by_variance.reshape(shape), by_mean.reshape(shape)


def _rounded_apart(parts: tuple[Tensor, Tensor, Tensor], fmt: Format, count: int) -> Tensor:
    """The most that ``count`` roundings of the parts, and those of their sums except the last, can move dx: (m, N).

    The kernel's code decides which parts share an upcast, and so a rounding: the worst grouping counts.
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
