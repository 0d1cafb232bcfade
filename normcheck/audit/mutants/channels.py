"""Norms of groups of channels: correct kernels of several makes, with and without silu; faults are in ``grouped.py``.

``Grouped`` is a kernel of steps, as ``kernel.py`` has them for plain norms. A variant states those that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import rounded
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.GROUPED)


@dataclass(kw_only=True)
class Call:
    """One call: the inputs as stored, and every step's result under its name.

    Shapes: x, xh, p, z, dy, dz, wd (R, K), of R = B * G groups of K elements; m, r (R, 1); w, b (R, K), of the channel
    of each element.
    """

    kernel: Grouped
    x_io: Tensor
    weight_io: Tensor | None
    bias_io: Tensor | None
    G: int
    eps: float
    dy_io: Tensor | None = None

    x: Tensor = field(init=False)
    m: Tensor = field(init=False)
    r: Tensor = field(init=False)
    xh: Tensor = field(init=False)
    w: Tensor = field(init=False)
    b: Tensor = field(init=False)
    z: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    dz: Tensor = field(init=False)
    wd: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.B, self.C, self.L = self.x_io.shape
        self.G = self.kernel.groups(self, self.G)
        self.K = self.C // self.G * self.L
        self.x = self.kernel.read(self, self.x_io)
        self.w = self.channels(self.weight_io, 1.0, self.kernel.channel)
        self.b = self.channels(self.bias_io, 0.0, self.kernel.bias_channel)

    @property
    def io(self) -> torch.dtype:
        """The dtype of x."""
        return self.x_io.dtype

    def in_groups(self, t: Tensor) -> Tensor:
        """(B, C, L) -> (R, K) in the dtype of the work."""
        return t.reshape(self.B * self.G, self.K).to(self.kernel.work)

    def elements(self) -> Tensor:
        """The number of each element within its sample, (G, K)."""
        return torch.arange(self.C * self.L, device=self.x_io.device).view(self.G, self.K)

    def channels(self, t: Tensor | None, missing: float, of: Callable[[Call], Tensor]) -> Tensor:
        """(C,) -> (R, K), of the channel that ``of`` says; ``missing`` if there is none."""
        if t is None:
            return self.x.new_full((1, 1), missing).expand(self.B * self.G, self.K)
        return t.to(self.kernel.work)[of(self)].repeat(self.B, 1)

    def narrow(self, t: Tensor) -> Tensor:
        """``t``, rounded to the dtype of x if that is the convention."""
        return rounded(t, self.io) if self.kernel.each else t

    def mean_of(self, t: Tensor) -> Tensor:
        """(R, K) -> (R, 1)."""
        return (self.kernel.reduce_n(t.t()) / self.K)[:, None]

    def per_channel(self, t: Tensor) -> Tensor:
        """(R, K) -> (C,): the sum over samples and L."""
        return self.kernel.reduce_m(t.reshape(self.B, self.C, self.L).transpose(1, 2).reshape(self.B * self.L, self.C))


Step = Callable[[Call], Tensor]


def _rstd(c: Call) -> Tensor:
    xc = c.x - c.m
    return torch.rsqrt(c.mean_of(xc * xc) + c.eps)


def _silu(c: Call) -> Tensor:
    return c.z * torch.sigmoid(c.z) if c.kernel.silu else c.z


def _slope(c: Call) -> Tensor:
    """dz, what reaches the norm of dy."""
    if not c.kernel.silu:
        return c.dy
    s = torch.sigmoid(c.z)
    return c.narrow(c.dy * (s * (1 + c.z * (1 - s))))


def _dx(c: Call) -> Tensor:
    return (c.wd - c.xh * c.mean_of(c.xh * c.wd) - c.mean_of(c.wd)) * c.r


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The steps of a norm of groups; the defaults are those of a clean one without an activation.

    ``silu`` and ``each`` are the convention.
    """

    silu: bool = False
    each: bool = False
    work: torch.dtype = torch.float32
    reduce_n: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    reduce_m: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    groups: Callable[[Call, int], int] = lambda c, groups: groups
    read: Callable[[Call, Tensor], Tensor] = lambda c, t: c.in_groups(t)
    channel: Step = lambda c: c.elements() // c.L
    bias_channel: Step = lambda c: c.elements() // c.L
    mean: Step = lambda c: c.mean_of(c.x)
    rstd: Step = _rstd
    xhat: Step = lambda c: (c.x - c.m) * c.r
    norm: Step = lambda c: c.xh * c.w + c.b
    output: Step = _silu
    # Backward, in this order.
    cotangent: Step = _slope
    weighted: Step = lambda c: c.dz * c.w
    dx: Step = _dx
    dw: Step = lambda c: c.per_channel(c.dz * c.xh)
    db: Step = lambda c: c.per_channel(c.dz)

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int
    ) -> dict[str, Tensor]:
        """The forward of a grouped op, as ``Implementation.forward``."""
        c = Call(kernel=self, x_io=x, weight_io=weight, bias_io=bias, G=groups, eps=eps)
        c.m = self.mean(c)
        c.r = self.rstd(c)
        c.xh = self.xhat(c)
        c.z = c.narrow(self.norm(c)) if self.silu else self.norm(c)
        y = self.output(c).to(x.dtype).reshape(x.shape)
        saved = {name: t.float().reshape(c.B, c.G) for name, t in (("mean", c.m), ("rstd", c.r))}
        return {"y": y, **(saved if groups == c.G else {})}

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        saved: Mapping[str, Tensor],
        *,
        eps: float,
        groups: int,
    ) -> dict[str, Tensor]:
        """The backward of a grouped op, as ``Implementation.backward``."""
        c = Call(kernel=self, x_io=x, weight_io=weight, bias_io=bias, G=groups, eps=eps, dy_io=dy)
        if "mean" in saved:
            c.m, c.r = (saved[name].reshape(-1, 1).to(self.work) for name in ("mean", "rstd"))
        else:
            c.m = self.mean(c)
            c.r = self.rstd(c)
        c.xh = (c.x - c.m) * c.r
        c.z = c.narrow(self.norm(c)) if self.silu else self.norm(c)
        c.dy = self.read(c, dy)
        c.dz = self.cotangent(c)
        c.wd = self.weighted(c)
        own = {"dx": self.dx(c).to(x.dtype).reshape(x.shape)}
        if weight is not None:
            own["dw"] = self.dw(c).to(weight.dtype)
        return own if bias is None else {**own, "db": self.db(c).to(bias.dtype)}

    @property
    def declared(self) -> dict[str, Any]:
        """The convention as a model."""
        rounding = {"rounding": "each" if self.each else "once"}
        return {"activation": "silu", **rounding} if self.silu else {"activation": "none"}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        own = {"model": self.declared, **fields}
        return Implementation(name=name, op=op, forward=self.forward, backward=self.backward, **own)


