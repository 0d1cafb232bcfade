"""Ops that norm heads and rotate them: expected values and bounds.

    n = x * rstd * weight,   y_a = n_a cos - n_b sin,   y_b = n_b cos + n_a sin

A row of the case is the heads of a token. Each head of q and of k is a row here, with the weight of q or of k, and has
the cosines and sines of its token. The heads of v are y as they are x, and their dy is their dx.

Two things are conventions, keys of a model. A pair, ``pairs``, is a column and the one half of the rotated columns
behind it, or two columns side by side. The ``rounding`` to the dtype of x happens once, at the store of y; or n is
rounded as well, before it is rotated; or both products besides, of which a fused multiply-add rounds one alone, as of
a fused norm before eager code; or each step, xhat too, of which a kernel that rotates leaves both products. With
weights, cosines and sines in fp32 beside x in half precision, what follows xhat is in fp32 by promotion; a kernel may
round it even so.

The rotation is linear, and so is its gradient, which rotates dy back. In any order of the factors, each of the two
products of y passes through the roundings of n and ``count.rotation`` more: its own and that of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.cases.split import Heads
from normcheck.oracle import backward_bounds, casting, forward_bounds, reference
from normcheck.oracle.activation import EACH, NORMED, ONCE
from normcheck.oracle.backward_bounds import Block, Doubt, GradientSums, moved_dx
from normcheck.oracle.casting import rounded
from normcheck.oracle.forward_bounds import StatisticsBound, YBound
from normcheck.oracle.reference import Forward, Rotation, Rows, Scale
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, plus_store, store

NEOX, INTERLEAVED = PAIRS = ("neox", "interleaved")
"""Which columns are a pair: j and j + half of those that are rotated, or 2 j and 2 j + 1."""

ROTATED = "rotated"

ROUNDINGS = (ONCE, NORMED, ROTATED, EACH)
"""What is rounded to the dtype of x: y; n and y; n, both products and y; each step. The tightest first."""

_OF_PRODUCTS = (ROTATED, EACH)

_REFERENCE = 2.0**-51  # of the magnitudes: the reference's own roundings


def normalised(op: Op, rules: Rules, case: Case, x: Tensor, inputs: Inputs, first: int) -> tuple[Rows, StatisticsBound]:
    """The heads of q and k of ``x`` (m, N) in fp64, the rows from ``first`` on, as rows; bounds of their statistics.

    What a kernel does not declare is read as the most common.
    """
    assert inputs.cos is not None and inputs.sin is not None
    heads, narrow = case.of_heads, case.dtype != rules.model.accumulate
    rows = reference.normalise(op, x[:, : heads.width].reshape(-1, heads.columns), case.eps)
    scale = reference.scale_of(op, inputs).g
    rotation = Rotation(
        heads=heads,
        cos=inputs.cos[first : first + x.shape[0]].double().unsqueeze(1),
        sin=inputs.sin[first : first + x.shape[0]].double().unsqueeze(1),
        factor=torch.cat((scale[:1].expand(heads.q, -1), scale[1:].expand(heads.k, -1))).repeat(x.shape[0], 1),
        rest=x[:, heads.width :],
        side_by_side=rules.model.pairs == INTERLEAVED,
        rounding=rules.model.rounding if narrow and rules.model.rounding in ROUNDINGS else ONCE,
        wide=case.weight_format != case.dtype,
    )
    return replace(rows, rotation=rotation), forward_bounds.statistics(rules, rows, case.eps)


def checkable(rows: Rows, case: Case) -> Tensor | None:
    """As ``forward_bounds.checkable_rows``; bool (m, 1), not None, if a head of v has numbers that are not finite."""
    found = forward_bounds.checkable_rows(rows, case)
    if found is None and not bool(torch.isfinite(_of(rows).rest).all()):
        return torch.ones_like(rows.rstd, dtype=torch.bool)
    return found


def of_elements(ok: Tensor, like: Tensor, heads: Heads) -> Tensor:
    """What is said of heads, bool (m, 1), for each element of ``like`` (m, N); of those of v: whether it is finite."""
    own = ok.expand(-1, heads.columns).reshape(-1, heads.width)
    return torch.cat((own, torch.isfinite(like[:, heads.width :])), 1)


def whole(rows: Rows, t: Tensor, rest: Tensor) -> Tensor:
    """The rows of the case, of what is shaped as ``rows`` and what the heads of v have."""
    return torch.cat((t.reshape(-1, _of(rows).heads.width), rest), 1)


@dataclass(frozen=True)
class _Near:
    """A correct kernel's is within ``off`` of ``value``."""

    value: Tensor
    off: Tensor


