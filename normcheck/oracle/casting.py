"""Ops that round xhat to the io dtype before they multiply it by the weight: expected values and bounds.

A correct kernel's xhat is off by at most ``e`` before the rounding, so after it lies between round(xhat - e) and
round(xhat + e). For nearly all elements that is one number, and y is that number times the weight, rounded once more.
If xhat lies within ``e`` of the middle between two numbers of the format, both are right. So a kernel that leaves the
rounding out fails, and one that rounds does not.

The rounding passes gradients through unchanged. Autograd through such a forward also rounds dy * weight and each
product dy * xhat of dw to the io dtype; a fused kernel need not. Both are right.

After a residual the rows are those of the sum that is normed, and the format is still that of x: a sum in fp32 beside x
in half precision is rounded to half precision once it is normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.cases.op import Op
from normcheck.oracle.backward_bounds import Block, Doubt, between_sums, moved_dx
from normcheck.oracle.forward_bounds import StatisticsBound, YBound
from normcheck.oracle.reference import Forward, Rows, Scale
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, half_ulp, store


@dataclass(frozen=True, slots=True)
class Cast:
    """The rounded xhat, (m, N) in fp64: the reference has ``value``, a correct kernel ``low`` to ``high``."""

    value: Tensor
    low: Tensor
    high: Tensor

    @property
    def size(self) -> Tensor:
        """Bound of |xhat|."""
        return torch.maximum(-self.low, self.high)

    @property
    def doubt(self) -> Tensor:
        """Bound of |xhat - value|."""
        return torch.maximum(self.high - self.value, self.value - self.low)


def casts(op: Op, rules: Rules, io: Format) -> bool:
    """Whether ``op`` rounds xhat to a format narrower than the accumulation format."""
    return op.rounds_xhat and io.name != rules.model.accumulate


def rounded(a: Tensor, fmt: Format) -> Tensor:
    """``a`` (fp64) rounded to the nearest number of ``fmt``, ties to even, subnormals kept, without overflow."""
    spacing = half_ulp(a.abs(), fmt).mul_(2.0)
    return (a / spacing).round_().mul_(spacing)


def cast(rules: Rules, rows: Rows, given: StatisticsBound, io: Format, off: Tensor | None = None) -> Cast:
    """The rounded xhat of ``rows``, whose statistics are off by ``given``.

    Errors before the rounding: x, less the mean if there is one, times rstd, or divided by the root, the shift of xhat
    by an error of that mean, and underflow of x and of the product. ``off``
    (m, N): how far the xhat of another right sum may be from that of ``rows``, which then has these errors as well.
    """
    count = rules.count["xhat" if rows.mean is None else "xhat_centered"]
    per_xh = (1 + given.al) * (1 + count * rules.u) - 1
    e = (rows.xh_abs * per_xh).add_(rules.eta * (1 + rows.rstd * (1 + given.al)))
    if given.d is not None:
        e.add_(given.d * (1 + per_xh))
    if off is not None:
        e.add_(off * (1 + per_xh))
    return Cast(rounded(rows.xh, io), rounded(rows.xh - e, io), rounded(rows.xh + e, io))


def output_y(rules: Rules, cast: Cast, scale: Scale, fmt: Format) -> tuple[Forward, YBound]:
    """y (m, N) and its bound: the weight times any xhat from ``low`` to ``high``, in fp32 or in the io dtype.

    The product is exact in fp32 if both factors have the io dtype, and rounded if the weight is fp32. The store in
    ``fmt`` follows. One multiplication in the io dtype gives the same number as the two steps.
    """
    y = cast.value * scale.g
    ends = cast.low * scale.g, cast.high * scale.g
    above, below = torch.maximum(*ends).sub_(y), y - torch.minimum(*ends)
    ops = (cast.size * scale.abs).mul_(rules.u).add_(rules.eta * (1 + scale.abs))
    if scale.where is not None:
        ops *= scale.where
    doubt = torch.maximum(above, below)
    before = doubt + ops
    stored = store(rules, y.abs() + before, fmt, "y")

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(y)
        return {"store": stored * ones, "xhat near the middle of two": doubt, "product": ops}

    # With a zero weight y has no error at all, and y in fp32 has no error of a store.
    upper, lower = (((side + ops + stored) * rules.safety).clamp_(min=NO_ROOM) for side in (above, below))
    return Forward(y, y, y), YBound(before, Bound(upper, lower, terms))


def gradients(
    rules: Rules,
    block: Block,
    cast: Cast,
    io: Format,
    m: int,
    off: Tensor | None = None,
    dy_off: Tensor | float = 0.0,
    weight: Tensor | float = 1.0,
    more: Tensor | float = 0.0,
) -> tuple[Block, Doubt]:
    """``block`` with dw from the rounded xhat, and the doubt of dx and dw by roundings to the io dtype.

    ``m``: rows of all blocks. dx is linear in wd = dy * g, whose elements may be rounded to the io dtype. A term of dw
    is dy times any xhat from ``low`` to ``high``, and may be rounded as well. The bound of the sum's own roundings is
    made with the unrounded xhat, so it grows by the change of xhat.

    ``off``, see ``cast``: dx may be of either xhat wherever it has one. With wd' the rounded wd and xh', xh" two such
    xhats, xh' mean(xh" wd') - xh mean(xh wd) is what ``between_sums`` bounds, of wd, and xh' mean(xh" (wd' - wd)).

    ``dy_off`` (m, N): how far the cotangent may be from ``block.dy``; ``weight``: |g|, by which that is multiplied.
    ``more`` (m, N): how far dy * g may be from that of ``block`` besides.
    """
    rows, bwd, dy = block.rows, block.backward, block.dy
    dy_abs, wd_abs = dy.abs(), bwd.wd.abs()
    u, chain = rules.u, rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
    of_dy = dy_off * weight + more
    wd_off = of_dy + store(rules, (wd_abs + of_dy) * (1 + u) + rules.eta, io, "dx")
    assert isinstance(wd_off, Tensor)  # casts() is true: io is not the accumulation format
    products = store(rules, (dy_abs + dy_off) * cast.size + rules.eta, io, "dw")
    products = products + dy_abs * cast.doubt + dy_off * cast.size
    moved = dy_abs * (cast.value - rows.xh).abs()
    dw = rows.total((products * (1 + chain)).add_(moved, alpha=chain))
    dx = moved_dx(rules, rows, wd_off * (1 + chain), block.given, off)
    if off is not None:
        dx += between_sums(rows, bwd, dy, off).dx
    doubt = Doubt(dx, dw, torch.zeros_like(dw))
    return replace(block, backward=replace(bwd, dw=rows.total(dy * cast.value))), doubt
