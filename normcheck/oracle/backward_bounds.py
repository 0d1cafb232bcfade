"""Bounds of dx, dw and db, which include the errors of the forward's statistics."""

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
class Block:
    """The backward of a block of rows: the reference's, for the cotangent ``dy`` (m, N).

    ``given``: the errors of the statistics that a kernel computes it with.
    """

    rows: Rows
    backward: Backward
    dy: Tensor
    given: StatisticsBound


@dataclass(frozen=True, slots=True)
class GradientSums:
    """This block's share of the sums over M behind the bounds of dw and db, each (N,)."""

    dy_xhat: Tensor  # sum |dy| * bound of |xhat|
    dy_shift: Tensor  # sum |dy| * error of xhat by underflow and by the errors of the statistics
    dy_abs: Tensor  # sum |dy|


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far correct kernels may differ in a block's dx (m, N), and in its share of dw and db (N,).

    Those of a clamped op differ in bits in doubt, those of an op that rounds xhat in roundings to the io dtype.
    """

    dx: Tensor
    dw: Tensor
    db: Tensor


def doubted(rules: Rules, rows: Rows, dy: Tensor, scale: Scale, given: StatisticsBound, m: int) -> Doubt:
    """The doubt of a clamped op. ``dy``: the cotangent (m, N), 0 if its bit is not in doubt. ``m``: rows of all blocks.

    The gradients are linear in dy, so each element in doubt changes them by its own share, roundings included.
    """
    grow = 1 + rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
    dy_abs = dy.abs() * grow
    dx = moved_dx(rules, rows, dy_abs * scale.abs, given)
    return Doubt(dx, (dy_abs * _xhat_at_most(rows, given)).sum(0), dy_abs.sum(0))


def moved_dx(rules: Rules, rows: Rows, wd: Tensor, given: StatisticsBound) -> Tensor:
    """The largest change of dx (m, N) if each dy * g changes by up to ``wd`` (m, N) >= 0."""
    xa = _xhat_at_most(rows, given)
    c1, c2 = (xa * wd).mean(1, keepdim=True), wd.mean(1, keepdim=True)
    return (wd + xa * c1 + (c2 if rules.centered else 0.0)) * ((1 + given.al) * rows.rstd)


def _xhat_at_most(rows: Rows, given: StatisticsBound) -> Tensor:
    """Bound of the kernel's own |xhat|, (m, N)."""
    if given is EXACT:
        return rows.xh_abs
    return (rows.xh_abs if given.d is None else rows.xh_abs + given.d) * (1 + given.al)


@dataclass(frozen=True, slots=True)
class _Largest:
    """Bounds of the absolute values that the kernel computes dx from."""

    xhat: Tensor  # (m, N)
    rstd: Tensor  # (m, 1)
    wd: Tensor  # dy * g, (m, N)
    wd_mean: Tensor  # (m, 1)
    flushed: Tensor  # error of xhat by underflow, (m, 1)
    xhat_squared: Tensor | float  # the factor by errors of rstd on terms with xhat in them twice


@dataclass(frozen=True, slots=True)
class _Means:
    """``c1`` = |mean(xhat dy g)| and ``c2`` = |mean(dy g)|, 0 if the op has none; ``dc1``, ``dc2``: their errors.

    ``largest_c1``: bound of ``c1`` with the errors of the statistics. All (m, 1).
    """

    c1: Tensor
    largest_c1: Tensor
    dc1: Tensor
    c2: Tensor | float
    dc2: Tensor | float


def output_dx(rules: Rules, block: Block, fmt: Format, doubt: Doubt | None = None) -> tuple[Bound, GradientSums]:
    """Bound of dx (m, N), stored in ``fmt``, and the block's share of the sums behind the bounds of dw and db.

    End to end the kernel's xhat is rho (xhat - delta) with |rho - 1| <= al, |delta| <= d, which gives the extra terms
    exactly; with given statistics, al = d = 0.
    """
    rows, bwd, given = block.rows, block.backward, block.given
    u, eta, xa, ra, wd_abs = rules.u, rules.eta, _xhat_at_most(rows, given), (1 + given.al) * rows.rstd, bwd.wd.abs()
    most = _Largest(xa, ra, wd_abs, wd_abs.mean(1, keepdim=True), eta * (1 + ra), (1 + given.al) ** 2)
    means = _means(rules, block, most)
    k_el = rules.count["dx_elementwise"] * u
    per_row = means.dc2 * (1 + 8 * u) + k_el * means.c2 + means.largest_c1 * most.flushed + 5 * eta
    edx = (xa * (means.dc1 * (1 + 8 * u) + k_el * means.largest_c1)).add_(wd_abs * k_el)
    edx.add_(per_row).mul_(ra).add_(eta)
    if given is not EXACT:
        _add_statistics(edx, block, most, means)
    if rules.model.bwd_form == "raw":
        edx += _raw_dx(rules, rows, most, means)
    if doubt is not None:
        edx += doubt.dx
    sums = _gradient_sums(rules, block, most)
    stored = store(rules, bwd.dx.abs() + edx, fmt, "dx")
    upper = edx + stored if rules.safety == 1.0 else (edx + stored) * rules.safety
    return Bound(upper, None, lambda: _dx_terms(rules, most, means, edx, stored, doubt)), sums


