"""Ops that modulate: expected values and bounds.

    y = xhat * (1 + scale) + shift

with a scale and a shift for each sample, which is S rows of a batch. So row by row such an op is a norm with a factor
and a bias of its own, and dscale and dshift are dw and db of a sample's rows.

What is rounded is a convention, two keys of a model. The ``rounding`` to the dtype of x happens once, at the store of
y, or there and of xhat, or after each step: xhat, its product with the factor, and the sum with the shift. The factor 1
+ scale is computed in fp32, or ``round_factor`` says that it is rounded to the dtype of scale, or is never formed. With
a scale in fp32 beside x in half precision the two are one, and by promotion every step after xhat is in fp32; a kernel
may round its product even so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.oracle import casting, forward_bounds, reference
from normcheck.oracle.activation import EACH, IO, NORMED, ONCE
from normcheck.oracle.backward_bounds import Block, Doubt, between_sums, moved_dx, xhat_at_most
from normcheck.oracle.casting import rounded
from normcheck.oracle.forward_bounds import StatisticsBound, YBound
from normcheck.oracle.reference import Forward, Modulation, Rows, Scale
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, plus_store, store

ROUNDINGS = (ONCE, NORMED, EACH)
"""What is rounded to the dtype of x: y; xhat and y; each step. The tightest first."""

APART = "apart"
ROUND_FACTOR = ("none", IO, APART)
"""Whether 1 + scale is rounded to the dtype of scale before it multiplies, the tightest first; or never formed: each
step is rounded, and xhat is added to its product with scale, which is one.
"""


def rows_of_sample(case: Case) -> int:
    """S, the rows over which dscale and dshift are summed."""
    return case.M // case.batch


def samples_of(case: Case, first: int, end: int) -> slice:
    """The samples to which the rows ``first`` to ``end`` belong; all of a case without rows."""
    rows = rows_of_sample(case)
    return slice(first // rows, -(-end // rows)) if rows else slice(0, case.batch)


def blocks(case: Case, height: int) -> list[slice]:
    """Row ranges of at most ``height`` rows of a case that has some: of whole samples or, of longer ones, of one."""
    of_sample = rows_of_sample(case)
    if of_sample <= height:
        height -= height % of_sample
        return [slice(i, min(i + height, case.M)) for i in range(0, case.M, height)]
    ends = range(of_sample, case.M + 1, of_sample)
    pieces = ((i, end) for end in ends for i in range(end - of_sample, end, height))
    return [slice(i, min(i + height, end)) for i, end in pieces]


def modulated(rules: Rules, case: Case, rows: Rows, inputs: Inputs, first: int, end: int) -> Rows:
    """``rows``, those from ``first`` to ``end`` of the case, with the factor and the shift of each.

    A kernel may add xhat to its product with scale, which is then rounded by itself: ``count.factor`` roundings of it.
    Nothing is off if the factor is 0: 1 - 1 is exact, and xhat - xhat as well.
    """
    assert inputs.scale is not None and inputs.shift is not None
    samples, io, model = samples_of(case, first, end), FORMATS[case.dtype], rules.model
    scale, shift = (t[samples].double() for t in (inputs.scale, inputs.shift))
    factor, size = scale + 1, scale.abs()
    narrow = io.name != model.accumulate
    normed, each, fmt = model.rounding != ONCE and narrow, model.rounding == EACH, FORMATS[case.weight_format]
    if model.round_factor == IO and fmt.name != model.accumulate:
        exact, by = factor, factor.abs() * rules.u
        factor = rounded(exact, fmt)
        off = torch.maximum(rounded(exact + by, fmt) - factor, factor - rounded(exact - by, fmt))
    else:
        in_one = normed and each and model.round_factor != APART
        by_product = size * (0.0 if in_one else rules.count["factor"])
        off = rules.u * (torch.maximum(factor.abs(), by_product) if normed else by_product)
    off = torch.where(factor == 0, 0.0, off)
    at = torch.arange(first, end, device=scale.device) // max(rows_of_sample(case), 1) - samples.start
    wide = narrow and fmt.name == model.accumulate
    each &= normed
    apart = model.round_factor == APART and each
    own = Modulation(factor[at], off[at], shift[at], samples.stop - samples.start, normed, each, wide, apart)
    return replace(rows, modulation=own)


def output_y(
    op: Op, rules: Rules, rows: Rows, given: StatisticsBound, io: Format, fmt: Format
) -> tuple[Forward, YBound]:
    """y (m, N) and its bound, of the rows of a block; y is stored in ``fmt``."""
    if _of(rows).normed:
        return _of_rounded(rules, rows, given, io, fmt)
    own = _of(rows)
    factor, shift = Scale(own.factor), own.shift.abs()
    fwd = reference.forward(op, rows, factor.g, own.shift, {})
    size = fwd.z.abs()
    norm = forward_bounds.before_store(rules, rows, fwd, size, factor, shift, given)
    grown = 1 + (rules.k_y + 2) * rules.u
    off, parts = xhat_at_most(rows, given) * own.off * grown, {"ops": norm}
    if rows.xh_off is not None:
        parts["sum"] = rows.xh_off * (own.factor.abs() + own.off) * ((1 + given.al) * grown)
        norm = norm + parts["sum"]
    return fwd, _stored(rules, fwd.y, norm + off, norm + off, fmt, {**parts, "factor": off})


def _of_rounded(rules: Rules, rows: Rows, given: StatisticsBound, io: Format, fmt: Format) -> tuple[Forward, YBound]:
    """y of a rounded xhat and of its product, which may be rounded as well, and its bound."""
    own, cast = _of(rows), casting.cast(rules, rows, given, io, rows.xh_off)
    ends = [one * (own.factor + side * own.off) for one in (cast.low, cast.high) for side in (-1, 1)]
    lowest, highest = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
    some = (own.factor != 0).double()
    product = torch.maximum(-lowest, highest) * rules.u + rules.eta * (1 + own.factor.abs()) * some
    lowest, highest, p = lowest - product, highest + product, cast.value * own.factor
    low, high = lowest, highest
    if own.apart and not own.wide:
        low, high, p = _plus_product(rules, cast, own.factor - 1, io)
    elif own.each:
        low, high = rounded(lowest, io), rounded(highest, io)
    if own.each and own.wide:
        low, high = torch.minimum(low, lowest), torch.maximum(high, highest)
    elif own.each and not own.apart:
        p = rounded(p, io)
    y, largest = p + own.shift, torch.maximum(-low, high)
    add = torch.minimum((y.abs() + high - low) * rules.u, largest) + torch.where(
        own.shift.abs() < rules.eta, rules.eta, 0.0
    )
    add += (p.abs() + own.shift.abs()) * 2.0**-51 * some  # the reference's own rounding
    steps = {"xhat and product near the middle of two": torch.maximum(high - p, p - low), "sum": add}
    return Forward(p, y, y), _stored(rules, y, high - p + add, p - low + add, fmt, steps)


def _plus_product(rules: Rules, cast: casting.Cast, scale: Tensor, io: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The least and the largest of xhat plus its product with scale, and the reference's; each step is rounded."""
    ends = torch.stack([cast.low * scale, cast.high * scale])
    off = ends.abs().amax(0) * rules.u + rules.eta
    lowest, highest = cast.low + rounded(ends.amin(0) - off, io), cast.high + rounded(ends.amax(0) + off, io)
    off = torch.maximum(-lowest, highest) * rules.u
    value = rounded(cast.value + rounded(cast.value * scale, io), io)
    return rounded(lowest - off, io), rounded(highest + off, io), value