def output_y(op: Op, rules: Rules, rows: Rows, given: StatisticsBound, io: Format) -> tuple[Forward, YBound]:
    """y (m, N) and its bound, of the rows of a block."""
    of = _of(rows)
    factor = Scale(of.factor)
    norm = _normed(op, rules, rows, factor, given, io)
    turned = _turned(rules, of, norm, io)
    y, e = turned.value, turned.off
    upper = (plus_store(rules, e, y.abs(), io, "y") * rules.safety).clamp_(min=NO_ROOM)
    by_norm = _sizes(of, norm.off)

    def of_v(t: Tensor) -> Tensor:
        return whole(rows, t, torch.zeros_like(of.rest))

    def terms() -> Mapping[str, Tensor]:
        stored = store(rules, y.abs() + e, io, "y") * torch.ones_like(e)
        return {"store": of_v(stored), "n": of_v(by_norm), "rotation": of_v((e - by_norm).clamp_(min=0))}

    result = whole(rows, y, of.rest)
    return Forward(result, result, result), YBound(of_v(e), Bound(whole(rows, upper, _unchanged(of.rest)), None, terms))


def gradients(
    op: Op, rules: Rules, rows: Rows, given: StatisticsBound, io: Format, dy: Tensor
) -> tuple[Tensor, Bound, GradientSums]:
    """dx (m, N) of a block and its bound; ``dy`` (m, N) in fp64. The sums are of weights, and judged by nobody."""
    of = _of(rows)
    of_heads, of_v = dy[:, : of.heads.width].reshape(rows.x.shape), dy[:, of.heads.width :]
    back = _turned_back(rules, of, of_heads, io)
    part = Block(rows, reference.backward(op, rows, of.factor, back.value), back.value, given)
    off = back.off * of.factor.abs()
    if of.rounding == EACH:
        off = off + store(rules, (part.backward.wd.abs() + off) * (1 + rules.u) + rules.eta, io, "dx")
    grow = 1 + rules.gam(rules.chain(rows.x.shape[1]) + 16)
    moved = moved_dx(rules, rows, off * grow, given)
    none = torch.zeros_like(part.backward.db)
    bound, sums = backward_bounds.output_dx(rules, part, io, Doubt(moved, none, none))

    def terms() -> Mapping[str, Tensor]:
        return {name: whole(rows, t, torch.zeros_like(of.rest)) for name, t in bound.terms().items()}

    return (
        whole(rows, part.backward.dx, of_v),
        Bound(whole(rows, bound.upper, _unchanged(of_v)), None, terms),
        sums,
    )


def cotangent(rules: Rules, rows: Rows, dy: Tensor) -> Tensor:
    """What of ``dy`` (m, N) reaches the norms, in fp64, shaped as the rows."""
    of = _of(rows)
    return _turned_back(rules, of, dy[:, : of.heads.width].reshape(rows.x.shape), FORMATS["fp32"]).value


def sizes(rows: Rows, dy: Tensor) -> dict[str, Tensor]:
    """Output -> the sum of the magnitudes that make each element; ``dy`` (m, N)."""
    of = _of(rows)
    xh, wd = rows.xh_abs, _sizes(of, dy[:, : of.heads.width].reshape(rows.x.shape).abs()) * of.factor.abs()
    dx = rows.rstd * (wd + xh * (xh * wd).mean(1, keepdim=True))
    y = whole(rows, _sizes(of, xh * of.factor.abs()), of.rest.abs())
    return {"rstd": rows.rstd, "y": y, "dx": whole(rows, dx, dy[:, of.heads.width :].abs())}


def _normed(op: Op, rules: Rules, rows: Rows, factor: Scale, given: StatisticsBound, io: Format) -> _Near:
    """What is rotated, (m, D)."""
    of = _of(rows)
    if of.rounding == EACH:
        cast = casting.cast(rules, rows, given, io)
        ends = torch.stack((cast.low * factor.g, cast.high * factor.g))
        size = cast.size * factor.abs
        off = size * rules.u + rules.eta * (1 + factor.abs)
        return _stored(cast.value * factor.g, ends.amin(0) - off, ends.amax(0) + off, io, of.wide)
    fwd = reference.forward(op, rows, factor.g, None, {})
    off = forward_bounds.before_store(rules, rows, fwd, fwd.z.abs(), factor, None, given)
    if of.rounding == ONCE:
        return _Near(fwd.z, off)
    near = _stored(fwd.z, fwd.z - off, fwd.z + off, io, wide=False)
    columns = torch.arange(of.heads.columns, device=off.device) < 2 * of.heads.pairs
    # what is not rotated is stored once, as y
    return _Near(torch.where(columns, near.value, fwd.z), torch.where(columns, near.off, off))


