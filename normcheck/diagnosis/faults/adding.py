"""Faults of the residual: of the sum, of what is stored of it, and of its cotangent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normcheck.diagnosis.faults.fault import BF16, Fault, adding_ops, fault, reads_as_packed, storing
from normcheck.diagnosis.formula import Call, stored, through, truncated


def _fault(name: str, words: str, **more: Any) -> Fault:
    return fault(name, words, takes=adding_ops, **more)


def _sum(c: Call, residual: Tensor) -> Tensor:
    return (c.summand + residual).float().double()


def _own_y(c: Call) -> Tensor:
    y = c.own.get("y")
    return c.kept if y is None else stored(y.reshape(c.M, c.N), c.wide)


def _without_tail(c: Call) -> Tensor:
    return _sum(c, torch.where(torch.arange(c.N) < c.N // 8 * 8, c.residual, 0.0))


def _variance_of_x(c: Call) -> Tensor:
    x = c.summand - c.summand.mean(1, keepdim=True) if c.op.centered else c.summand
    return (x * x).mean(1, keepdim=True)


FAULTS = (
    _fault(
        "residual_left_out",
        "the residual is left out of what is normed: that is x alone",
        normed=lambda c: c.summand,
        again=lambda c: c.summand,
    ),
    _fault(
        "residual_left_out", "the residual is left out of what is normed: that is x alone", normed=lambda c: c.summand
    ),
    _fault("residual_not_added", "the residual is not added at all: x stands for the sum", add=lambda c: c.summand),
    _fault("residual_alone", "the residual alone is normed: x is left out", normed=lambda c: c.residual),
    _fault(
        "residual_alone",
        "the residual alone is normed: x is left out",
        normed=lambda c: c.residual,
        again=lambda c: c.residual,
    ),
    _fault("residual_subtracted", "the residual is subtracted", add=lambda c: _sum(c, -c.residual)),
    _fault("residual_twice", "the residual is added twice", add=lambda c: _sum(c, 2 * c.residual)),
    _fault(
        "residual_of_next_row",
        "each row gets the residual of another one",
        add=lambda c: _sum(c, c.residual.roll(1, 0)),
    ),
    _fault(
        "residual_of_next_row",
        "each row gets the residual of another one",
        add=lambda c: _sum(c, c.residual.roll(-1, 0)),
    ),
    _fault(
        "residual_of_first_row",
        "every row gets the residual of the first one",
        add=lambda c: _sum(c, c.residual[:1].expand_as(c.residual)),
    ),
    _fault("residual_without_tail_8", "the residual is not added in the last N mod 8 columns", add=_without_tail),
    _fault(
        "residual_io",
        "an fp32 residual is rounded to the dtype of x before it is added",
        add=lambda c: _sum(c, through(c.residual, c.io)),
        narrow=True,
    ),
    _fault(
        "row_stride_of_residual_ignored",
        "the rows of the residual are read as if they were packed: residual.stride(-2) is ignored",
        read=reads_as_packed("residual"),
    ),
    _fault(
        "variance_of_x",
        "the variance is that of x, before the residual is added",
        variance=_variance_of_x,
    ),
    _fault(
        "tail_normed_exact",
        "the last N mod 8 columns are normed before the sum is stored, the others after it",
        normed=lambda c: torch.where(torch.arange(c.N) < c.N // 8 * 8, c.kept, c.total),
        narrow=True,
        block=8,
    ),
    *(
        _fault(name, words, **steps)
        for name, words, of in (
            ("residual_out_is_x", "residual_out is x: the sum is not stored", lambda c: stored(c.summand, c.wide)),
            (
                "residual_out_is_residual",
                "residual_out is the residual as it came: the sum is not stored",
                lambda c: c.residual,
            ),
            ("residual_out_is_y", "residual_out is y: both are written to one place", _own_y),
            ("residual_out_zeros", "residual_out is zeros", lambda c: 0 * c.kept),
        )
        for steps in ({"sum_out": of}, {"sum_out": of, "again": of})
    ),
    _fault(
        "sum_truncated",
        "the sum is stored toward zero: it must be rounded to nearest",
        keep_sum=lambda c: truncated(c.total, c.wide),
    ),
    _fault(
        "sum_bf16",
        "the sum is rounded to bf16 before it is stored",
        keep_sum=lambda c: stored(stored(c.total, BF16), c.wide),
    ),
    _fault(
        "dresidual_out_missing",
        "the cotangent of residual_out is not added to dx and dresidual",
        dx_sum=lambda c: c.dn,
        dresidual=lambda c: c.dn,
    ),
    _fault("dresidual_out_missing_in_dx", "the cotangent of residual_out is not added to dx", dx_sum=lambda c: c.dn),
    _fault(
        "dresidual_out_missing_in_dresidual",
        "the cotangent of residual_out is not added to dresidual",
        dresidual=lambda c: c.dn,
    ),
    _fault(
        "dresidual_out_alone",
        "dresidual is the cotangent of residual_out: it lacks the norm's own gradient",
        dresidual=lambda c: c.added,
    ),
    _fault(
        "dresidual_out_twice",
        "the cotangent of residual_out is added twice",
        dx_sum=lambda c: c.dn + 2 * c.added,
        dresidual=lambda c: c.dn + 2 * c.added,
    ),
    _fault(
        "dresidual_out_in_dy",
        "the cotangent of residual_out is added to dy, and so goes through the norm",
        cotangent=lambda c: through(c.dy + c.added, c.io),
        dx_sum=lambda c: c.dn,
        dresidual=lambda c: c.dn,
    ),
    _fault("backward_of_x", "backward takes x for the sum", again=lambda c: c.summand),
    _fault("backward_of_residual", "backward takes the residual for the sum", again=lambda c: c.residual),
    _fault(
        "dresidual_io",
        "dresidual is rounded to the dtype of x on the way to its own",
        store=lambda c, t, fmt, name: stored(stored(t, c.io) if name == "dresidual" else t, fmt),
        narrow=True,
    ),
    _fault(
        "dresidual_bf16",
        "dresidual is rounded to bf16 on the way to its dtype",
        store=storing("dresidual", lambda t, fmt: stored(stored(t, BF16), fmt)),
        but="bf16",
    ),
)