def _stored(rules: Rules, y: Tensor, above: Tensor, below: Tensor, fmt: Format, parts: Mapping[str, Tensor]) -> YBound:
    """The bound of y, stored in ``fmt``, which is off by up to ``above`` and ``below`` before, of these ``parts``."""
    e = torch.maximum(above, below)
    upper = plus_store(rules, e, y.abs(), fmt, "y")
    lower = None if above is below else (upper - e + below) * rules.safety
    upper = (upper - e + above) * rules.safety if lower is not None else upper * rules.safety

    def terms() -> Mapping[str, Tensor]:
        return {"store": store(rules, y.abs() + e, fmt, "y") * torch.ones_like(y), **parts}

    clamped = None if lower is None else lower.clamp_(min=NO_ROOM)
    return YBound(e, Bound(upper.clamp_(min=NO_ROOM), clamped, terms))


def gradients(
    op: Op,
    rules: Rules,
    rows: Rows,
    given: StatisticsBound,
    io: Format,
    summed: int,
    dy: Tensor,
    apart: Tensor | None = None,
) -> tuple[Block, Doubt]:
    """The backward of a block for the cotangent ``dy`` (m, N) in fp64, and its doubt by the factor and by roundings.

    ``summed``: S. dscale and dshift of each sample of the block are those of ``Rows.total``. ``apart`` (m, N): how far
    the backward's xhat may be from the forward's, if these may be of two sums.
    """
    own = _of(rows)
    part = Block(rows, reference.backward(op, rows, own.factor, dy), dy, given)
    by_autograd = (own.factor - 1).abs() * (io.u * own.apart)  # the rounding of dy times scale
    off, of_sum = dy.abs() * (own.off + by_autograd), rows.xh_off
    if apart is not None:
        of_sum = apart if of_sum is None else of_sum + apart
    if own.normed:
        cast = casting.cast(rules, rows, given, io, of_sum)
        return casting.gradients(rules, part, cast, io, summed, of_sum, more=off)
    grow = 1 + rules.gam(rules.chain(max(summed, rows.x.shape[1])) + 16)
    none = torch.zeros_like(part.backward.db)
    if of_sum is None:
        return part, Doubt(moved_dx(rules, rows, off * grow, given), none, none)
    moved = between_sums(rows, part.backward, dy, of_sum * (grow * (1 + given.al) ** 2))
    return part, replace(moved, dx=moved.dx + moved_dx(rules, rows, off * grow, given, of_sum))


def _of(rows: Rows) -> Modulation:
    assert rows.modulation is not None
    return rows.modulation
