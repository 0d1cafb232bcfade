"""Ops that norm groups of channels: expected values and bounds.

    y = a((x - mean) * rstd * weight + bias)

of x (B, C, L), with the mean and rstd of each group of channels of a sample, and the weight and the bias of each
channel. So a group is a row here, with a weight that is constant along L, and dw and db are sums over samples and L.

What follows the norm is a convention, keys of a model: the ``activation`` is none or silu. With silu, the ``rounding``
to the dtype of x happens once, at the store of y, or the norm is rounded as well before silu is applied to it, and so
is the gradient that comes back through silu.

silu's slope is at most SLOPE, and changes by at most half of what its argument does. So an error of the norm makes one
of y, and of the cotangent that the norm's own gradients are linear in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import Format
from normcheck.cases.op import Op
from normcheck.oracle import backward_bounds, forward_bounds, reference
from normcheck.oracle.activation import EACH, SILU, Activated, activated
from normcheck.oracle.backward_bounds import Block, Doubt, GradientSums, moved_dx, xhat_at_most
from normcheck.oracle.casting import rounded
from normcheck.oracle.forward_bounds import StatisticsBound, YBound
from normcheck.oracle.reference import Forward, Grouping, Rows, Scale
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, plus_store, store

SLOPE = 1.1
"""Above the largest slope of silu, 1.0998 at 2.4."""

_CURVATURE = 0.5
"""The largest |second derivative| of silu, at 0."""


def normalised(op: Op, rules: Rules, case: Case, x: Tensor) -> tuple[Rows, StatisticsBound]:
    """The rows of ``x`` (m, N) in fp64, one for each group, and the bounds of their statistics.

    What a kernel does not declare is read as the plain norm.
    """
    silu, narrow = rules.model.activation == SILU, case.dtype != rules.model.accumulate
    grouping = Grouping(case.split, silu, silu and narrow and rules.model.rounding == EACH)
    rows = reference.normalise(op, x.reshape(-1, case.split.columns), case.eps)
    return replace(rows, grouping=grouping), forward_bounds.statistics(rules, rows, case.eps)


@dataclass(frozen=True)
class _Norm:
    """What silu is applied to, shaped as the rows: a correct kernel's is within ``off`` of ``z``."""

    z: Tensor
    off: Tensor


def output_y(
    op: Op, rules: Rules, rows: Rows, scale: Scale, bias: Tensor | None, given: StatisticsBound, io: Format, fmt: Format
) -> tuple[Forward, YBound]:
    """y (m, N) and its bound, of the rows of a block; ``scale``, ``bias`` (C,) in fp64; y is stored in ``fmt``."""
    of = _of(rows)
    factor, shift = _factors(rows, scale, bias)
    fwd = reference.forward(op, rows, factor.g, shift, {})
    size = None if shift is None else shift.abs()
    shaped = _shaped(rows)
    if not of.silu:
        bound = forward_bounds.output_y(rules, rows, fwd, factor, size, given, fmt)
        z = shaped(fwd.z)
        whole = Bound(shaped(bound.y.upper), None, lambda: {n: shaped(t) for n, t in bound.y.terms().items()})
        return Forward(z, z, z), YBound(shaped(bound.before_store), whole)
    norm = _norm(rules, rows, fwd, forward_bounds.before_store(rules, rows, fwd, fwd.z.abs(), factor, size, given), io)
    by = activated(rules, norm.z, SILU, norm.off)
    moved = torch.minimum(norm.off * SLOPE, norm.off * (by.slope.abs() + _CURVATURE / 2 * norm.off))
    y, e = shaped(by.value), shaped(moved + by.off)
    upper = (plus_store(rules, e, y.abs(), fmt, "y") * rules.safety).clamp_(min=NO_ROOM)

    def terms() -> Mapping[str, Tensor]:
        own = store(rules, y.abs() + e, fmt, "y") * torch.ones_like(e)
        return {"store": own, "silu of the norm": shaped(moved), "silu": shaped(by.off)}

    return Forward(y, y, y), YBound(e, Bound(upper, None, terms))


