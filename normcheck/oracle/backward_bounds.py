"""Bounds of dx, dw and db, which include the errors of the forward's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.oracle.forward_bounds import EXACT, StatisticsBound
from normcheck.oracle.reference import Backward, Rows, Scale
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, plus_store, store


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
    return Doubt(dx, rows.total(dy_abs * xhat_at_most(rows, given)), rows.total(dy_abs))


def by_lone_weight(rules: Rules, block: Block, alone: Tensor, m: int, off: Tensor | None, doubt: Doubt | None) -> Doubt:
    """``doubt``, and that of a kernel whose dy * g is dy + dy * weight; ``alone``: |weight|. The rest as in ``doubted``
    and ``moved_dx``.
    """
    rows, dy = block.rows, block.dy
    grow = 1 + rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
    dx = moved_dx(rules, rows, dy.abs() * alone * (grow * rules.alone), block.given, off)
    if doubt is None:
        none = torch.zeros_like(block.backward.db)
        return Doubt(dx, none, none)
    return replace(doubt, dx=doubt.dx + dx)


def moved_dx(rules: Rules, rows: Rows, wd: Tensor, given: StatisticsBound, off: Tensor | None = None) -> Tensor:
    """The largest change of dx (m, N) if each dy * g changes by up to ``wd`` (m, N) >= 0.

    ``off`` (m, N): how far the xhat that is used may be from that of ``rows``, the error of the statistics apart.
    """
    xa = xhat_at_most(rows, given)
    if off is not None:
        xa = xa + off * (1 + given.al)
    c1, c2 = (xa * wd).mean(1, keepdim=True), wd.mean(1, keepdim=True)
    return (wd + xa * c1 + (c2 if rules.centered else 0.0)) * ((1 + given.al) * rows.rstd)


def xhat_at_most(rows: Rows, given: StatisticsBound) -> Tensor:
    """Bound of the kernel's own |xhat|, (m, N)."""
    if given is EXACT:
        return rows.xh_abs
    if given.d is None:
        return rows.xh_abs * (1 + given.al)
    return (rows.xh_abs + given.d).mul_(1 + given.al)


@dataclass(frozen=True, slots=True)
class _Largest:
    """Bounds of the absolute values that the kernel computes dx from."""

    grown: Tensor | float  # 1 + al, (m, 1): xhat is at most (|xhat| + d) times this
    rstd: Tensor  # (m, 1)
    wd: Tensor  # dy * g, (m, N)
    wd_mean: Tensor  # (m, 1)
    flushed: Tensor  # error of xhat by underflow, (m, 1)


@dataclass(frozen=True, slots=True)
class _Means:
    """The means of a row, all (m, 1): ``c1``, a bound of |mean(xhat dy g)|; ``c2`` = |mean(dy g)|, None if not centred.

    ``more_c1``: the part of ``c1`` by the errors of the statistics, None if they are exact. ``dc1``, ``dc2``: errors of
    the two means.
    """

    c1: Tensor
    more_c1: Tensor | None
    dc1: Tensor
    c2: Tensor | None
    dc2: Tensor | None


def output_dx(rules: Rules, block: Block, fmt: Format, doubt: Doubt | None = None) -> tuple[Bound, GradientSums]:
    """Bound of dx (m, N), stored in ``fmt``, and the block's share of the sums behind the bounds of dw and db.

    End to end the kernel's xhat is rho (xhat - delta) with |rho - 1| <= al, |delta| <= d, which gives the extra terms
    exactly; with given statistics, al = d = 0.
    """
    rows, bwd, given = block.rows, block.backward, block.given
    wd_abs, grown = bwd.wd.abs(), 1 + given.al
    rstd = rows.rstd if given is EXACT else grown * rows.rstd
    flushed = (rstd * rules.eta).add_(rules.eta)
    most = _Largest(grown, rstd, wd_abs, wd_abs.mean(1, keepdim=True), flushed)
    means, dx_abs = _means(rules, block, most), bwd.dx.abs()
    edx = _dx_before_store(rules, block, most, means, dx_abs)
    if doubt is not None:
        edx += doubt.dx
    sums = _gradient_sums(rules, block, most)
    upper = plus_store(rules, edx, dx_abs, fmt, "dx")
    if rules.safety != 1.0:
        upper *= rules.safety
    return Bound(upper, None, lambda: _dx_terms(rules, block, most, means, edx, fmt, doubt)), sums


def between_sums(rows: Rows, backward: Backward, dy: Tensor, off: Tensor) -> Doubt:
    """The doubt of a backward whose xhat is anywhere within ``off`` (m, N) of that of ``rows``, wherever it is used.

    Of an op that adds a residual: the derivative of a norm of mixed sums has the one xhat in the mean, and the other
    one before it.
    """
    shifted_c1 = (off * backward.wd.abs()).mean(1, keepdim=True)
    dx = rows.rstd * (off * backward.c1.abs() + (rows.xh_abs + off) * shifted_c1)
    return Doubt(dx, rows.total(dy.abs() * off), torch.zeros_like(backward.db))


