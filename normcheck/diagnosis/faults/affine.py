"""Faults of weight and bias, of roundings on the way to y, and of strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.diagnosis.faults.fault import (
    BF16,
    FP16,
    Fault,
    biased_ops,
    clamped_ops,
    fault,
    not_rounding_ops,
    plain_scale_ops,
    raw_ops,
    reads_as_packed,
    rounding_ops,
    storing,
    zero_centered_ops,
)
from normcheck.diagnosis.formula import TEXTBOOK, Call, Step, stored, through, truncated
from normcheck.oracle.rounding import half_ulp


def _io(make: Step) -> Step:
    """``make`` with its result rounded to the io dtype."""
    return lambda c: through(make(c), c.io)


def _fitted_rstd(c: Call) -> Tensor:
    """For each row the number of the io dtype near rstd that explains most of its y: its own sum has an order that is
    not known, and so an rstd that is off by a few ulps, but one for all columns. It may be 0 if that sum
    overflows. With one column any y would fit."""
    exact = TEXTBOOK.rstd(c)
    ulp = 2 * half_ulp(exact, c.io)
    near = through(exact, c.io)
    if c.N == 1:
        return near
    y, weight = c.own["y"].reshape(c.M, c.N), through(c.one_plus(c.w), c.io)
    lost = torch.where((c.xc * c.xc).sum(1, keepdim=True) > c.io.max, c.zeros, near)
    best, most = torch.zeros_like(exact), torch.full_like(exact, -1.0)
    for r in (lost, *(near + steps * ulp for steps in range(-_MOST_ULPS, _MOST_ULPS + 1))):
        z = c.plus_b(through(through(c.xc * r, c.io) * weight, c.io))
        right = (stored(z, c.io) == y).sum(1, keepdim=True).double()
        best, most = torch.where(right > most, r, best), torch.maximum(right, most)
    return best


_MOST_ULPS = 16


def _twice(t: Tensor, fmt: Format) -> Tensor:
    other = {"bf16": FP16, "fp16": BF16}.get(fmt.name)
    return stored(t, fmt) if other is None else stored(stored(t, other), fmt)


def _rounded_one_plus(c: Call) -> Tensor:
    return through(1 + c.w, c.io)


def _as_bf16(c: Call) -> Tensor:
    """The first N halves of the bits of an fp32 weight, read as the io dtype."""
    stored_weight = c.inputs.weight
    if stored_weight is None or stored_weight.dtype != torch.float32 or c.io.name == "fp32":
        return c.one_plus(c.w)
    return c.one_plus(stored_weight.contiguous().view(torch.bfloat16)[: c.N].double())


def _ones(c: Call) -> Tensor:
    return torch.ones_like(c.w)


def _ones_without_bias(c: Call) -> Tensor:
    return torch.ones_like(c.w) if c.b is None else c.one_plus(c.w)


_WITHOUT_BIAS = "y is not multiplied by the weight if there is no bias"


def _xhat_rounded(**steps: Any) -> Fault:
    """Several ways of one fault, which differ in what comes after it."""
    return fault(
        "xhat_rounded",
        "xhat is rounded to the io dtype before it is multiplied by the weight, which this op does not do",
        casts=True,
        takes=not_rounding_ops,
        narrow=True,
        facts={"rounds_xhat": True},
        **steps,
    )


FAULTS = (
    fault("bias_missing", "the bias is not added", preact=lambda c: c.p, takes=biased_ops),
    fault(
        "bias_before_weight",
        "the bias is added before the weight: (xhat + bias) * weight",
        preact=lambda c: c.plus_b(c.xh) * c.g,
        takes=biased_ops,
    ),
    fault(
        "bias_left",
        "the bias is taken one column to the left",
        preact=lambda c: c.p if c.b is None else c.p + c.b.roll(1),
        takes=biased_ops,
    ),
    fault(
        "bias_right",
        "the bias is taken one column to the right",
        preact=lambda c: c.p if c.b is None else c.p + c.b.roll(-1),
        takes=biased_ops,
    ),
    fault("bias_twice", "the bias is added twice", preact=lambda c: c.plus_b(c.plus_b(c.p)), takes=biased_ops),
    fault("weight_missing", "y is not multiplied by the weight", gamma=_ones),
    fault("weight_missing", "y is not multiplied by the weight", gamma=_ones, gamma_b=_ones),
    fault("weight_missing_without_bias", _WITHOUT_BIAS, gamma=_ones_without_bias, sometimes=True),
    fault(
        "weight_missing_without_bias",
        _WITHOUT_BIAS,
        gamma=_ones_without_bias,
        gamma_b=_ones_without_bias,
        sometimes=True,
    ),
    fault(
        "weight_and_bias_missing",
        "y is xhat: weight and bias are not applied",
        gamma=_ones,
        preact=lambda c: c.p,
        takes=biased_ops,
    ),
    fault(
        "bias_rounded",
        "an fp32 bias is rounded to the io dtype",
        preact=lambda c: c.p if c.b is None else c.p + through(c.b, c.io),
        takes=biased_ops,
        narrow=True,
    ),
    fault(
        "product_rounded",
        "xhat * weight is rounded to the io dtype before the bias is added",
        preact=lambda c: c.plus_b(through(c.p, c.io)),
        takes=biased_ops,
        narrow=True,
    ),
    fault(
        "weight_first",
        "every column is multiplied by the first weight",
        gamma=lambda c: c.one_plus(c.w)[:1].expand(c.N),
    ),
    fault("weight_left", "the weight is taken one column to the left", gamma=lambda c: c.one_plus(c.w).roll(1)),
    fault("weight_right", "the weight is taken one column to the right", gamma=lambda c: c.one_plus(c.w).roll(-1)),
    fault("weight_twice", "the weight is applied twice", preact=lambda c: c.plus_b(c.p * c.g)),
    fault(
        "one_plus_missing",
        "1 + weight: the 1 is missing in forward",
        gamma=lambda c: c.w,
        takes=zero_centered_ops,
    ),
    fault(
        "one_plus_missing_both",
        "1 + weight: the 1 is missing, in forward and in backward",
        gamma=lambda c: c.w,
        gamma_b=lambda c: c.w,
        takes=zero_centered_ops,
        facts={"zero_centered": False},
    ),
    fault(
        "one_plus_missing_backward",
        "1 + weight: the 1 is missing in backward",
        gamma_b=lambda c: c.w,
        takes=zero_centered_ops,
    ),
    fault(
        "one_plus_unasked",
        "1 is added to the weight, which this op does not do",
        gamma=lambda c: 1 + c.w,
        gamma_b=lambda c: 1 + c.w,
        takes=plain_scale_ops,
        facts={"zero_centered": True},
    ),
    fault(
        "one_plus_unasked",
        "1 is added to the weight, which this op does not do",
        gamma=lambda c: 1 + c.w,
        takes=plain_scale_ops,
    ),
    *(
        fault(
            f"bare_gamma_{gamma}",
            f"without a weight xhat is multiplied by {gamma}: 1 + weight is 1 there",
            bare=float(gamma),
            bare_b=bare_b,
            takes=zero_centered_ops,
        )
        for gamma in (0, 2)
        for bare_b in (1.0, float(gamma))
    ),
    fault(
        "one_plus_rounded",
        "1 + weight is rounded to the io dtype in forward",
        gamma=_rounded_one_plus,
        takes=zero_centered_ops,
        narrow=True,
    ),
    fault(
        "one_plus_rounded_both",
        "1 + weight is rounded to the io dtype, in forward and in backward",
        gamma=_rounded_one_plus,
        gamma_b=_rounded_one_plus,
        takes=zero_centered_ops,
        narrow=True,
    ),
    fault(
        "one_plus_rounded_backward",
        "1 + weight is rounded to the io dtype in backward",
        gamma_b=_rounded_one_plus,
        takes=zero_centered_ops,
        narrow=True,
    ),
    fault(
        "weight_rounded",
        "an fp32 weight is rounded to the io dtype",
        gamma=lambda c: c.one_plus(through(c.w, c.io)),
        narrow=True,
    ),
    fault(
        "weight_as_bf16",
        "the bits of an fp32 weight are read as bf16",
        gamma=_as_bf16,
        gamma_b=_as_bf16,
        narrow=True,
    ),
    _xhat_rounded(dw=lambda c: c.rows(c.dy * c.xh)),
    _xhat_rounded(lossy=True),
    _xhat_rounded(lossy=True, preact=lambda c: c.plus_b(through(c.p, c.io))),
    fault(
        "xhat_not_rounded",
        "xhat is not rounded to the io dtype before it is multiplied by the weight: this op does that",
        casts=False,
        dw=lambda c: c.rows(c.dy * through(c.xh, c.io)),
        takes=rounding_ops,
        narrow=True,
        facts={"rounds_xhat": False},
    ),
    fault(
        "xhat_not_rounded",
        "xhat is not rounded to the io dtype before it is multiplied by the weight: this op does that",
        casts=False,
        takes=rounding_ops,
        narrow=True,
        facts={"rounds_xhat": False},
    ),
    fault(
        "xhat_truncated",
        "xhat is rounded toward zero",
        cast=truncated,
        dw=lambda c: c.rows(c.dy * through(c.xh, c.io)),
        takes=rounding_ops,
        narrow=True,
    ),
    fault(
        "rstd_rounded_in_xhat",
        "rstd is rounded to the io dtype, and xhat is multiplied in it",
        xhat=lambda c: c.xc * through(c.r, c.io),
        takes=rounding_ops,
        narrow=True,
    ),
    fault(
        "all_io",
        "the statistics are in the io dtype, and all else as well: x is not upcast",
        rstd=_fitted_rstd,
        casts=True,
        gamma=_io(TEXTBOOK.gamma),
        preact=lambda c: c.plus_b(through(c.p, c.io)),
        lossy=True,
        takes=lambda op: raw_ops(op) and not op.quantises,
        narrow=True,
    ),
    fault(
        "y_truncated", "the store of y truncates: it must round to nearest", store=storing("y", truncated), narrow=True
    ),
    fault(
        "stores_truncated",
        "stores truncate: they must round to nearest",
        store=storing("y dx dw db", truncated),
        narrow=True,
    ),
    fault("y_rounded_twice", "y is rounded to another half dtype first", store=storing("y", _twice), narrow=True),
    fault("clip_missing", "y is not clipped", clip=lambda c: c.z, takes=clamped_ops),
    fault("upper_clip_missing", "y is not clipped above", clip=lambda c: c.z.clamp(min=c.lo), takes=clamped_ops),
    fault(
        "row_stride_ignored",
        "the rows of x and dy are read as if they were packed: x.stride(-2) and dy.stride(-2) are ignored",
        read=reads_as_packed("x dy"),
    ),
    *(
        fault(
            f"row_stride_of_{name}_ignored",
            f"the rows of {name} are read as if they were packed: {name}.stride(-2) is ignored",
            read=reads_as_packed(name),
        )
        for name in ("x", "dy")
    ),
)