def _stored(value: Tensor, low: Tensor, high: Tensor, io: Format, wide: bool) -> _Near:
    """What lies between ``low`` and ``high`` as it is stored in ``io``, or, if ``wide``, left as it is."""
    lowest, highest = rounded(low, io), rounded(high, io)
    if wide:
        lowest, highest = torch.minimum(low, lowest), torch.maximum(high, highest)
    else:
        value = rounded(value, io)
    return _Near(value, torch.maximum(highest - value, value - lowest))


def _turned(rules: Rules, of: Rotation, n: _Near, io: Format, *, back: bool = False) -> _Near:
    """Rows, rotated; ``back``: by the opposite angles."""
    u, eta = rules.u, rules.eta
    sine = -of.sin if back else of.sin
    a, b, rest = of.parts(n.value)
    off_a, off_b, off_rest = of.parts(n.off)

    def product(t: Tensor, off: Tensor, by: Tensor) -> _Near:
        value = t * by
        e = off * by.abs() + eta * (1 + t.abs())
        return _Near(value, e + (value.abs() + e) * u if of.rounding in _OF_PRODUCTS else e)

    def added(one: _Near, two: _Near) -> _Near:
        both, size, roundings = _sum(one, two), one.value.abs() + two.value.abs(), rules.gam(rules.count["rotation"])
        if of.rounding in _OF_PRODUCTS:
            roundings = u
            ends = [_stored(t.value, t.value - t.off, t.value + t.off, io, of.wide) for t in (one, two)]
            # one of two products in half precision is not rounded if it is fused with their sum, as compilers do; after
            # a norm that rounds xhat, neither is if a kernel rotates
            ways = [_sum(*ends), _sum(one, ends[1]), _sum(ends[0], two), *[_sum(one, two)] * (of.rounding == EACH)]
            middle = ways[0].value
            both = _Near(middle, torch.stack([(way.value - middle).abs() + way.off for way in ways]).amax(0))
        return _Near(both.value, both.off + (size + both.off) * roundings + size * _REFERENCE + eta)

    first = added(product(a, off_a, of.cos), product(b, off_b, -sine))
    second = added(product(b, off_b, of.cos), product(a, off_a, sine))
    value, off = of.joined(first.value, second.value, rest), of.joined(first.off, second.off, off_rest)
    return _Near(value, off)


def _sum(one: _Near, two: _Near) -> _Near:
    return _Near(one.value + two.value, one.off + two.off)


def _turned_back(rules: Rules, of: Rotation, dy: Tensor, io: Format) -> _Near:
    """The cotangent of n, of ``dy`` shaped as the rows. What rounds n, or each step, may round this as well, and both
    products: autograd does, if n is multiplied as it is stored.
    """
    exact = _turned(rules, replace(of, rounding=ONCE), _Near(dy, torch.zeros_like(dy)), io, back=True)
    if of.rounding == ONCE:
        return exact
    off, size = exact.off + _product_stores(rules, of, dy, io), exact.value.abs()
    return _Near(exact.value, off + store(rules, size + off, io, "dx"))


def _product_stores(rules: Rules, of: Rotation, dy: Tensor, io: Format) -> Tensor:
    """The roundings of both products of dy to ``io``."""
    a, b, rest = (t.abs() for t in of.parts(dy))
    cosine, sine = of.cos.abs(), of.sin.abs()

    def both(one: Tensor, two: Tensor) -> Tensor:
        return (
            torch.zeros_like(one * cosine) + store(rules, one * cosine, io, "dx") + store(rules, two * sine, io, "dx")
        )

    return of.joined(both(a, b), both(b, a), torch.zeros_like(rest))


def _sizes(of: Rotation, size: Tensor) -> Tensor:
    """The magnitudes that a rotation adds up, of rows of this ``size``."""
    a, b, rest = of.parts(size)
    cosine, sine = of.cos.abs(), of.sin.abs()
    return of.joined(a * cosine + b * sine, b * cosine + a * sine, rest)


def _unchanged(t: Tensor) -> Tensor:
    """The bound of what is copied."""
    return torch.full_like(t, NO_ROOM).masked_fill_(~torch.isfinite(t), torch.inf)


def _of(rows: Rows) -> Rotation:
    assert rows.rotation is not None
    return rows.rotation
