"""A norm in fp64 as a chain of small steps, so that a known fault is the few steps in which it differs.

``Formula()`` is the textbook's. The planted faults of an audit are steps of an fp32 kernel and are written apart from
these: the score of the diagnosis is worth something only because neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import BLOCKS, Op
from normcheck.oracle import reference
from normcheck.oracle.casting import rounded
from normcheck.oracle.quantised import Span, formats, quantised
from normcheck.oracle.residual import EXACT
from normcheck.oracle.rounding import half_ulp


def stored(t: Tensor, fmt: Format) -> Tensor:
    """``t`` (fp64) as a store in ``fmt`` keeps it, to nearest; infinite beyond the largest number."""
    if fmt.name == "fp32":
        return t.float().double()
    near = torch.where(torch.isfinite(t), rounded(t, fmt), t)
    return torch.where(near.abs() > fmt.max, torch.copysign(torch.full_like(near, torch.inf), near), near)


def truncated(t: Tensor, fmt: Format) -> Tensor:
    """``t`` (fp64) rounded toward zero to a number of ``fmt``."""
    spacing = half_ulp(t.abs(), fmt).mul_(2.0)
    return torch.where(torch.isfinite(t), (t / spacing).trunc_().mul_(spacing), t)


def through(t: Tensor, fmt: Format) -> Tensor:
    """``t`` rounded to ``fmt`` within a computation; gradients pass as through a cast."""
    dtype: torch.dtype = getattr(torch, FORMATS[fmt.name].torch_name)
    return t.float().to(dtype).double()


@dataclass(kw_only=True)
class Call:
    """One call of a formula: the inputs as stored, and every step's result under its name, all in fp64.

    Shapes: x, xc, xh, p, z, y, bits, dy, wd (M, N); m, v, r, c1, c2 (M, 1); w, b, g (N,). Without centring m and c2 are
    0. Without a weight w is what makes g 1. ``own``: what the kernel's forward returned, by name: y or q, its scale,
    and the statistics that its backward takes.

    Of an op that adds a residual, all (M, N): ``summand`` is x as given, ``residual`` is in the format ``wide``,
    ``total`` is the sum in fp32, ``kept`` is it as stored, and ``x`` is what is normed: ``way`` says which. ``added``
    is the cotangent of residual_out, ``dn`` the norm's own dx. ``shared``: what shares a scale, see ``quantised``;
    ``unrounded``: y before it is rounded for codes.
    """

    formula: Formula
    op: Op
    inputs: Inputs
    eps: float
    io: Format
    weight: Format
    limits: Mapping[str, float]
    way: Way = field(default_factory=lambda: Way())
    wide: Format = FORMATS["fp32"]
    shared: str = ""
    own: Mapping[str, Tensor] = field(default_factory=dict)

    m: Tensor = field(init=False)
    xc: Tensor = field(init=False)
    v: Tensor = field(init=False)
    r: Tensor = field(init=False)
    g: Tensor = field(init=False)
    xh: Tensor = field(init=False)
    p: Tensor = field(init=False)
    z: Tensor = field(init=False)
    y: Tensor = field(init=False)
    bits: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    wd: Tensor = field(init=False)
    c1: Tensor = field(init=False)
    c2: Tensor = field(init=False)
    summand: Tensor = field(init=False)
    residual: Tensor = field(init=False)
    total: Tensor = field(init=False)
    kept: Tensor = field(init=False)
    added: Tensor = field(init=False)
    dn: Tensor = field(init=False)
    unrounded: Span = field(init=False)

    def __post_init__(self) -> None:
        self.N = self.inputs.x.shape[-1]
        self.x = self._read("x")
        self.M = self.inputs.x.numel() // self.N
        if self.inputs.residual is not None:
            self.summand, self.residual = self.x, self._read("residual")
            self.total = self.formula.add(self)
            self.kept = self.formula.keep_sum(self)
            self.x = self.formula.normed(self)
        self.w = reference.scale_of(self.op, self.inputs).weight.double()
        self.b = None if self.inputs.bias is None else self.inputs.bias.double()
        self.lo, self.hi = self.limits.get("lower_clip", -torch.inf), self.limits.get("upper_clip", torch.inf)
        self.zeros = torch.zeros(self.M, 1, dtype=torch.float64)

    def _read(self, name: str) -> Tensor:
        """An input (M, N), as the formula reads it."""
        tensor: Tensor = getattr(self.inputs, name)
        return self.formula.read(tensor, name).reshape(-1, self.N).double()

    @property
    def block(self) -> int:
        """The padded row of a kernel that holds it in one block: the next power of two."""
        return 1 << (self.N - 1).bit_length()

    def one_plus(self, w: Tensor) -> Tensor:
        """The factor of xhat from the weight."""
        return w + self.op.weight_offset

    def plus_b(self, p: Tensor) -> Tensor:
        """p + bias; p itself without one."""
        return p if self.b is None else p + self.b

    def gamma(self, step: Step, bare: float) -> Tensor:
        """The factor of xhat as ``step`` makes it of the weight; ``bare`` without one, whatever faults there are."""
        return step(self) if self.inputs.weight is not None else torch.full_like(self.w, bare)

    @property
    def casts(self) -> bool:
        """Whether xhat is rounded to a narrower io dtype before it is multiplied."""
        own = self.formula.casts
        usual = self.op.rounds_xhat or self.way.rounds == "xhat"
        return (usual if own is None else own) and self.io.name != "fp32"

    @property
    def codes(self) -> Format:
        """The format of the codes that the kernel returned."""
        return formats()[self.own["q"].dtype]

    @property
    def width(self) -> int:
        """How many columns share a scale."""
        return BLOCKS.get(self.shared, self.N)

    @property
    def scales(self) -> Tensor:
        """The scales that the kernel returned, (M, G), or that it was given, (1, 1)."""
        scale = self.own.get("scale", self.inputs.scale)
        assert scale is not None
        return scale.double().reshape(1, 1) if "scale" not in self.own else scale.double().reshape(self.M, -1)

    def of_columns(self, scales: Tensor) -> Tensor:
        """The scale of each element, (M, N), or (1, 1) if all have one."""
        return scales if scales.numel() == 1 else scales.repeat_interleave(self.width, 1)[:, : self.N]

    def blocks(self, t: Tensor) -> Tensor:
        """(M, N) -> (M, G, width): the columns that share a scale, with zeros behind the last one."""
        count = -(-self.N // self.width)
        return torch.nn.functional.pad(t, (0, count * self.width - self.N)).view(self.M, count, self.width)

    def limited(self, most: Tensor) -> Tensor:
        """``most``, at most scale_ub if the kernel gets that."""
        return most.clamp(max=self.limits.get("scale_ub", torch.inf))

    def forward(self) -> None:
        """Make every result of the forward."""
        f = self.formula
        self.m = f.mean(self) if self.op.centered else self.zeros
        self.xc = f.center(self)
        self.v = f.variance(self)
        self.r = f.rstd(self)
        self.g = self.gamma(f.gamma, f.bare)
        self.xh = f.xhat(self)
        cast = f.cast(self.xh, self.io) if self.casts else self.xh
        self.p = cast * self.g
        self.z = f.preact(self)
        self.y = f.clip(self) if self.op.clamped else self.z
        if self.op.clamped:
            self.bits = f.mask(self)

    def backward(self, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dx (M, N), dw and db (N,), after ``forward``. ``bits``: those that the backward was given."""
        f = self.formula
        self.dy = self._read("dy")
        if self.inputs.residual is not None:
            self.x, self.added = f.again(self), self._read("dresidual_out")
        self.dy = f.cotangent(self)
        if bits is not None:
            self.bits = bits
            self.bits = f.mask_in(self)
            self.dy = f.masked(self)
        if "mean" in self.own:
            self.m = self.own["mean"]
        if "rstd" in self.own:
            self.r = self.own["rstd"]
        self.xc = f.center_b(self)
        self.xh = f.xhat_b(self)
        self.g = self.gamma(f.gamma_b, f.bare_b)
        self.wd = f.wdy(self)
        self.c1 = f.mean1(self)
        self.c2 = f.mean2(self) if self.op.centered else self.zeros
        return f.dx(self), f.dw(self), f.db(self)

    def with_residual(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """dx and dresidual, from the norm's ``own`` dx."""
        self.dn, self.added = own, self._read("dresidual_out")
        return self.formula.dx_sum(self), self.formula.dresidual(self)

    def rows(self, t: Tensor) -> Tensor:
        """(M, N) -> (N,): the sum over the rows, as the formula takes it."""
        return self.formula.sum_m(self, t)

    def of_dw(self) -> Tensor:
        """xhat as dw is summed from it."""
        return through(self.xh, self.io) if self.casts else self.xh


Step = Callable[[Call], Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """What an op leaves open: ``sum``, one of ``residual.SUMS``; ``again``: the sum that a backward of its own norms,
    one of them as well; ``rounds``, one of ``quantised.ROUNDS``, "" if the op has no such thing; ``scaling``, one of
    ``quantised.SCALINGS``.
    """

    sum: str = ""
    again: str = ""
    rounds: str = ""
    scaling: str = "any"


def _sum(c: Call, which: str) -> Tensor:
    return c.total if which == EXACT else c.kept


def _quotient(c: Call, v: Span, by: Tensor) -> Span:
    if c.way.scaling == "reciprocal":
        factor = (1.0 / by).float().double()
        return v.each(lambda t: t * factor)
    return v.each(lambda t: t / by)


def _mean(c: Call) -> Tensor:
    mean = c.x.mean(1, keepdim=True)
    return mean + (c.x - mean).mean(1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The steps; the defaults are the textbook's.

    ``read(tensor, name)`` reads x and dy from the tensor as stored. ``eps`` is the number that is added to the
    variance, which bounds the error of rstd; ``bare`` is gamma without a weight, ``bare_b``
    that of backward; ``one_pass``: the variance cancels, as E[x^2] - mean^2 does. ``casts``:
    whether xhat is rounded to the io dtype before it is multiplied (None: as the op says); ``cast`` is how. ``lossy``:
    gradients lose digits on their way, and overflow, as they happen to be computed: nothing is predicted of them.
    ``keep(call, tensor, name)`` is how a statistic is kept for the caller, ``store(call, tensor, format, name)`` how y,
    dx, dw or db is: both never decrease.
    """

    read: Callable[[Tensor, str], Tensor] = lambda t, name: t
    casts: bool | None = None
    cast: Callable[[Tensor, Format], Tensor] = through
    one_pass: bool = False
    lossy: bool = False
    keep: Callable[[Call, Tensor, str], Tensor] = lambda c, t, name: t
    store: Callable[[Call, Tensor, Format, str], Tensor] = lambda c, t, fmt, name: stored(t, fmt)
    sum_m: Callable[[Call, Tensor], Tensor] = lambda c, t: t.sum(0)
    eps: Callable[[Call], float] = lambda c: c.eps
    bare: float = 1.0
    bare_b: float = 1.0
    # The sum of an op that adds a residual, in this order.
    add: Step = lambda c: (c.summand + c.residual).float().double()
    keep_sum: Step = lambda c: stored(c.total, c.wide)
    normed: Step = lambda c: _sum(c, c.way.sum)
    sum_out: Step = lambda c: c.kept
    # Forward, in this order.
    mean: Step = _mean
    center: Step = lambda c: c.x - c.m
    variance: Step = lambda c: (c.xc * c.xc).mean(1, keepdim=True)
    rstd: Step = lambda c: (c.v + c.formula.eps(c)).rsqrt()
    gamma: Step = lambda c: c.one_plus(c.w)
    xhat: Step = lambda c: c.xc * c.r
    preact: Step = lambda c: c.plus_b(c.p)
    clip: Step = lambda c: c.z.clamp(c.lo, c.hi)
    mask: Step = lambda c: (c.z > c.lo) & (c.z < c.hi)
    mask_out: Step = lambda c: c.bits
    mean_out: Step = lambda c: c.m
    rstd_out: Step = lambda c: c.r
    # The codes of an op that quantises, in this order. Each but ``v`` and ``quotient`` is done to what may be.
    v: Callable[[Call, Span], Span] = lambda c, y: y
    most: Callable[[Call, Span], Span] = lambda c, v: v.size.each(lambda t: c.blocks(t).amax(2))
    scale: Callable[[Call, Tensor], Tensor] = lambda c, most: c.limited(most) / c.codes.max
    scale_out: Callable[[Call, Tensor], Tensor] = lambda c, scale: scale
    divisor: Step = lambda c: c.of_columns(c.scales)
    quotient: Callable[[Call, Span, Tensor], Span] = lambda c, v, by: _quotient(c, v, by)
    code: Callable[[Call, Tensor], Tensor] = lambda c, t: quantised(t, c.codes)
    # Backward, in this order.
    again: Step = lambda c: _sum(c, c.way.again)
    cotangent: Step = lambda c: c.dy
    mask_in: Step = lambda c: c.bits
    masked: Step = lambda c: c.dy * c.bits
    center_b: Step = lambda c: c.x - c.m
    xhat_b: Step = lambda c: c.xc * c.r
    gamma_b: Step = lambda c: c.one_plus(c.w)
    wdy: Step = lambda c: c.dy * c.g
    mean1: Step = lambda c: (c.xh * c.wd).mean(1, keepdim=True)
    mean2: Step = lambda c: c.wd.mean(1, keepdim=True)
    dx: Step = lambda c: (c.wd - (c.xh * c.c1 + c.c2)) * c.r
    dw: Step = lambda c: c.rows(c.dy * c.of_dw())
    db: Step = lambda c: c.rows(c.dy)
    dx_sum: Step = lambda c: c.dn + c.added
    dresidual: Step = lambda c: c.dn + c.added

    @cached_property
    def changed(self) -> frozenset[str]:
        """Names of the steps that are not the textbook's."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not f.default)

    @property
    def is_backward(self) -> bool:
        """Whether it differs in a backward of its own, which autograd would not make of its forward."""
        return bool(self.changed & BACKWARD)


BACKWARD = frozenset(
    ("read", "sum_m", "again", "cotangent", "mask_in", "masked", "center_b", "xhat_b", "gamma_b", "bare_b", "wdy")
) | {"mean1", "mean2", "dx", "dw", "db", "dx_sum", "dresidual"}
"""The steps that change a backward of the formula's own."""

TEXTBOOK = Formula()
"""The formulas of the reference, once more."""


def by_autograd(call: Call) -> dict[str, Tensor]:
    """Run the forward of ``call``, and return dx, dw and db by autograd."""
    leaves: dict[str, Any] = {"dx": call.x.requires_grad_(), "dw": call.w.requires_grad_()}
    if call.b is not None:
        leaves["db"] = call.b.requires_grad_()
    call.forward()
    dy = call.inputs.dy.reshape(-1, call.N).double()
    found = torch.autograd.grad(call.y, list(leaves.values()), dy, allow_unused=True)
    call.dy = dy * call.bits if call.op.clamped else dy
    made = {n: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in zip(leaves.items(), found, strict=True)}
    for name in ("x", "w", "b", "m", "xc", "v", "r", "g", "xh", "p", "z", "y"):
        tensor = getattr(call, name)
        setattr(call, name, None if tensor is None else tensor.detach())
    return made
