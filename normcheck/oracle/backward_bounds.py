"""Bounds of dx, dw and db, with the errors of the statistics carried through from the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.oracle.forward_bounds import EXACT, StatisticsBound
from normcheck.oracle.reference import Backward, Rows, Scale
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, store


@dataclass(frozen=True, slots=True)
class GradientSums:
    """This block's share of the sums over M behind the bounds of dw and db, each (N,)."""

    dy_xhat: Tensor  # sum |dy| * bound of |xhat|
    dy_shift: Tensor  # sum |dy| * what underflow and the errors of the statistics do to xhat
    dy_abs: Tensor  # sum |dy|


@dataclass(frozen=True, slots=True)
class Doubt:
    """What may go either way, taken the other way, does to a block's dx (m, N) and to its share of dw and db (N,).

    Bits in doubt of an op that clamps, or roundings to the io dtype of one that rounds xhat.
    """

    dx: Tensor
    dw: Tensor
    db: Tensor


def doubted(rules: Rules, rows: Rows, dy: Tensor, scale: Scale, given: StatisticsBound, m: int) -> Doubt:
    """``dy``: the cotangent (m, N) where its bit is in doubt, 0 elsewhere. ``m``: rows of the whole sum.

    The gradients are linear in dy, so an element that passes or not changes them by its own share, roundings included.
    """
    grow = 1 + rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
    dy_abs = dy.abs() * grow
    dx = moved_dx(rules, rows, dy_abs * scale.abs, given)
    return Doubt(dx, (dy_abs * _xhat_at_most(rows, given)).sum(0), dy_abs.sum(0))


def moved_dx(rules: Rules, rows: Rows, wd: Tensor, given: StatisticsBound) -> Tensor:
    """How far dx (m, N) moves, at most, when each dy * g moves by up to ``wd`` (m, N) >= 0."""
    xa = _xhat_at_most(rows, given)
    c1, c2 = (xa * wd).mean(1, keepdim=True), wd.mean(1, keepdim=True)
    return (wd + xa * c1 + (c2 if rules.centered else 0.0)) * ((1 + given.al) * rows.rstd)


def _xhat_at_most(rows: Rows, given: StatisticsBound) -> Tensor:
    """The largest that the kernel's own |xhat| may be, (m, N)."""
    if given is EXACT:
        return rows.xh_abs
    return (rows.xh_abs if given.d is None else rows.xh_abs + given.d) * (1 + given.al)


@dataclass(frozen=True, slots=True)
class _Largest:
    """The largest that the kernel's own values behind dx may be, in size."""

    xhat: Tensor  # (m, N)
    rstd: Tensor  # (m, 1)
    wd: Tensor  # dy * g, (m, N)
    wd_mean: Tensor  # (m, 1)
    flushed: Tensor  # what underflow takes of xhat, (m, 1)
    grown: Tensor | float  # by how much what has xhat in it twice may be larger


@dataclass(frozen=True, slots=True)
class _Means:
    """``c1`` = |mean(xhat dy g)|, ``c2`` = |mean(dy g)|, 0 where the op has none, and the bounds of their errors.

    ``largest_c1``: what errors of the statistics may make of ``c1``. All (m, 1).
    """

    c1: Tensor
    largest_c1: Tensor
    dc1: Tensor
    c2: Tensor | float
    dc2: Tensor | float


def output_dx(
    rules: Rules,
    rows: Rows,
    bwd: Backward,
    dy: Tensor,
    given: StatisticsBound,
    fmt: Format,
    doubt: Doubt | None = None,
) -> tuple[Bound, GradientSums]:
    """Bound of dx (m, N), and the block's share of what the bounds of dw and db are made of.

    End to end the kernel's xhat is rho (xhat - delta) with |rho - 1| <= al, |delta| <= d, which gives the extra terms
    exactly; given the statistics, al = d = 0.
    """
    u, eta, xa, ra, wd_abs = rules.u, rules.eta, _xhat_at_most(rows, given), (1 + given.al) * rows.rstd, bwd.wd.abs()
    most = _Largest(xa, ra, wd_abs, wd_abs.mean(1, keepdim=True), eta * (1 + ra), (1 + given.al) ** 2)
    means = _means(rules, rows, bwd, most, given)
    k_el = rules.count["dx_elementwise"] * u
    per_row = means.dc2 * (1 + 8 * u) + k_el * means.c2 + means.largest_c1 * most.flushed + 5 * eta
    edx = (xa * (means.dc1 * (1 + 8 * u) + k_el * means.largest_c1)).add_(wd_abs * k_el)
    edx.add_(per_row).mul_(ra).add_(eta)
    if given is not EXACT:
        _add_statistics(edx, rows, bwd, most, means, given)
    if rules.model.bwd_form == "raw":
        edx += _raw_dx(rules, rows, most, means)
    if doubt is not None:
        edx += doubt.dx
    sums = _gradient_sums(rules, rows, dy.abs(), most, given)
    stored = store(rules, bwd.dx.abs() + edx, fmt, "dx")
    upper = edx + stored if rules.safety == 1.0 else (edx + stored) * rules.safety
    return Bound(upper, None, lambda: _dx_terms(rules, most, means, edx, stored, doubt)), sums


