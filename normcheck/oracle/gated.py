"""Ops that multiply by the activation a of a gate: expected values and bounds.

What is computed is a convention, keys of a model. The ``gate`` comes

    after   y = xhat * weight * a(gate): Qwen3-Next, fla
    before  h = x * a(gate), y = rmsnorm(h) * weight: Mamba2, Nemotron-H

the ``activation`` is silu or sigmoid, and the mean is taken over the row, or over each ``group`` of so many columns,
which are then rows of their own here. The ``rounding`` to the dtype of x happens once, at the store of y, or after each
step: xhat, its product with the weight, and that with the gate. With the gate before the norm, Hugging Face's Mamba2
keeps the product with the gate in fp32 even so, and ``round_gated`` says whether a kernel does. One that rounds that
product and y alone, as an activation and a norm in two kernels do, declares it: nobody looks for it.

After the norm, the gate is one more factor of xhat, so y has the bound of a norm whose weight is weight * a, and what
an error of a makes of it. Before it, the rows that are normed are off by an error of a: as with a sum that is not the
stored one, every xhat may be anywhere within that, wherever it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.op import Op
from normcheck.oracle import backward_bounds, casting, forward_bounds, reference
from normcheck.oracle.activation import BEFORE, EACH, IO, NONE, SILU, Gating, activated, with_limits
from normcheck.oracle.backward_bounds import Block, Doubt, between_sums, moved_dx, xhat_at_most
from normcheck.oracle.casting import Cast, rounded
from normcheck.oracle.forward_bounds import StatisticsBound, YBound
from normcheck.oracle.reference import Forward, Rows, Scale
from normcheck.oracle.rounding import FLT_MAX, NO_ROOM, Bound, Rules, plus_store, store
from normcheck.oracle.tolerances import Model

_UNSTORED = FORMATS["fp32"]


def group_of(case: Case, model: Model) -> int:
    """The columns over which a mean is taken: those of a row, if groups do not fill it, or are left open."""
    group = model.group
    return group if isinstance(group, int) and group and case.N % group == 0 else case.N


def groups_of(op: Op, case: Case, model: Model) -> int:
    """How many rows are normed for each row of the case: groups of columns, or of channels, or heads."""
    return case.split.groups if op.grouped or op.rotary else case.N // group_of(case, model)


def why_no_groups(case: Case, model: Model) -> str:
    """Why a row of the case cannot be cut into groups; "" if it can."""
    group = model.group
    cut = not (isinstance(group, int) and group) or case.N % group == 0
    return "" if cut else f"N={case.N} is no multiple of group={group}, as declared"


def normalised(
    op: Op, rules: Rules, case: Case, x: Tensor, gate: Tensor, *, at_limits: bool = False
) -> tuple[Rows, StatisticsBound]:
    """The rows of ``x`` and ``gate`` (m, N) in fp64, one for each group of columns, and the bounds of their statistics.

    What a kernel does not declare is read as the most common. ``at_limits``: an infinite gate has the limits of its
    activation, not what z times sigmoid gives.
    """
    model, columns = rules.model, group_of(case, rules.model)
    x, gate = x.reshape(-1, columns), gate.reshape(-1, columns)
    name = SILU if model.activation == "any" else model.activation
    by = activated(rules, gate, name)
    by = with_limits(by, gate, name) if at_limits else by
    before, io = model.gate == BEFORE, FORMATS[case.dtype]
    rounds = io.name != model.accumulate
    each = rounds and model.rounding == EACH
    stores = rounds and before and (model.round_gated == IO or (each and model.round_gated != NONE))
    h, off = x, torch.zeros_like(x)
    if before:
        h = x * by.value
        off = x.abs() * by.off + h.abs() * rules.u + rules.eta * (1 + x.abs())
        off = torch.where(h == 0, 0.0, off)
        if stores:
            low, high = rounded(h - off, io), rounded(h + off, io)
            h = torch.where(torch.isfinite(h), rounded(h, io), h)
            off = _unless_over(torch.maximum(high - h, h - low), h.abs() + off, io.max)
        off = _unless_over(off, x.abs() * gate.abs().clamp(min=1.0), FLT_MAX / 4)  # x * z may come first
    rows = reference.normalise(op, h, case.eps)
    statistics = forward_bounds.statistics(rules, rows, case.eps, off if before else None)
    gating = Gating(by, case.N // columns, before, each, stores, x, off)
    return replace(rows, gating=gating), statistics


def output_y(
    rules: Rules, rows: Rows, scale: Scale, given: StatisticsBound, io: Format, fmt: Format
) -> tuple[Forward, YBound]:
    """y (m, N) and its bound, of the rows of a block; ``scale`` (N,); y is stored in ``fmt``."""
    gating = _of(rows)
    tiled = _tiled(scale, rows)
    if gating.before:
        found = _norm_last(rules, rows, tiled, given, io, fmt)
    elif gating.each:
        found = _each_product(rules, rows, tiled, scale.weight.dtype, given, io)
    else:
        found = _three_factors(rules, rows, tiled, given)
    y, bound = _stored(rules, found.of_shape((-1, rows.groups * rows.x.shape[1])), fmt, "y")
    return Forward(y, y, y), YBound(found.norm + found.activation, bound)


@dataclass(frozen=True)
class _Unstored:
    """A ``value``, shaped as the rows, and its error before the store: that of the ``norm``, and by the activation."""

    value: Tensor
    norm: Tensor
    activation: Tensor

    def of_shape(self, shape: tuple[int, ...] | torch.Size) -> _Unstored:
        """The same, shaped as the rows of the case."""
        return _Unstored(*(t.reshape(shape) for t in (self.value, self.norm, self.activation)))


def _three_factors(rules: Rules, rows: Rows, scale: Scale, given: StatisticsBound) -> _Unstored:
    """y = xhat * weight * a, rounded once, and its error before the store: one product more than without a gate."""
    gating = _of(rows)
    by, factor = gating.by, Scale(scale.g * gating.by.value)
    more = replace(rules, k_y=rules.k_y + rules.count["gated"])
    fwd = Forward(*[rows.xh * factor.g] * 3)
    before = forward_bounds.before_store(more, rows, fwd, fwd.z.abs(), factor, None, given)
    xhat = xhat_at_most(rows, given) * (1 + more.k_y * rules.u) + rules.eta * (1 + rows.rstd)
    own = xhat * scale.abs * by.off + rules.eta * (1 + xhat + by.value.abs())
    return _Unstored(fwd.y, before, own if factor.where is None else own * factor.where)


def _each_product(
    rules: Rules, rows: Rows, scale: Scale, weight: torch.dtype, given: StatisticsBound, io: Format
) -> _Unstored:
    """y = round(round(xhat) * weight) * a, and its error before the store: a is in fp32."""
    by = _of(rows).by
    p, low, high = _rounded_product(casting.cast(rules, rows, given, io), scale, weight, io)
    size, doubt = torch.maximum(-low, high), torch.maximum(high - p, p - low)
    y = p * by.value
    norm = doubt * by.value.abs() + (size * by.value.abs()).mul_(rules.u) + rules.eta * (1 + size)
    exact = (scale.g == 0) | (by.value == 0)
    return _Unstored(y, *(torch.where(exact, 0.0, part) for part in (norm, size * by.off)))


def _rounded_product(cast: Cast, scale: Scale, weight: torch.dtype, io: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The product of a rounded xhat and the weight, rounded to ``io``, with its least and its largest right value.

    A product with a wider weight has the wider dtype by promotion, so it may be rounded or not.
    """
    value, one, other = cast.value * scale.g, cast.low * scale.g, cast.high * scale.g
    exact = torch.minimum(one, other), torch.maximum(one, other)
    low, high = (rounded(end, io) for end in exact)
    if weight == torch.float32:
        return value, torch.minimum(low, exact[0]), torch.maximum(high, exact[1])
    return rounded(value, io), low, high