@dataclass(frozen=True, slots=True)
class Added:
    """The cotangent of residual_out, which is added to the norm's own dx: ``dresidual_out`` (m, N) in fp64.

    ``io``, ``residual``: the formats of x and of the residual. ``off``: how far the backward's xhat (m, N) may be from
    the forward's, if these may have different sums; else None.
    """

    dresidual_out: Tensor
    io: Format
    residual: Format
    off: Tensor | None


def plus_residual(rules: Rules, own: Bound, rows: Rows, backward: Backward, added: Added) -> tuple[Bound, Bound]:
    """Bounds of dx + dresidual_out (m, N), in the format of x and in that of the residual.

    ``own``: the bound of the norm's dx, that of ``backward``, before any store. That dx may be rounded to the io dtype
    before it is added: so it is if autograd adds up the gradients of two functions. Within one function, autograd adds
    dresidual_out to one gradient of the sum after another: ``dresidual`` counts the roundings of these partial sums.
    """
    e = own.upper if rules.safety == 1.0 else own.upper / rules.safety
    dx = backward.dx
    parts = backward.wd.abs() + (rows.xh * backward.c1).abs() + (0.0 if backward.c2 is None else backward.c2.abs())
    partial = added.dresidual_out.abs() + rows.rstd * parts
    before = e + store(rules, dx.abs() + e, added.io, "dx")
    if added.off is not None:  # autograd may add up the gradients of the stored sum, and of that alone, in its dtype
        of_stored = rows.rstd * backward.wd
        once = e + store(rules, of_stored.abs() + e, added.residual, "dx")
        both = (of_stored + added.dresidual_out).abs() + once
        before = before + (once - e) + store(rules, both, added.residual, "dx")
        before = torch.where(torch.maximum(once + of_stored.abs(), both) > added.residual.max, math.inf, before)
    before = before + (partial + before) * rules.gam(rules.count["dresidual"]) + rules.eta
    size = (dx + added.dresidual_out).abs()

    def stored(fmt: Format) -> Bound:
        def terms() -> Mapping[str, Tensor]:
            ones = torch.ones_like(before)
            own_store = store(rules, size + before, fmt, "dx") * ones
            return {**own.terms(), "store": own_store, "sum with dresidual_out": before - e}

        upper = plus_store(rules, before, size, fmt, "dx")
        return Bound(upper if rules.safety == 1.0 else upper * rules.safety, None, terms)

    of_x = stored(added.io)
    return of_x, of_x if added.residual == added.io else stored(added.residual)


def _means(rules: Rules, block: Block, most: _Largest) -> _Means:
    """The two means over each row. Their errors go into every element of the row."""
    eta, count, bwd, d = rules.eta, rules.count, block.backward, block.given.d
    h = rules.chain(block.dy.shape[1])
    dc1 = (block.rows.xh_abs * most.wd).mean(1, keepdim=True)
    if d is not None:
        dc1.addcmul_(d, most.wd_mean)  # times ``grown``: the mean of |dy g| times the largest xhat
    dc1.mul_(rules.gam(h + count["c1"]))
    if d is not None:
        dc1.add_(d, alpha=eta)
    dc1.add_(1.01 * eta)  # mean |xhat| <= 1, the square being normalised
    dc1.mul_(most.grown).addcmul_(most.wd_mean, most.flushed).add_(3 * eta)
    c1 = bwd.c1.abs()
    c2, dc2 = None, None
    if bwd.c2 is not None:
        c2, dc2 = bwd.c2.abs(), (most.wd_mean * rules.gam(h + count["c2"])).add_(3 * eta)
    if block.given is EXACT:
        return _Means(c1, None, dc1, c2, dc2)
    twice = most.grown * most.grown  # for xhat in it twice
    more_c1 = (twice - 1) * c1
    if d is not None and c2 is not None:
        more_c1.addcmul_(twice * d, c2)
    return _Means(c1 + more_c1, more_c1, dc1, c2, dc2)