def _means(rules: Rules, block: Block, most: _Largest) -> _Means:
    """The two means over each row. Their errors go into every element of the row."""
    eta, count, bwd, al, d = rules.eta, rules.count, block.backward, block.given.al, block.given.d
    h = rules.chain(block.dy.shape[1])
    dc1 = (most.xhat * most.wd).mean(1, keepdim=True).mul_(rules.gam(h + count["c1"]))
    xa_mean = (1 + al) * (1.01 if d is None else 1.01 + d)  # mean |xhat| <= 1, the square being normalised
    dc1.addcmul_(most.wd_mean, most.flushed).add_(xa_mean * eta + 3 * eta)
    c1 = bwd.c1.abs()
    largest_c1 = c1 * most.xhat_squared
    if bwd.c2 is None:
        return _Means(c1, largest_c1, dc1, 0.0, 0.0)
    c2 = bwd.c2.abs()
    if d is not None:
        largest_c1 = largest_c1 + most.xhat_squared * d * c2
    return _Means(c1, largest_c1, dc1, c2, most.wd_mean * rules.gam(h + count["c2"]) + 3 * eta)


def _add_statistics(edx: Tensor, block: Block, most: _Largest, means: _Means) -> None:
    """Add the error of dx by the errors of the kernel's own statistics to ``edx``."""
    c1, c2, k2, d = means.c1, means.c2, most.xhat_squared, block.given.d
    per_xh = (k2 - 1) * c1
    edx += block.backward.dx.abs() * block.given.al
    if d is not None:
        per_xh = per_xh + k2 * d * c2
        edx += most.rstd * k2 * d * (c1 + d * c2)
    edx += block.rows.xh_abs * (most.rstd * per_xh)


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
    """Error by cancellation of dx = rstd wd + b x + c, b = (mean sum(dy g) - sum(dy g x)) rstd^3 / N, (m, N)."""
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


def _gradient_sums(rules: Rules, block: Block, most: _Largest) -> GradientSums:
    rows, given, dy_abs = block.rows, block.given, block.dy.abs()
    shift = ux = most.flushed  # error of each xhat
    if given is not EXACT:
        shift = (rows.xh_abs * given.al).add_(ux if given.d is None else (1 + given.al) * given.d + ux)
    if rules.model.bwd_form == "raw":
        offset = rows.x_abs if rows.mean is None else rows.x_abs + rows.mean.abs()
        shift = shift + offset * ((1 + given.al) * rows.rstd * (4 * rules.u))
    return GradientSums((dy_abs * most.xhat).sum(0), (dy_abs * shift).sum(0), dy_abs.sum(0))


def output_dw(rules: Rules, m: int, dw: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of dw (N,), summed over ``m`` rows, for kernels that keep partial sums in the accumulation format."""
    return _summed(rules, m, "dw", dw, _Added(sums.dy_xhat, sums.dy_shift, doubt), fmt)


def output_db(rules: Rules, m: int, db: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of db (N,), summed over ``m`` rows."""
    return _summed(rules, m, "db", db, _Added(sums.dy_abs, None, doubt), fmt)


@dataclass(frozen=True, slots=True)
class _Added:
    """Behind the bound of a sum, (N,): ``size``, the sum of |terms|; ``shift``, its error by errors of the terms."""

    size: Tensor
    shift: Tensor | None
    doubt: Tensor | None


def _summed(rules: Rules, m: int, output: str, value: Tensor, added: _Added, fmt: Format) -> Bound:
    """Bound of the sum over ``m`` rows that is ``value``."""
    shift, doubt = added.shift, added.doubt
    summation = added.size * rules.gam(rules.chain(m) + rules.count[output])
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