def _norm_last(rules: Rules, rows: Rows, scale: Scale, given: StatisticsBound, io: Format, fmt: Format) -> _Unstored:
    """y of gated rows, and its error before the store."""
    gating = _of(rows)
    off = gating.off * rows.rstd
    if gating.each:
        forward, bound = casting.output_y(rules, casting.cast(rules, rows, given, io, off), scale, fmt)
        return _Unstored(forward.y, bound.before_store, torch.zeros_like(forward.y))
    fwd = Forward(*[rows.xh * scale.g] * 3)
    before = forward_bounds.before_store(rules, rows, fwd, fwd.z.abs(), scale, None, given)
    return _Unstored(fwd.y, before, off * scale.abs * ((1 + given.al) * (1 + rules.k_y * rules.u)))


def gradients(
    op: Op, rules: Rules, rows: Rows, given: StatisticsBound, scale: Scale, io: Format, m: int, dy: Tensor
) -> tuple[tuple[Tensor, Bound], tuple[Tensor, Bound], Block, Doubt, backward_bounds.GradientSums]:
    """dx and dgate (m, N) of a block, each with its bound; and what dw and its bound are made of.

    ``dy`` (m, N) in fp64; ``m``: rows of all blocks.
    """
    shape, dy = dy.shape, dy.reshape(rows.x.shape)
    make = _through_gate if _of(rows).before else _through_norm
    dx, dgate, block, doubt, sums = make(op, rules, rows, given, scale, io, m, dy)
    both = (_stored(rules, found.of_shape(shape), io, "dx") for found in (dx, dgate))
    return next(both), next(both), block, doubt, sums


