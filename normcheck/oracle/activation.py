"""The activation of a gate and its slope, in fp64, and how far those of a correct kernel may be off.

    sigmoid(z) = 1 / (1 + e^-z),   silu(z) = z sigmoid(z)

A kernel has e^-z within a number of roundings that grows with |z|, since z times log2(e) is rounded first. What that
does to sigmoid shrinks with 1 - sigmoid. Or it has (1 + tanh(z / 2)) / 2, whose error is one of 1, however small the
sigmoid is. A kernel may flush sigmoid to 0 where it is subnormal in fp32, as e^-z overflows there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.oracle.rounding import Rules

AFTER, BEFORE = GATES = ("after", "before")
"""When x, or what is normed of it, is multiplied by the activation, the most common first."""

SILU, SIGMOID = ACTIVATIONS = ("silu", "sigmoid")
AFTER_NORM = ("none", SILU)
"""What is applied to a norm of groups of channels, the plain one first."""

ONCE, EACH = ROUNDINGS = ("once", "each")
NORMED = "normed"
"""The rounding of what is normed, and of y alone, as of a norm and what follows it in two kernels."""

GROUPS = (0, 64, 128, 256, 512)
"""The columns of groups that are looked for if none are declared, those of models; 0: the whole row."""

IO, NONE = ROUND_GATED = ("io", "none")


@dataclass(frozen=True)
class Activated:
    """``value``, the activation, and ``slope``, its derivative, with the bounds of their errors; all (m, N), fp64."""

    value: Tensor
    slope: Tensor
    off: Tensor
    slope_off: Tensor


@dataclass(frozen=True)
class Gating:
    """What a gate does to rows, of which ``groups`` are one row of the case. ``by``: its activation, shaped as they.

    ``before``: the rows are x * activation; then ``x`` is what was gated, and ``off`` how far a kernel's product may be
    from the rows. ``each``: xhat and every product are rounded to the dtype of x; ``stores``: that before the norm too.
    """

    by: Activated
    groups: int
    before: bool
    each: bool
    stores: bool
    x: Tensor
    off: Tensor


def activated(rules: Rules, z: Tensor, name: str, off: Tensor | None = None) -> Activated:
    """The activation ``name``, one of ACTIVATIONS, of ``z`` (m, N) in fp64.

    With e = e^-z (1 + t), |t| <= gam(k), sigmoid moves by at most sigmoid (1 - sigmoid) |t| / (1 - |t|). With ``off``,
    of silu, its own errors are those at any argument that is so near.
    """
    if off is not None:
        return _silu_within(rules, z, off)
    u, eta, count = rules.u, rules.eta, rules.count
    s, rest, size = torch.sigmoid(z), torch.sigmoid(-z), z.abs()
    k = (size * count["exp_argument"]).add_(count["exp"]).mul_(u)
    by_exp = s * (rest * k / (1 - 3 * k).clamp(min=0.5) + count["sigmoid"] * u)
    s_off = by_exp.clamp_(min=count["sigmoid_absolute"] * u) + eta
    if name == SIGMOID:
        slope = s * rest
        slope_off = s_off * ((rest - s).abs() + s_off) + count["slope"] * u * slope + eta
        return Activated(s, slope, s_off, slope_off)
    value = z * s
    off = (size * s_off).add_(value.abs(), alpha=count["activation"] * u).add_(torch.where(z == 0, 0.0, eta))
    turn = size * rest
    slope = s * (1 + z * rest)
    slope_off = s_off * ((1 + z * (rest - s)).abs() + size * s_off) + count["slope"] * u * s * (1 + turn) + eta
    return Activated(value, slope, off, slope_off)


def _silu_within(rules: Rules, z: Tensor, off: Tensor) -> Activated:
    """silu of ``z``, with the largest of its own errors at arguments within ``off``: each of its factors is the largest
    there. z (1 - 2 sigmoid(z)) changes by at most 1.5 times what z does, z sigmoid(z) by at most 1.1 times.
    """
    u, eta, count = rules.u, rules.eta, rules.count
    s, rest, size = torch.sigmoid(z + off), torch.sigmoid(off - z), z.abs() + off
    k = (size * count["exp_argument"]).add_(count["exp"]).mul_(u)
    by_exp = s * (rest * k / (1 - 3 * k).clamp(min=0.5) + count["sigmoid"] * u)
    s_off = by_exp.clamp_(min=count["sigmoid_absolute"] * u) + eta
    own, own_rest = torch.sigmoid(z), torch.sigmoid(-z)
    value, slope = z * own, own * (1 + z * own_rest)
    value_off = size * s_off + (value.abs() + 1.1 * off) * (count["activation"] * u)
    value_off = value_off + torch.where(size == 0, 0.0, eta)
    turning = (1 + z * (own_rest - own)).abs() + 1.5 * off
    slope_off = s_off * (turning + size * s_off) + count["slope"] * u * s * (1 + size * rest) + eta
    return Activated(value, slope, value_off, slope_off)


def with_limits(by: Activated, z: Tensor, name: str) -> Activated:
    """``by`` with the limits of the activation ``name`` and of its slope where ``z`` is infinite."""
    above, below = z == torch.inf, z == -torch.inf
    top, slope = (torch.inf, 1.0) if name == SILU else (1.0, 0.0)
    value = torch.where(above, top, torch.where(below, 0.0, by.value))
    return replace(by, value=value, slope=torch.where(above, slope, torch.where(below, 0.0, by.slope)))
