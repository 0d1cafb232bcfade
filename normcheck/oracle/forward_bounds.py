"""Bounds of the saved mean and rstd, and of y.

The error of the variance goes through the root as an interval, so that the bounds hold for any eps, tiny variances and
large offsets. Symbols: ``al`` bounds the relative error of rstd, ``d`` the shift of xhat by the error of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.dtypes import Format
from normcheck.oracle.reference import Forward, Rows, Scale
from normcheck.oracle.rounding import FLT_MAX, NO_ROOM, Bound, Rules, plus_store, store


@dataclass(frozen=True)
class StatisticsBound:
    """``al``, ``d`` (m, 1): the errors of xhat by those of the statistics; the bounds of the saved mean and rstd.

    ``d`` and ``mean`` are None if the op has no mean; ``mean`` and ``rstd`` are None if the statistics were given.
    ``of_rstd`` makes the bound of rstd: many kernels save none.
    """

    al: Tensor | float
    d: Tensor | None
    mean: Bound | None
    of_rstd: Callable[[], Bound] | None

    @cached_property
    def rstd(self) -> Bound | None:
        """The bound of the saved rstd."""
        return None if self.of_rstd is None else self.of_rstd()


def checkable_rows(rows: Rows, case: Case) -> Tensor | None:
    """Bool (m, 1): whether no sum may overflow in fp32 (above FLT_MAX / 4) and v + eps > 0; None: all rows."""
    assert rows.var is not None
    limit = FLT_MAX / 4 / case.N
    if rows.x.numel() == 0:
        return None
    if case.eps > 0:
        small = case.dtype == "fp16" and rows.off is None  # a sum with a product may be too large for fp16
        if small and case.rows not in NOT_FINITE and case.gate not in NOT_FINITE:
            return None
        square = rows.var if rows.mean is None else torch.addcmul(rows.var, rows.mean, rows.mean)
        if float(square.max()) <= limit:  # mean(x^2), the root of which is at least mean |x|
            return None
    largest = rows.var if rows.mean is None else torch.maximum(rows.var, rows.x_abs.mean(1, keepdim=True))
    if rows.off is not None and rows.mean is not None:  # between the largest x and others: torch's Welford squares x
        largest = torch.addcmul(rows.var, rows.mean, rows.mean)
    checkable = (largest <= limit) & (rows.var + case.eps > 0)
    return None if bool(checkable.all()) else checkable


EXACT = StatisticsBound(0.0, None, None, None)
"""The bound if the kernel got the very statistics that the reference uses."""


def as_stored(rows: Rows, stored: Rows) -> StatisticsBound:
    """The bound for gradients if the kernel got the statistics of ``stored``, those of ``rows`` rounded.

    With a mean that is rounded the mean of xhat is not 0. The forms of dx that subtract mean(dy g) from dy g first, or
    have the derivative by the mean in two terms, are the same in exact arithmetic only, and differ by what is left; so
    does one that computes the variance around that mean anew. One that sums the mean up anew errs by more.
    """
    if rows.mean is None or stored.mean is None:
        return EXACT
    return StatisticsBound(0.0, (rows.mean - stored.mean).abs_().mul_(stored.rstd), None, None)


def statistics(rules: Rules, rows: Rows, eps: float, off: Tensor | None = None) -> StatisticsBound:
    """Bounds of mean and rstd. ``off`` (m, N): how far what a kernel norms may be from ``rows``.

    With c = x - mean, which sums to 0, such an error d moves sum c^2 by at most sum (2 |c| + |d|) |d|, and the mean by
    the mean of |d|.

    In any order of a sum, a summand passes through at most H(N) - 1 adds. Two-pass: sum (x - m')^2 = sum (x - m)^2
    + N (m' - m)^2. Welford and Chan's merge are stable to first order in sqrt(1 + mean^2 / v) only: the ``c_var`` term
    (Chan, Golub, LeVeque 1983). A variance is a sum of squares, so no kernel's v + eps is below eps: that bounds rstd
    from above if the interval of v reaches below zero.
    """
    u, eta, count = rules.u, rules.eta, rules.count
    assert rows.var is not None
    n = rows.x.shape[1]
    h = rules.chain(n)
    v = rows.var
    dm: Tensor | None = None
    if rows.mean is not None and off is not None:
        v = v + (2 * (rows.x - rows.mean).abs() + off).mul_(off).mean(1, keepdim=True)
    if rows.mean is not None:
        size = rows.x_abs if off is None else rows.x_abs + off
        dm = size.mean(1, keepdim=True).mul_(rules.gam(h + count["mean"])).add_((h + 3) * eta)
        dm2 = dm * dm
        dv = (v + dm2).mul_(rules.gam(h + count["var"])).add_(dm2).add_(3 * eta)
        if rules.c_var:
            rms = torch.addcmul(v, rows.mean, rows.mean).sqrt_()
            dv.addcmul_(v.sqrt(), rms, value=rules.c_var * rules.gam(h))
        if off is not None:
            moved_mean = off.mean(1, keepdim=True)
            dv, dm = dv + (v - rows.var), dm + moved_mean
            if rules.c_var:
                dv.addcmul_(v.sqrt(), moved_mean, value=rules.c_var * rules.gam(h))
    else:
        moved = 0.0 if off is None else (2 * rows.x_abs + off).mul_(off).mean(1, keepdim=True)
        dv = ((v + moved) * rules.gam(h + count["rms"])).add_(3 * eta).add_(moved)
    q = rows.var + eps
    dq = (q + dv).mul_(u).add_(dv).add_(u * eps)
    rs = 2 * rules.model.rsqrt_ulp * u
    upper = (q / (q - dq).clamp_(min=eps * (1 - 2 * u))).sqrt_().mul_(1 + rs).sub_(1)
    lower = 1 - (q / dq.add_(q)).sqrt_().mul_(1 - rs)
    al, r = torch.maximum(upper, lower), rows.rstd

    def of_rstd() -> Bound:  # saved in the accumulation format: the counts include the store
        return Bound(
            (r * upper).add_(eta),
            (r * lower).add_(eta),
            lambda: {"variance": r * (upper - rs), "rsqrt": r * rs, "underflow": torch.full_like(r, eta)},
        )

    if rows.mean is None or dm is None:
        return StatisticsBound(al, None, None, of_rstd)
    return StatisticsBound(al, r * dm, Bound(dm, None, lambda: {"sum": dm}), of_rstd)


def saved_statistics(rules: Rules, rows: Rows) -> StatisticsBound:
    """The bound for y given the kernel's saved statistics, which one rounding of their store may have changed, and of
    which rstd may be that of another lane.
    """
    saved = rules.count["stats_saved"] * rules.u
    d = None if rows.mean is None else (rows.mean.abs() * rows.rstd).mul_(saved)
    return StatisticsBound(rules.saved_rstd(rows.xh.shape[1]), d, None, None)


@dataclass(frozen=True, slots=True)
class YBound:
    """``before_store``: E of z (and of y, the clip being 1-Lipschitz); ``y``: the bound after the store."""

    before_store: Tensor
    y: Bound


def output_y(
    rules: Rules, rows: Rows, fwd: Forward, scale: Scale, bias_abs: Tensor | None, given: StatisticsBound, fmt: Format
) -> YBound:
    """Bound of y (m, N), stored in ``fmt``. Covers ((x-m) r) g + b and (x-m) (r g) + b, with or without FMA.

    ``bias_abs`` is |bias| (N,). The error of the final add is at most |p|: if g == 0, the add is exact, and so is the
    bit. A kernel that flushes subnormal numbers reads a subnormal bias as 0.
    """
    z_abs = fwd.z.abs()
    before = before_store(rules, rows, fwd, z_abs, scale, bias_abs, given)
    upper = plus_store(rules, before, z_abs if fwd.y is fwd.z else fwd.y.abs(), fmt, "y")
    if fmt.name == rules.model.accumulate:
        upper.clamp_(min=NO_ROOM)
    if rules.safety != 1.0:
        upper *= rules.safety

    def terms() -> Mapping[str, Tensor]:
        eta, g_abs, ones = rules.eta, scale.abs, torch.ones_like(before)
        stored = store(rules, fwd.y.abs() + before, fmt, "y")
        mean = ones * 0 if given.d is None else g_abs * given.d * ones
        rstd = rows.xh_abs * g_abs * given.al
        alone = {} if scale.alone is None else {"weight alone": rows.xh_abs * scale.alone * rules.alone}
        return {
            "store": stored * ones,
            "rstd": rstd,
            "mean": mean,
            "ops": (before - rstd - mean - eta - sum(alone.values())).clamp_(min=0),
            **alone,
            "underflow": eta * (ones if scale.where is None else ones * scale.where),
        }

    return YBound(before, Bound(upper, None, terms))


def before_store(
    rules: Rules,
    rows: Rows,
    fwd: Forward,
    z_abs: Tensor,
    scale: Scale,
    bias_abs: Tensor | None,
    given: StatisticsBound,
) -> Tensor:
    """E of z (m, N): the errors by scaling, by adding the bias and by the statistics. ``z_abs``: |z|."""
    u, eta, k, d, r = rules.u, rules.eta, rules.k_y, given.d, rows.rstd
    g_abs, grown = scale.abs, 1 + given.al
    per_row = r * eta
    if d is not None:
        per_row.add_(d, alpha=1 + (k + 1) * u)
    per_row.mul_(grown).add_(eta)
    before = (rows.xh_abs * (grown * (1 + k * u) - 1)).add_(per_row).mul_(g_abs).add_(eta)
    if scale.alone is not None:
        before += (rows.xh_abs * grown + per_row).mul_(scale.alone).mul_(rules.alone)
    if rules.model.y_form == "folded":
        offset = rows.x_abs.clone() if rows.mean is None else rows.x_abs + rows.mean.abs()
        before += offset.mul_(r).mul_(g_abs).mul_(5 * u * grown)
    p_abs = z_abs if fwd.p is fwd.z else fwd.p.abs()
    if bias_abs is not None:
        if rules.model.y_form == "folded":
            before += bias_abs * (5 * u * grown)
        before += torch.minimum((z_abs + before).mul_(u), p_abs + before)
        before.add_(bias_abs, alpha=2.0**-51)
    before.add_(p_abs, alpha=2.0**-51)  # the reference's own rounding
    if scale.where is not None:
        before *= scale.where
    if bias_abs is not None:
        before += torch.where(bias_abs < eta, bias_abs, 0.0)
    return before