_Ends = tuple[_Unstored, _Unstored, Block, Doubt, backward_bounds.GradientSums]


def _through_norm(
    op: Op, rules: Rules, rows: Rows, given: StatisticsBound, scale: Scale, io: Format, m: int, dy: Tensor
) -> _Ends:
    """The gate after the norm: dy * a is the norm's cotangent, and dgate = dy * xhat * weight * slope."""
    gating, u, eta = _of(rows), rules.u, rules.eta
    by, tiled = gating.by, _tiled(scale, rows)
    own, size = dy * by.value, dy.abs()
    off = size * (by.off + u * by.value.abs()) + eta * (1 + size)
    part = Block(rows, reference.backward(op, rows, tiled.g, own), own, given)
    grow = 1 + rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
    normed, xhat, grown = rows.xh * tiled.g, xhat_at_most(rows, given), 1 + given.al
    per_xh = grown * (1 + (rules.count["xhat"] + 1) * u) - 1
    apart = tiled.abs * (rows.xh_abs * per_xh + eta * (1 + rows.rstd * grown))
    if gating.each:
        off = off + store(rules, own.abs() + off, io, "dx")
        cast = casting.cast(rules, rows, given, io)
        part, doubt = casting.gradients(rules, part, cast, io, m, None, off, tiled.abs)
        _, low, high = _rounded_product(cast, tiled, scale.weight.dtype, io)
        apart = torch.maximum(apart, torch.maximum((high - normed).abs(), (normed - low).abs()))
    else:
        moved = moved_dx(rules, rows, off * tiled.abs * grow, given)
        total = rows.total(off * xhat * grow)
        doubt = Doubt(moved, total, torch.zeros_like(total))
    bound, sums = backward_bounds.output_dx(rules, part, _UNSTORED, doubt)
    dx = _Unstored(part.backward.dx, bound.upper / rules.safety - doubt.dx, doubt.dx)
    value, most = dy * normed * by.slope, normed.abs() + apart
    of_norm = size * by.slope.abs() * apart + value.abs() * (rules.count["dgate"] * u) + eta * (1 + size + most)
    return dx, _Unstored(value, of_norm, size * most * by.slope_off), part, doubt, sums


