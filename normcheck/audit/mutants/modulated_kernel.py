"""A modulated norm as a chain of steps, as ``kernel.py`` has plain norms: a variant states those that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import rounded
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation


@dataclass(kw_only=True)
class Call:
    """One call: the inputs as stored and in fp32, and every step's result under its name; ``io``, to which it rounds.

    Shapes: x, xh, f, p, y, dy, wd (M, N); m, r (M, 1); sample (M,); s, t (the scale and the shift) (B, N).
    """

    kernel: Modulated
    x_io: Tensor
    scale_io: Tensor
    shift_io: Tensor
    eps: float
    dy_io: Tensor | None = None
    io: torch.dtype = torch.float32

    x: Tensor = field(init=False)
    sample: Tensor = field(init=False)
    s: Tensor = field(init=False)
    t: Tensor = field(init=False)
    m: Tensor | None = field(init=False)
    r: Tensor = field(init=False)
    xh: Tensor = field(init=False)
    f: Tensor = field(init=False)
    p: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    wd: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.B, self.S, self.N = self.x_io.shape
        self.M = self.B * self.S
        work = self.kernel.work
        self.x = self.x_io.reshape(self.M, self.N).to(work)
        self.sample = self.kernel.samples(self)
        self.s, self.t = self.kernel.read_scale(self).to(work), self.kernel.read_shift(self).to(work)

    @property
    def rows(self) -> Tensor:
        """The number of each row, (M,)."""
        return torch.arange(self.M, device=self.x_io.device)

    def narrow(self, t: Tensor) -> Tensor:
        """``t``, rounded to the dtype of x if each step is."""
        return rounded(t, self.io) if self.kernel.each else t

    def summed(self, t: Tensor) -> Tensor:
        """(M, N) -> (B, N): the sum over the rows of each sample."""
        parts = t.reshape(self.B, self.S, self.N).transpose(0, 1).reshape(self.S, -1)
        return self.kernel.reduce_m(parts).reshape(self.B, self.N)


Step = Callable[[Call], Tensor]


def _factor(c: Call) -> Tensor:
    """1 + scale, rounded to the dtype of scale if that is the convention."""
    factor = 1 + c.s
    return (rounded(factor, c.scale_io.dtype) if c.kernel.round_factor else factor)[c.sample]


def _product(c: Call) -> Tensor:
    """xhat times the factor; with a scale in fp32 torch has it in fp32, and a kernel may round it even so."""
    if c.kernel.apart:
        return plus_product_of(c, c.xh)
    p = c.xh * c.f
    return c.narrow(p) if (c.scale_io.dtype == c.io or c.kernel.round_wide) and not c.kernel.fused else p


def plus_product_of(c: Call, t: Tensor) -> Tensor:
    """``t`` and its product with scale, each step rounded unless scale is in fp32."""
    if c.scale_io.dtype != c.io:
        return t + t * c.s[c.sample]
    return c.narrow(t + c.narrow(t * c.s[c.sample]))


def mean_of(c: Call, t: Tensor) -> Tensor:
    """The mean of each row, (M, 1)."""
    return (c.kernel.reduce_n(t.t()) / c.N)[:, None]


def centred_of(c: Call) -> Tensor:
    """x less its mean, if the op takes that off."""
    return c.x if c.m is None else c.x - c.m


def _rstd(c: Call) -> Tensor:
    xc = centred_of(c)
    return torch.rsqrt(mean_of(c, xc * xc) + c.eps)


def _dx(c: Call) -> Tensor:
    dx = c.wd - c.xh * mean_of(c, c.xh * c.wd)
    return (dx if c.m is None else dx - mean_of(c, c.wd)) * c.r


@dataclass(frozen=True, kw_only=True)
class Modulated:
    """The steps of a modulated norm; the defaults are those of a clean one, which rounds y alone.

    ``each`` and ``round_factor`` are the convention, ``centered`` is that of the op; ``fused``: of xhat and y alone.
    """

    centered: bool = True
    each: bool = False
    fused: bool = False
    round_factor: bool = False
    round_wide: bool = False
    apart: bool = False
    work: torch.dtype = torch.float32
    reduce_n: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    reduce_m: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    samples: Step = lambda c: c.rows // max(c.S, 1)
    read_scale: Step = lambda c: c.scale_io
    read_shift: Step = lambda c: c.shift_io
    mean: Step = lambda c: mean_of(c, c.x)
    rstd: Step = _rstd
    xhat: Step = lambda c: c.narrow(centred_of(c) * c.r)
    factor: Step = _factor
    product: Step = _product
    output: Step = lambda c: c.p + c.t[c.sample]
    # Backward, in this order.
    factor_b: Step = _factor
    norm_b: Step = lambda c: centred_of(c) * c.r
    cotangent: Step = lambda c: c.dy * c.f
    dx: Step = _dx
    dscale: Step = lambda c: c.summed(c.dy * c.narrow(c.xh))
    dshift: Step = lambda c: c.summed(c.dy)

    def forward(
        self,
        x: Tensor,
        weight: None,
        bias: None,
        *,
        eps: float,
        scale: Tensor,
        shift: Tensor,
        io: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """The forward of a modulated op, as ``Implementation.forward``; ``io``: the dtype of y, if not that of x."""
        c = Call(kernel=self, x_io=x, scale_io=scale, shift_io=shift, eps=eps, io=io or x.dtype)
        c.m = self.mean(c) if self.centered else None
        c.r = self.rstd(c)
        c.xh = self.xhat(c)
        c.f = self.factor(c)
        c.p = self.product(c)
        saved = {} if c.m is None else {"mean": c.m.float()}
        return {"y": self.output(c).to(c.io).reshape(x.shape), "rstd": c.r.float(), **saved}

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: None,
        bias: None,
        saved: Mapping[str, Tensor],
        *,
        eps: float,
        scale: Tensor,
        shift: Tensor,
        io: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """The backward of a modulated op, as ``Implementation.backward``; dx has the dtype of x."""
        c = Call(kernel=self, x_io=x, scale_io=scale, shift_io=shift, eps=eps, dy_io=dy, io=io or x.dtype)
        c.dy = dy.reshape(c.M, c.N).to(self.work)
        c.m = saved["mean"].reshape(c.M, 1).to(self.work) if self.centered else None
        c.r = saved["rstd"].reshape(c.M, 1).to(self.work)
        c.f, c.xh = self.factor_b(c), self.norm_b(c)
        c.wd = self.cotangent(c)
        of_samples = {"dscale": self.dscale(c), "dshift": self.dshift(c)}
        dx = self.dx(c).to(x.dtype).reshape(x.shape)
        return {"dx": dx, **{name: t.to(scale.dtype) for name, t in of_samples.items()}}

    @property
    def declared(self) -> dict[str, Any]:
        """The convention as a model."""
        rounding = ("normed" if self.fused else "each") if self.each else "once"
        factor = "apart" if self.apart else "io" if self.round_factor else "none"
        return {"rounding": rounding, "round_factor": factor}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        kernel, own = replace(self, centered=table.OPS[op].centered), {"model": self.declared, **fields}
        return Implementation(name=name, op=op, forward=kernel.forward, backward=kernel.backward, **own)