def _dx_before_store(rules: Rules, block: Block, most: _Largest, means: _Means, dx_abs: Tensor) -> Tensor:
    """E of dx (m, N): |xhat|, |dy g| and 1, each times the sum of its factors in the errors of a row."""
    rows, given, u, eta = block.rows, block.given, rules.u, rules.eta
    d, k_el = given.d, rules.count["dx_elementwise"] * u
    per_xh = (means.dc1 * (1 + 8 * u)).add_(means.c1, alpha=k_el)
    per_row = means.c1 * most.flushed
    if means.c2 is not None and means.dc2 is not None:
        per_row.add_(means.dc2, alpha=1 + 8 * u).add_(means.c2, alpha=k_el)
    per_row.add_(5 * eta)
    if means.more_c1 is not None:
        per_xh.mul_(most.grown)
        if d is not None:
            per_row.addcmul_(d, per_xh + means.c1)
        per_xh.add_(means.more_c1)
    per_xh.mul_(most.rstd)
    per_row.mul_(most.rstd).add_(eta)
    raw = _raw_dx(rules, rows, most, means) if rules.model.bwd_form == "raw" else None
    if raw is not None:
        per_xh.addcmul_(raw.lost, most.grown if isinstance(most.grown, Tensor) else torch.ones_like(raw.lost))
        if rows.mean is not None:
            per_row.addcmul_(raw.per_offset, rows.mean.abs())
    edx = (rows.xh_abs * per_xh).addcmul_(most.wd, most.rstd * k_el).add_(per_row)
    if raw is not None:
        edx.addcmul_(rows.x_abs, raw.per_offset)
    if isinstance(given.al, Tensor):
        edx.addcmul_(dx_abs, given.al)
    return edx


def _dx_terms(
    rules: Rules, block: Block, most: _Largest, means: _Means, edx: Tensor, fmt: Format, doubt: Doubt | None
) -> Mapping[str, Tensor]:
    """The parts of the bound of dx, by name."""
    ones, eta, k_el = torch.ones_like(edx), rules.eta, rules.count["dx_elementwise"] * rules.u
    xhat = xhat_at_most(block.rows, block.given)
    c2, dc2 = (0.0 if t is None else t for t in (means.c2, means.dc2))
    c1_term, c2_term = most.rstd * means.dc1 * xhat, most.rstd * dc2 * ones
    ops = (most.wd + xhat * means.c1 + c2).mul_(k_el).mul_(most.rstd)
    rest = (edx - c1_term - c2_term - ops - eta).clamp_(min=0)
    stored = store(rules, block.backward.dx.abs() + edx, fmt, "dx")
    named = {"store": stored * ones, "mean(xhat dy g)": c1_term, "mean(dy g)": c2_term, "ops": ops}
    if doubt is not None:
        named[rules.doubt] = doubt.dx
        rest = (rest - doubt.dx).clamp_(min=0)
    return {**named, "statistics": rest, "underflow": eta * ones}


@dataclass(frozen=True, slots=True)
class _Raw:
    """The error by cancellation of dx = rstd wd + b x + c, b = (mean sum(dy g) - sum(dy g x)) rstd^3 / N.

    It is at most ``lost`` times |xhat| (1 + al) plus ``per_offset`` times |x| + |mean|; both (m, 1).
    """

    lost: Tensor
    per_offset: Tensor


def _raw_dx(rules: Rules, rows: Rows, most: _Largest, means: _Means) -> _Raw:
    ra = most.rstd
    h, ra2 = rules.chain(rows.x.shape[1]), ra * ra
    s = (most.wd * rows.x_abs).mean(1, keepdim=True)
    if rows.mean is not None:
        s.addcmul_(rows.mean.abs(), most.wd_mean)
    lost = s.mul_(ra2).mul_(rules.gam(h + 8))  # times |x - mean| ra = |xhat| (1 + al), and 8 u |mean| ra more
    return _Raw(lost, (lost * ra).mul_(8 * rules.u).add_(ra2.mul_(means.c1), alpha=4 * rules.u))


def _gradient_sums(rules: Rules, block: Block, most: _Largest) -> GradientSums:
    rows, given, dy_abs = block.rows, block.given, block.dy.abs()
    shift = most.flushed  # error of each xhat
    if given is not EXACT:
        shift = (rows.xh_abs * given.al).add_(shift if given.d is None else most.grown * given.d + shift)
    if rules.model.bwd_form == "raw":
        of_channel = None if rows.grouping is None else rules.gam(rules.chain(rows.grouping.split.length) + 4)
        per_offset = most.rstd * (4 * rules.u if of_channel is None else of_channel)
        offset = rows.x_abs if rows.mean is None else rows.x_abs + rows.mean.abs()
        shift = (offset * per_offset).add_(shift)
    xhat = xhat_at_most(rows, given)
    return GradientSums(*map(rows.total, (dy_abs * xhat, dy_abs * shift, dy_abs)))


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
    underflow = 2 * m * rules.eta
    e = summation + underflow if shift is None else (summation + shift).add_(underflow)
    if doubt is not None:
        e += doubt
    upper = plus_store(rules, e, value.abs(), fmt, output)
    if rules.safety != 1.0:
        upper *= rules.safety
    if not m:
        upper.clamp_(min=NO_ROOM)

    def terms() -> Mapping[str, Tensor]:
        ones, stored = torch.ones_like(e), store(rules, value.abs() + e, fmt, output)
        bits = ones * 0 if doubt is None else doubt
        named = {"store": stored * ones, "sum over M": summation, rules.doubt: bits}
        if shift is not None:
            named["statistics"] = shift
        return {**named, "underflow": underflow * ones}

    return Bound(upper, None, terms)