def _means(rules: Rules, rows: Rows, bwd: Backward, most: _Largest, given: StatisticsBound) -> _Means:
    """The two means over a row, whose errors every element of it has."""
    eta, count, al, d = rules.eta, rules.count, given.al, given.d
    h = rules.chain(rows.x.shape[1])
    dc1 = (most.xhat * most.wd).mean(1, keepdim=True).mul_(rules.gam(h + count["c1"]))
    xa_mean = (1 + al) * (1.01 if d is None else 1.01 + d)  # mean |xhat| <= 1, the square being normalised
    dc1.addcmul_(most.wd_mean, most.flushed).add_(xa_mean * eta + 3 * eta)
    c1 = bwd.c1.abs()
    largest_c1 = c1 * most.grown
    if bwd.c2 is None:
        return _Means(c1, largest_c1, dc1, 0.0, 0.0)
    c2 = bwd.c2.abs()
    if d is not None:
        largest_c1 = largest_c1 + most.grown * d * c2
    return _Means(c1, largest_c1, dc1, c2, most.wd_mean * rules.gam(h + count["c2"]) + 3 * eta)


def _add_statistics(
    edx: Tensor, rows: Rows, bwd: Backward, most: _Largest, means: _Means, given: StatisticsBound
) -> None:
    """Add to ``edx`` what the errors of the kernel's own statistics do to dx."""
    c1, c2, k2, d = means.c1, means.c2, most.grown, given.d
    per_xh = (k2 - 1) * c1
    edx += bwd.dx.abs() * given.al
    if d is not None:
        per_xh = per_xh + k2 * d * c2
        edx += most.rstd * k2 * d * (c1 + d * c2)
    edx += rows.xh_abs * (most.rstd * per_xh)


def _dx_terms(
    rules: Rules, most: _Largest, means: _Means, edx: Tensor, stored: Tensor | float, doubt: Doubt | None
) -> Mapping[str, Tensor]:
    """The parts of the bound of dx, by name."""
    ones, eta, k_el = torch.ones_like(edx), rules.eta, rules.count["dx_elementwise"] * rules.u
    c1_term, c2_term = most.rstd * means.dc1 * most.xhat, most.rstd * means.dc2 * ones
    ops = (most.wd + most.xhat * means.largest_c1 + means.c2).mul_(k_el).mul_(most.rstd)
    rest = (edx - c1_term - c2_term - ops - eta).clamp_(min=0)
    named = {"store": stored * ones, "mean(xhat dy g)": c1_term, "mean(dy g)": c2_term, "ops": ops}
    if doubt is not None:
        named[rules.doubt] = doubt.dx
        rest = (rest - doubt.dx).clamp_(min=0)
    return {**named, "statistics": rest, "underflow": eta * ones}


def _raw_dx(rules: Rules, rows: Rows, most: _Largest, means: _Means) -> Tensor:
    """What dx = rstd wd + b x + c, b = (mean sum(dy g) - sum(dy g x)) rstd^3 / N, may lose by cancellation (m, N)."""
    ra = most.rstd
    h, ra2 = rules.chain(rows.x.shape[1]), ra * ra
    s = (most.wd * rows.x_abs).mean(1, keepdim=True)
    offset = rows.x_abs
    if rows.mean is not None:
        m = rows.mean.abs()
        s.addcmul_(m, most.wd_mean)
        offset = offset + m
    lost = ra2.mul(s).mul_(rules.gam(h + 8))  # times |x - mean| ra = |xhat| (1 + al), and 8 u |mean| ra more
    per_offset = lost * ra * (8 * rules.u) + ra2 * means.largest_c1 * (4 * rules.u)
    return (rows.xh_abs * (lost * (ra / rows.rstd))).addcmul_(offset, per_offset)


def _gradient_sums(rules: Rules, rows: Rows, dy_abs: Tensor, most: _Largest, given: StatisticsBound) -> GradientSums:
    shift = ux = most.flushed  # what every term may be off by
    if given is not EXACT:
        shift = (rows.xh_abs * given.al).add_(ux if given.d is None else (1 + given.al) * given.d + ux)
    if rules.model.bwd_form == "raw":
        offset = rows.x_abs if rows.mean is None else rows.x_abs + rows.mean.abs()
        shift = shift + offset * ((1 + given.al) * rows.rstd * (4 * rules.u))
    return GradientSums((dy_abs * most.xhat).sum(0), (dy_abs * shift).sum(0), dy_abs.sum(0))


def output_dw(rules: Rules, m: int, dw: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of dw (N,), summed over all ``m`` rows; partial sums must stay in the accumulation format."""
    return _summed(rules, m, "dw", dw, sums.dy_xhat, sums.dy_shift, doubt, fmt)


def output_db(rules: Rules, m: int, db: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of db (N,), summed over all ``m`` rows."""
    return _summed(rules, m, "db", db, sums.dy_abs, None, doubt, fmt)


def _summed(
    rules: Rules,
    m: int,
    output: str,
    value: Tensor,
    size: Tensor,
    shift: Tensor | None,
    doubt: Tensor | None,
    fmt: Format,
) -> Bound:
    """Bound of a sum over ``m`` rows: ``size``, the sum of what is added; ``shift``, by which statistics move it."""
    summation = size * rules.gam(rules.chain(m) + rules.count[output])
    e = (summation if shift is None else summation + shift) + 2 * m * rules.eta
    if doubt is not None:
        e += doubt
    stored = store(rules, value.abs() + e, fmt, output)

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(e)
        bits = ones * 0 if doubt is None else doubt
        named = {"store": stored * ones, "sum over M": summation, rules.doubt: bits}
        if shift is not None:
            named["statistics"] = shift
        return {**named, "underflow": 2 * m * rules.eta * ones}

    return Bound((e + stored).mul_(rules.safety).clamp_(min=NO_ROOM), None, terms)