def _through_gate(
    op: Op, rules: Rules, rows: Rows, given: StatisticsBound, scale: Scale, io: Format, m: int, dy: Tensor
) -> _Ends:
    """The gate before the norm: with dh the norm's own, dx = dh * a and dgate = dh * x * slope."""
    gating, u, eta = _of(rows), rules.u, rules.eta
    by, tiled, off = gating.by, _tiled(scale, rows), gating.off * rows.rstd
    part = Block(rows, reference.backward(op, rows, tiled.g, dy), dy, given)
    if gating.each:
        part, doubt = casting.gradients(rules, part, casting.cast(rules, rows, given, io, off), io, m, off)
    else:
        doubt = between_sums(rows, part.backward, dy, off)
    bound, sums = backward_bounds.output_dx(rules, part, _UNSTORED, doubt)
    dh, e = part.backward.dx, bound.upper / rules.safety
    if gating.stores:
        e = _unless_over(e + store(rules, dh.abs() + e, io, "dx"), dh.abs() + e, io.max)
    most, size, count = dh.abs() + e, gating.x.abs(), rules.count
    value = dh * by.value
    dx = _Unstored(value, e * by.value.abs() + value.abs() * (count["gated"] * u) + eta * (1 + most), most * by.off)
    value = dh * gating.x * by.slope
    of_norm = size * e * by.slope.abs() + value.abs() * (count["dgate"] * u) + eta * (1 + size + most)
    of_norm = _unless_over(of_norm, size * most, FLT_MAX / 4)
    return dx, _Unstored(value, of_norm, size * most * by.slope_off), part, doubt, sums


def _unless_over(bound: Tensor, size: Tensor, limit: float) -> Tensor:
    """``bound``, infinite where a kernel's own product, at most ``size``, may be above ``limit``, and so infinite."""
    return torch.where(size > limit, torch.inf, bound)


def sizes(rows: Rows, scale: Scale, dy: Tensor) -> dict[str, Tensor]:
    """Output -> the sum of the magnitudes that make each element; ``dy`` (m, N)."""
    gating, tiled, shape = _of(rows), _tiled(scale, rows), dy.shape
    a, slope, xh, dy = gating.by.value.abs(), gating.by.slope.abs(), rows.xh_abs, dy.abs().reshape(rows.x.shape)
    after = 1.0 if gating.before else a
    wd = dy * tiled.abs * after
    dh = rows.rstd * (wd + xh * (xh * wd).mean(1, keepdim=True))
    found = {
        "y": xh * tiled.abs * after,
        "dx": dh * a if gating.before else dh,
        "dgate": slope * (dh * gating.x.abs() if gating.before else dy * xh * tiled.abs),
    }
    if gating.stores:  # dh is rounded to the dtype of x as well, and infinite in it where the product with x is not
        found |= {name: torch.maximum(found[name], dh) for name in ("dx", "dgate")}
    return {name: t.reshape(shape) for name, t in found.items()} | {
        "rstd": rows.rstd,
        "dw": rows.total(dy * after * xh),
    }


def _stored(rules: Rules, found: _Unstored, fmt: Format, output: str) -> tuple[Tensor, Bound]:
    """A value and its bound, stored in ``fmt``."""
    value, e = found.value, found.norm + found.activation
    upper = (plus_store(rules, e, value.abs(), fmt, output) * rules.safety).clamp_(min=NO_ROOM)

    def terms() -> Mapping[str, Tensor]:
        own = store(rules, value.abs() + e, fmt, output) * torch.ones_like(e)
        return {"store": own, "norm": found.norm, "activation": found.activation}

    return value, Bound(upper, None, terms)


def _of(rows: Rows) -> Gating:
    assert rows.gating is not None
    return rows.gating


def _tiled(scale: Scale, rows: Rows) -> Scale:
    """The factors of the columns of each of ``rows``, (m, N)."""
    groups, columns = rows.groups, rows.x.shape[1]
    return Scale(scale.g.view(groups, columns).repeat(rows.x.shape[0] // groups, 1))
