"""The op that divides by the length of x: expected values and bounds.

What ``eps`` does is a convention, a key of a model:

    sum    rstd = 1 / sqrt(sum(x^2) + eps): fla, Qwen3-Next
    mean   rstd = 1 / sqrt(sum(x^2) + N eps), that of an RMSNorm over sqrt(N): MLX
    max    rstd = 1 / max(sqrt(sum(x^2)), eps): torch.nn.functional.normalize

and y = x * rstd, dx = (dy - y * sum(y * dy)) * rstd. By ``max`` a row that is shorter than eps is divided by a
constant: dx = dy * rstd, without the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.oracle.backward_bounds import GradientSums
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.reference import Floor, Rows
from normcheck.oracle.rounding import Bound, Rules, plus_store, store

SUM, MAX, MEAN = EPS = ("sum", "max", "mean")
"""What eps does, the most common first."""


def normalised(rules: Rules, x: Tensor, eps: float) -> tuple[Rows, StatisticsBound]:
    """The rows of ``x`` (m, N) in fp64, and the bound of their rstd. ``var`` of the rows is the mean of the squares.

    The error of the sum of squares goes through the root as an interval, as in ``forward_bounds.statistics``. A sum of
    squares is not below 0, nor is what eps makes of it below what it makes of 0. What is not declared is SUM.
    """
    u, eta, how = rules.u, rules.eta, rules.model.eps
    columns = x.shape[1]
    least = eps * eps if how == MAX else eps * columns if how == MEAN else eps
    s = (x * x).sum(1, keepdim=True)
    q = s.clamp(min=least) if how == MAX else s + least
    ds = (s * rules.gam(rules.chain(columns) + rules.count["rms"])).add_(3 * columns * eta)
    off = rules.count["eps"] * u * least + eta * (least > 0)
    if how == MAX:
        low, high = (s - ds).clamp_(min=least - off), (s + ds).clamp_(min=least + off)
    else:
        dq = (q + ds).mul_(u).add_(ds).add_(off)
        low, high = (q - dq).clamp_(min=(least - off) * (1 - 2 * u)), q + dq
    floor = Floor(s < least, (s - ds < least + off) & (s + ds > least - off)) if how == MAX else None
    r, rs = q.rsqrt(), 2 * rules.model.rsqrt_ulp * u
    upper = (q / low.clamp_(min=0)).sqrt_().mul_(1 + rs).sub_(1)
    lower = 1 - (q / high).sqrt_().mul_(1 - rs)

    def of_rstd() -> Bound:
        def terms() -> Mapping[str, Tensor]:
            return {"sum of squares": r * (upper - rs), "rsqrt": r * rs, "underflow": torch.full_like(r, eta)}

        return Bound((r * upper).add_(eta), (r * lower).add_(eta), terms)

    rows = Rows(x, None, s / columns, r, x * r, floor=floor)
    return rows, StatisticsBound(torch.maximum(upper, lower), None, None, of_rstd)


def with_y(rules: Rules) -> Rules:
    """``rules`` with the roundings of y: the formula and the bound are those of a norm without a weight."""
    return replace(rules, k_y=rules.count["y_l2norm"])


@dataclass(frozen=True, slots=True)
class Gradient:
    """``dx`` (m, N) of a block of rows, and ``c`` (m, 1): sum(y * dy), or 0 if the row is divided by a constant."""

    dx: Tensor
    c: Tensor


def gradient(rows: Rows, dy: Tensor) -> Gradient:
    """The gradient for the cotangent ``dy`` (m, N) in fp64."""
    c = (rows.xh * dy).sum(1, keepdim=True)
    if rows.floor is not None:
        c = torch.where(rows.floor.reached, torch.zeros_like(c), c)
    return Gradient((dy - rows.xh * c) * rows.rstd, c)


def output_dx(rules: Rules, rows: Rows, given: StatisticsBound, dy: Tensor, io: Format) -> tuple[Tensor, Bound]:
    """dx (m, N) in fp64, and its bound, stored in ``io``; ``dy`` (m, N).

    A kernel's y is at most |y| (1 + al) and what is flushed, and its rstd rstd (1 + al). It may have y as it was
    stored, as fla's backward has: then each y is off by a rounding more. If a row may be as long as eps, it may be
    divided by a constant or not.
    """
    u, eta, count, grown = rules.u, rules.eta, rules.count, 1 + given.al
    own, size, y = gradient(rows, dy), dy.abs(), rows.xh_abs
    columns, c = y.shape[1], (rows.xh * dy).sum(1, keepdim=True).abs()
    flushed = rows.rstd * eta * grown + eta
    rounded = store(rules, y * grown + flushed, io, "y") * torch.ones_like(y)
    by_stored = (rounded * size).sum(1, keepdim=True)
    total, chain = (y * size).sum(1, keepdim=True), rules.gam(rules.chain(columns) + count["c1"])
    of_sum = (grown * total + by_stored + size.sum(1, keepdim=True) * flushed) * chain
    of_sum = of_sum + size.sum(1, keepdim=True) * flushed + 3 * columns * eta
    of_rstd = given.al * c
    dc = of_sum + of_rstd + by_stored
    reached = torch.zeros_like(c, dtype=torch.bool) if rows.floor is None else rows.floor.reached & ~rows.floor.doubt
    c, dc, of_sum, of_rstd, by_stored = (torch.where(reached, 0.0, t) for t in (c, dc, of_sum, of_rstd, by_stored))
    ra, most = rows.rstd * grown, y * grown + flushed + rounded
    k = count["dx_elementwise"] * u
    parts = {
        "sum(y dy)": ra * most * of_sum,
        "ops": ra * (size + most * (c + dc)) * k,
        "y as it was stored": ra * (most * by_stored + rounded * c),
        "statistics": ra * (most * of_rstd + y * given.al * c) + own.dx.abs() * given.al,
        "underflow": ra * (flushed * c + 5 * eta) + eta,
    }
    if rows.floor is not None:
        parts["as long as eps"] = torch.where(rows.floor.doubt, ra * most * (c + dc), 0.0)
    e = sum(parts.values(), torch.zeros_like(y))
    dx_abs = own.dx.abs()

    def terms() -> Mapping[str, Tensor]:
        return {"store": store(rules, dx_abs + e, io, "dx") * torch.ones_like(e), **parts}

    return own.dx, Bound(plus_store(rules, e, dx_abs, io, "dx") * rules.safety, None, terms)


def no_sums(dy: Tensor) -> GradientSums:
    """The share of dw and db of an op that has neither, (N,)."""
    nothing = torch.zeros_like(dy[:0].sum(0))
    return GradientSums(nothing, nothing, nothing)


def sizes(rows: Rows, dy: Tensor) -> dict[str, Tensor]:
    """Output -> the sum of the magnitudes that make each element; ``dy`` (m, N)."""
    y, size = rows.xh_abs, dy.abs()
    return {
        "rstd": rows.rstd,
        "y": y,
        "dx": rows.rstd * (size + y * (y * size).sum(1, keepdim=True)),
    }
