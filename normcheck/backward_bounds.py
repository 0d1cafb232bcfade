"""Bounds of dx, dw and db, with the errors of the statistics carried through from the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.formats import Format
from normcheck.forward_bounds import EXACT, StatisticsBound
from normcheck.reference import Backward, Rows, Scale
from normcheck.tolerance import NO_ROOM, Bound, Rules, store


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
    return (rows.xh_abs if given.d is None else rows.xh_abs + given.d) * (1 + given.al)


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
    u, eta, count, al, d = rules.u, rules.eta, rules.count, given.al, given.d
    h = rules.chain(rows.x.shape[1])
    xh_abs, wd_abs, r = rows.xh_abs, bwd.wd.abs(), rows.rstd
    xa = xh_abs if given is EXACT else (xh_abs if d is None else xh_abs + d) * (1 + al)
    ra = (1 + al) * r
    a2 = wd_abs.mean(1, keepdim=True)
    ux = eta * (1 + ra)
    dc1 = (xa * wd_abs).mean(1, keepdim=True).mul_(rules.gam(h + count["c1"]))
    xa_mean = (1 + al) * (1.01 if d is None else 1.01 + d)  # mean |xhat| <= 1, the square being normalised
    dc1.addcmul_(a2, ux).add_(xa_mean * eta + 3 * eta)
    c1, k2 = bwd.c1.abs(), (1 + al) ** 2
    c1a = c1 * k2
    dc2: Tensor | float = 0.0
    c2: Tensor | float = 0.0
    if bwd.c2 is not None:
        c2 = bwd.c2.abs()
        dc2 = a2 * rules.gam(h + count["c2"]) + 3 * eta
        if d is not None:
            c1a = c1a + k2 * d * c2
    k_el = count["dx_elementwise"] * u
    per_row = dc2 * (1 + 8 * u) + k_el * c2 + c1a * ux + 5 * eta
    edx = (xa * (dc1 * (1 + 8 * u) + k_el * c1a)).add_(wd_abs * k_el).add_(per_row).mul_(ra).add_(eta)
    if given is not EXACT:
        per_xh = (k2 - 1) * c1
        edx += bwd.dx.abs() * al
        if d is not None:
            per_xh = per_xh + k2 * d * c2
            edx += ra * k2 * d * (c1 + d * c2)
        edx += xh_abs * (ra * per_xh)
    if rules.model.bwd_form == "raw":
        edx += _raw_dx(rules, rows, wd_abs, a2, ra, c1a)
    if doubt is not None:
        edx += doubt.dx
    dy_abs = dy.abs()
    sums = _gradient_sums(rules, rows, dy_abs, xh_abs, xa, ux, given)
    stored = store(rules, bwd.dx.abs() + edx, fmt, "dx")
    upper = edx + stored if rules.safety == 1.0 else (edx + stored) * rules.safety

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(edx)
        c1_term, c2_term = ra * dc1 * xa, ra * dc2 * ones
        ops = (wd_abs + xa * c1a + c2).mul_(k_el).mul_(ra)
        rest = (edx - c1_term - c2_term - ops - eta).clamp_(min=0)
        named = {"store": stored * ones, "mean(xhat dy g)": c1_term, "mean(dy g)": c2_term, "ops": ops}
        if doubt is not None:
            named[rules.doubt] = doubt.dx
            rest = (rest - doubt.dx).clamp_(min=0)
        return {**named, "statistics": rest, "underflow": eta * ones}

    return Bound(upper, None, terms), sums


def _raw_dx(rules: Rules, rows: Rows, wd_abs: Tensor, a2: Tensor, ra: Tensor, c1a: Tensor) -> Tensor:
    """What dx = rstd wd + b x + c, b = (mean sum(dy g) - sum(dy g x)) rstd^3 / N, may lose by cancellation (m, N)."""
    h, ra2 = rules.chain(rows.x.shape[1]), ra * ra
    s = (wd_abs * rows.x_abs).mean(1, keepdim=True)
    offset = rows.x_abs
    if rows.mean is not None:
        m = rows.mean.abs()
        s.addcmul_(m, a2)
        offset = offset + m
    lost = ra2.mul(s).mul_(rules.gam(h + 8))  # times |x - mean| ra = |xhat| (1 + al), and 8 u |mean| ra more
    per_offset = lost * ra * (8 * rules.u) + ra2 * c1a * (4 * rules.u)
    return (rows.xh_abs * (lost * (ra / rows.rstd))).addcmul_(offset, per_offset)


def _gradient_sums(
    rules: Rules, rows: Rows, dy_abs: Tensor, xh_abs: Tensor, xa: Tensor, ux: Tensor, given: StatisticsBound
) -> GradientSums:
    shift = ux  # what every term may be off by
    if given is not EXACT:
        shift = (xh_abs * given.al).add_(ux if given.d is None else (1 + given.al) * given.d + ux)
    if rules.model.bwd_form == "raw":
        offset = rows.x_abs if rows.mean is None else rows.x_abs + rows.mean.abs()
        shift = shift + offset * ((1 + given.al) * rows.rstd * (4 * rules.u))
    return GradientSums((dy_abs * xa).sum(0), (dy_abs * shift).sum(0), dy_abs.sum(0))


def output_dw(rules: Rules, m: int, dw: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of dw (N,), summed over all ``m`` rows; partial sums must stay in the accumulation format."""
    summation = sums.dy_xhat * rules.gam(rules.chain(m) + rules.count["dw"])
    e = (summation + sums.dy_shift).add_(2 * m * rules.eta)
    if doubt is not None:
        e += doubt
    stored = store(rules, dw.abs() + e, fmt, "dw")

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(e)
        bits = ones * 0 if doubt is None else doubt
        named = {"store": stored * ones, "sum over M": summation, rules.doubt: bits}
        return {**named, "statistics": sums.dy_shift, "underflow": 2 * m * rules.eta * ones}

    return Bound((e + stored).mul_(rules.safety).clamp_(min=NO_ROOM), None, terms)


def output_db(rules: Rules, m: int, db: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of db (N,), summed over all ``m`` rows."""
    summation = sums.dy_abs * rules.gam(rules.chain(m) + rules.count["db"])
    e = summation + 2 * m * rules.eta
    if doubt is not None:
        e += doubt
    stored = store(rules, db.abs() + e, fmt, "db")

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(e)
        bits = ones * 0 if doubt is None else doubt
        named = {"store": stored * ones, "sum over M": summation, rules.doubt: bits}
        return {**named, "underflow": 2 * m * rules.eta * ones}

    return Bound((e + stored).mul_(rules.safety).clamp_(min=NO_ROOM), None, terms)