# --- Correct kernels.


def _folded(c: Call) -> Tensor:
    """x * a + b, with the a and the b of a channel."""
    a = c.r * c.w
    return c.x * a + (c.b - c.m * a)


def _welford(c: Call) -> Tensor:
    """The variance from the sums of halves, as Chan merges them."""
    half = c.K // 2
    if not half:
        return _rstd(c)
    one, two = c.x[:, :half], c.x[:, half:]
    means = one.mean(1, keepdim=True), two.mean(1, keepdim=True)
    squares = (one - means[0]).square().sum(1, keepdim=True) + (two - means[1]).square().sum(1, keepdim=True)
    merged = squares + (means[1] - means[0]).square() * (half * (c.K - half) / c.K)
    return torch.rsqrt(merged / c.K + c.eps)


_RIGHT: Mapping[str, Grouped] = {
    "grouped": Grouped(),
    "grouped_silu": Grouped(silu=True),
    "grouped_silu_each": Grouped(silu=True, each=True),
    "grouped_folded": Grouped(norm=_folded),
    "grouped_silu_folded": Grouped(silu=True, norm=_folded),
    "grouped_pairwise": Grouped(reduce_n=pairwise, reduce_m=pairwise),
    "grouped_sequential": Grouped(reduce_n=sequential, reduce_m=sequential),
    "grouped_merged": Grouped(rstd=_welford),
    "grouped_rstd_in_weight": Grouped(norm=lambda c: (c.x - c.m) * (c.r * c.w) + c.b),
    "grouped_in_fp64": Grouped(work=torch.float64),
    "grouped_silu_each_in_fp64": Grouped(silu=True, each=True, work=torch.float64),
    "grouped_silu_by_tanh": Grouped(silu=True, output=lambda c: c.z * (0.5 + 0.5 * torch.tanh(0.5 * c.z))),
}

_OPEN = ("grouped", "grouped_silu", "grouped_silu_each")


def _eager(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int) -> Tensor:
    """torch.nn.functional's own, in fp32: on a CPU in half precision its backward has rounded statistics."""
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return torch.nn.functional.group_norm(x.float(), groups, weight, bias, eps).to(x.dtype)


def _eager_silu(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int) -> Tensor:
    """As a model has it: two modules, so the norm is rounded between them."""
    return torch.nn.functional.silu(_eager(x, weight, bias, eps=eps, groups=groups))


def _written_out(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int) -> Tensor:
    """By views of each group, in fp32."""
    wide = x.float().reshape(x.shape[0], groups, -1)
    wide = wide - wide.mean(-1, keepdim=True)
    y = (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    y = y if weight is None else y * weight.float()[:, None]
    return (y if bias is None else y + bias.float()[:, None]).to(x.dtype)


def _channels_last(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int) -> Tensor:
    """In the memory of (B, L, C), which y has as well."""
    samples, channels, length = x.shape
    rows = x.transpose(1, 2).float().reshape(samples, length, groups, channels // groups)
    var, mean = torch.var_mean(rows, dim=(1, 3), correction=0, keepdim=True)
    y = ((rows - mean) * torch.rsqrt(var + eps)).reshape(samples, length, channels)
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).transpose(1, 2)


_EAGER: Mapping[str, Callable[..., Tensor]] = {
    "grouped_eager": _eager,
    "grouped_eager_silu": _eager_silu,
    "grouped_written_out": _written_out,
    "grouped_channels_last": _channels_last,
}

CONTROLS = (
    *(kernel.implementation(name, op, weights=(False, True)) for name, kernel in _RIGHT.items() for op in OPS),
    *(_RIGHT[name].implementation(f"{name}_open", op, model={}) for name in _OPEN for op in OPS),
    *(Implementation(name=name, op=op, forward=forward) for name, forward in _EAGER.items() for op in OPS),
)

IMPLEMENTATIONS = CONTROLS