def gradients(
    op: Op,
    rules: Rules,
    rows: Rows,
    given: StatisticsBound,
    scale: Scale,
    bias: Tensor | None,
    io: Format,
    m: int,
    dy: Tensor,
) -> tuple[Tensor, Bound, Block, Doubt | None, GradientSums]:
    """dx (m, N) of a block and its bound; what dw, db (C,) and their bounds are made of.

    ``dy`` (m, N) in fp64; ``m``: the elements of all blocks over which dw is summed.
    """
    dy = dy.reshape(rows.x.shape)
    factor, shift = _factors(rows, scale, bias)
    doubt = None
    if _of(rows).silu:
        dy, off = _through_silu(op, rules, rows, given, factor, shift, io, dy)
        grow = 1 + rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
        off = off * grow
        moved = moved_dx(rules, rows, off * factor.abs, given)
        doubt = Doubt(moved, rows.total(off * xhat_at_most(rows, given)), rows.total(off))
    part = Block(rows, reference.backward(op, rows, factor.g, dy), dy, given)
    bound, sums = backward_bounds.output_dx(rules, part, io, doubt)
    shaped = _shaped(rows)
    whole = Bound(shaped(bound.upper), None, lambda: {name: shaped(t) for name, t in bound.terms().items()})
    return shaped(part.backward.dx), whole, part, doubt, sums


def cotangent(op: Op, rules: Rules, rows: Rows, scale: Scale, bias: Tensor | None, dy: Tensor) -> Tensor:
    """What of ``dy``, shaped as the rows, reaches the norm, in fp64."""
    factor, shift = _factors(rows, scale, bias)
    if not _of(rows).silu:
        return dy
    return dy * activated(rules, reference.forward(op, rows, factor.g, shift, {}).z, SILU).slope


def sizes(op: Op, rows: Rows, scale: Scale, bias: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    """Output -> the sum of the magnitudes that make each element; ``dy`` (m, N)."""
    factor, shift = _factors(rows, scale, bias)
    xh, shaped = rows.xh_abs, _shaped(rows)
    dy = dy.reshape(xh.shape).abs() * (SLOPE if _of(rows).silu else 1.0)
    wd = dy * factor.abs
    dx = rows.rstd * (wd + xh * (xh * wd).mean(1, keepdim=True) + wd.mean(1, keepdim=True))
    y = xh * factor.abs + (0.0 if shift is None else shift.abs())
    assert rows.mean is not None
    of_rows = {"mean": rows.mean.abs(), "rstd": rows.rstd, "y": shaped(y), "dx": shaped(dx)}
    return {**of_rows, "dw": rows.total(dy * xh), "db": rows.total(dy)}


def _through_silu(
    op: Op,
    rules: Rules,
    rows: Rows,
    given: StatisticsBound,
    factor: Scale,
    shift: Tensor | None,
    io: Format,
    dy: Tensor,
) -> tuple[Tensor, Tensor]:
    """The cotangent of the norm, and how far a correct kernel's may be from it.

    The slope is off by its own error, and by what the norm is off; the product with dy is rounded, with ``each`` to the
    dtype of x.
    """
    fwd = reference.forward(op, rows, factor.g, shift, {})
    size = None if shift is None else shift.abs()
    norm = _norm(rules, rows, fwd, forward_bounds.before_store(rules, rows, fwd, fwd.z.abs(), factor, size, given), io)
    by: Activated = activated(rules, norm.z, SILU, norm.off)
    own, dy_abs = dy * by.slope, dy.abs()
    moved = (norm.off * _CURVATURE).clamp_(max=1 + SLOPE)
    off = dy_abs * (moved + by.slope_off) + own.abs() * rules.u + rules.eta * (1 + dy_abs)
    if _of(rows).each:
        off = off + store(rules, own.abs() + off, io, "dx")
    return own, off


def _norm(rules: Rules, rows: Rows, fwd: Forward, off: Tensor, io: Format) -> _Norm:
    """What silu is applied to; ``off``: the error of the norm before any store."""
    if not _of(rows).each:
        return _Norm(fwd.z, off)
    z, off = rounded(fwd.z, io), off + rules.eta  # a subnormal that was stored may be read as 0
    low, high = rounded(fwd.z - off, io), rounded(fwd.z + off, io)
    return _Norm(z, torch.maximum(high - z, z - low))


def _factors(rows: Rows, scale: Scale, bias: Tensor | None) -> tuple[Scale, Tensor | None]:
    """The factors of xhat, and what is added to the products, shaped as the rows."""
    return Scale(rows.of_channels(scale.g)), None if bias is None else rows.of_channels(bias)


def _shaped(rows: Rows) -> Callable[[Tensor], Tensor]:
    """Makes the rows of the case of what is shaped as ``rows``."""
    return lambda t: t.reshape(-1, rows.groups * rows.x.shape[1])


def _of(rows: Rows) -> Grouping:
    assert rows.grouping is not None
    return rows.grouping
