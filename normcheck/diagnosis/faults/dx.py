"""Faults of dx."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.diagnosis.faults.fault import (
    by_tile,
    centered_ops,
    chain_n,
    fault,
    sum_n,
    whole_blocks,
)
from normcheck.diagnosis.formula import TEXTBOOK, Call


def _c1(c: Call) -> Tensor:
    return TEXTBOOK.mean1(c)


def _along_columns(c: Call) -> Tensor:
    return _c1(c)[torch.arange(c.N) % c.M].t() if c.M else _c1(c)


def _xhat_from_y(c: Call, weight: Tensor) -> Tensor:
    y = c.own.get("y", c.y).reshape(c.M, c.N)
    return (y if c.b is None else y - c.b) / weight


def _away_from_zero(weight: Tensor, least: float) -> Tensor:
    return torch.where(weight < 0, weight.clamp(max=-least), weight.clamp(min=least))


FAULTS = (
    fault(
        "dx_c1_missing", "dx lacks the term by the variance, xhat * mean(xhat * dy * weight)", mean1=lambda c: c.zeros
    ),
    fault(
        "dx_c2_missing", "dx lacks the term by the mean, mean(dy * weight)", mean2=lambda c: c.zeros, takes=centered_ops
    ),
    fault(
        "dx_both_missing",
        "dx is dy * weight * rstd: it lacks the terms by the mean and by the variance",
        mean1=lambda c: c.zeros,
        mean2=lambda c: c.zeros,
        takes=centered_ops,
    ),
    fault(
        "dx_padded_divisor",
        "the means of dx are divided by the padded row, a power of two: they must be divided by N",
        mean1=lambda c: sum_n(c.xh * c.wd) / c.block,
        mean2=lambda c: sum_n(c.wd) / c.block,
    ),
    fault(
        "dx_sums_not_divided",
        "the means of dx are sums: they must be divided by N",
        mean1=lambda c: sum_n(c.xh * c.wd),
        mean2=lambda c: sum_n(c.wd),
    ),
    fault(
        "dx_c1_without_weight",
        "mean(xhat * dy * weight) in dx is formed without the weight",
        mean1=lambda c: (c.xh * c.dy).mean(1, keepdim=True),
    ),
    fault(
        "dx_c2_without_weight",
        "mean(dy * weight) in dx is formed without the weight",
        mean2=lambda c: c.dy.mean(1, keepdim=True),
        takes=centered_ops,
    ),
    fault(
        "dx_means_without_weight",
        "both means in dx are formed without the weight",
        mean1=lambda c: (c.xh * c.dy).mean(1, keepdim=True),
        mean2=lambda c: c.dy.mean(1, keepdim=True),
        takes=centered_ops,
    ),
    fault("dx_c1_sign", "mean(xhat * dy * weight) in dx has the wrong sign", mean1=lambda c: -_c1(c)),
    fault(
        "dx_c2_sign",
        "mean(dy * weight) in dx has the wrong sign",
        mean2=lambda c: -TEXTBOOK.mean2(c),
        takes=centered_ops,
    ),
    fault(
        "dx_c1_n_minus_1",
        "mean(xhat * dy * weight) in dx is divided by N - 1",
        mean1=lambda c: sum_n(c.xh * c.wd) / max(c.N - 1, 1),
    ),
    fault(
        "dx_c1_rstd_missing",
        "the term by the variance in dx lacks a power of rstd: x - mean stands for xhat",
        dx=lambda c: (c.wd - (c.xc * c.c1 + c.c2)) * c.r,
    ),
    fault("dx_rstd_missing", "the last factor rstd of dx is missing", dx=lambda c: c.wd - (c.xh * c.c1 + c.c2)),
    fault("dx_rstd_twice", "dx has one factor rstd too many", dx=lambda c: TEXTBOOK.dx(c) * c.r),
    fault("dx_weight_missing", "dx lacks the weight: dy stands for dy * weight", wdy=lambda c: c.dy),
    fault(
        "dx_in_place",
        "dx is written over dy before dy was read: dy * weight is lost",
        dx=lambda c: -2 * (c.xh * c.c1 + c.c2) * c.r,
    ),
    fault(
        "dx_last_column_left_out",
        "the last column is left out of the means of dx",
        mean1=lambda c: sum_n((c.xh * c.wd)[:, :-1]) / c.N,
        mean2=lambda c: sum_n(c.wd[:, :-1]) / c.N,
    ),
    *(
        fault(
            f"dx_without_tail_{k}",
            f"the last N mod {k} columns are left out of the means of dx",
            mean1=lambda c, k=k, of=of: sum_n((c.xh * c.wd)[:, : of(c.N, k)]) / c.N,
            mean2=lambda c, k=k, of=of: sum_n(c.wd[:, : of(c.N, k)]) / c.N,
        )
        for k in (2, 4, 8, 16, 32, 64, 128, 256)
        for of in (lambda n, k: n // k * k, whole_blocks)
    ),
    *(
        fault(
            f"dx_first_{k}_columns",
            f"columns from {k} on are left out of the means of dx: behind a limit, or in a last block that is not full",
            mean1=lambda c, k=k: sum_n((c.xh * c.wd)[:, :k]) / c.N,
            mean2=lambda c, k=k: sum_n(c.wd[:, :k]) / c.N,
        )
        for k in (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    ),
    fault("dx_zero", "dx is zeros", dx=lambda c: 0 * c.wd),
    fault("dx_is_dy", "dx is dy: the norm is skipped", dx=lambda c: c.dy),
    fault("dx_of_xhat", "dx is dy * weight: rstd and both means are missing", dx=lambda c: c.wd),
    *(
        fault(
            f"dx_over_{k}_rows",
            f"the means of dx are taken over {k} rows at a time: each row has its own",
            mean1=lambda c, k=k, share=share: by_tile(_c1(c), k) / share(k),
            mean2=lambda c, k=k, share=share: by_tile(TEXTBOOK.mean2(c), k) / share(k),
        )
        for k in (2, 4, 8, 16)
        for share in (lambda k: 1, lambda k: k)
    ),
    fault(
        "xhat_from_y",
        "backward rebuilds xhat from the stored y, divided by the weight",
        xhat_b=lambda c: _xhat_from_y(c, c.one_plus(c.w)),
    ),
    fault(
        "xhat_from_y_clamped",
        "backward rebuilds xhat from the stored y, divided by the weight, which is kept eps away from 0",
        xhat_b=lambda c: _xhat_from_y(c, _away_from_zero(c.one_plus(c.w), c.eps)),
    ),
    fault("dx_c1_along_columns", "mean(xhat * dy * weight) in dx is broadcast along the columns", mean1=_along_columns),
    fault(
        "backward_not_centered",
        "backward uses x instead of x - mean",
        center_b=lambda c: c.x,
        takes=centered_ops,
    ),
    fault(
        "dx_means_accumulated_io",
        "the means of dx are accumulated in the io dtype",
        mean1=lambda c: chain_n(c.xh * c.wd, c.io) / c.N,
        mean2=lambda c: chain_n(c.wd, c.io) / c.N,
        takes=centered_ops,
        narrow=True,
    ),
    fault(
        "dx_c1_accumulated_io",
        "mean(xhat * dy * weight) in dx is accumulated in the io dtype",
        mean1=lambda c: chain_n(c.xh * c.wd, c.io) / c.N,
        narrow=True,
    ),
)
