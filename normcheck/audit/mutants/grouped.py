"""Norms of groups of channels: correct kernels of several makes, with silu and without, and faults of groups, channels
and memory.

``Grouped`` is a kernel of steps, as ``kernel.py`` has them for plain norms. A variant states those that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import HALF, chain_in, rounded
from normcheck.audit.mutants.mutant import STATS, VALUES, Mutant, implementations
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.GROUPED)
_BLOCK = 8  # elements that a faulty kernel takes at a time


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
    """torch.nn.functional's own, in the dtype of x."""
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    return torch.nn.functional.group_norm(x, groups, weight, bias, eps)


def _eager_silu(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int) -> Tensor:
    """As a model has it: two functions, so the norm is rounded between them."""
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

# --- Faults.


def _by_memory(c: Call, t: Tensor) -> Tensor:
    """The elements in the order of memory, whatever the strides of C and L say."""
    samples = t.as_strided((c.B, c.C * c.L), (t.stride(0) if c.B > 1 else c.C * c.L, 1))
    return samples.reshape(c.B * c.G, c.K).to(c.kernel.work)


def _of_offset(c: Call) -> Tensor:
    """The channel from the place of an element in the memory of its sample, as if that were (C, L)."""
    if c.x_io.stride(1) != 1 or c.L == 1:
        return c.elements() // c.L
    channel, at = c.elements() // c.L, c.elements() % c.L
    return (at * c.C + channel) // c.L


def _of_blocks(c: Call, t: Tensor) -> Tensor:
    """The mean over the elements of a group that fill blocks, divided by all; over all if none does."""
    whole = c.K // _BLOCK * _BLOCK or c.K
    return t[:, :whole].sum(1, keepdim=True) / c.K


def _channel_blocks(c: Call) -> Tensor:
    """bool (K,): the elements of a group in the channels of whole pairs."""
    channels = c.C // c.G
    return torch.arange(c.K, device=c.x.device) // c.L < max(channels // 2 * 2, 1)


def _with_padding(c: Call) -> Tensor:
    """The variance with the zeros behind a ragged group, which are far from the mean."""
    padded = -(-c.K // _BLOCK) * _BLOCK
    xc = c.x - c.m
    squares = (xc * xc).sum(1, keepdim=True) + (padded - c.K) * c.m * c.m
    return torch.rsqrt(squares / c.K + c.eps)


def _unbiased(c: Call) -> Tensor:
    return torch.rsqrt((c.x - c.m).square().sum(1, keepdim=True) / max(c.K - 1, 1) + c.eps)


def _cancelling(c: Call) -> Tensor:
    return torch.rsqrt((c.mean_of(c.x * c.x) - c.m * c.m).clamp(min=0) + c.eps)


def _squares_in_half(c: Call) -> Tensor:
    """x² in fp16, which overflows from 256 on."""
    return torch.rsqrt((c.mean_of(rounded(c.x * c.x, torch.float16)) - c.m * c.m).clamp(min=0) + c.eps)


def _of_channels(c: Call) -> Tensor:
    """The mean of each channel, in place of its group's."""
    of_channel = c.x.reshape(-1, c.L).mean(1, keepdim=True).expand(-1, c.L)
    return of_channel.reshape(c.x.shape)


def _per_group(c: Call, t: Tensor) -> Tensor:
    """The sum over a whole group, for each of its channels."""
    return t.reshape(c.B, c.G, c.K).sum((0, 2)).repeat_interleave(c.C // c.G) / (c.C // c.G)


def _without_sample(c: Call, t: Tensor) -> Tensor:
    """The sum over all samples but the last, if there are others."""
    samples = t.reshape(c.B, c.C, c.L)
    return samples[: max(c.B - 1, 1)].sum((0, 2))


def _last_group_first(c: Call) -> Tensor:
    """The channel of each element, of the last group those of the first."""
    channel = (c.elements() // c.L).clone()
    channel[-1] = channel[0]
    return channel


def _fault(id: str, what: str, kernel: Grouped, outputs: tuple[str, ...], **fields: Any) -> Mutant:
    """A fault whose kernel differs from a clean one by the steps of ``kernel``; it declares ``model``, or its own."""
    model = fields.pop("model", kernel.declared)
    own = {"source": "invented", "ops": OPS, **fields}
    return Mutant(id=id, what=what, make=lambda op: kernel.implementation(id, op, model=model), outputs=outputs, **own)


_RSTD = ("rstd", "y", "dx", "dw", "db")
_EVERY = (*STATS, "db")
_SEVERAL, _LAST = "several groups of several channels", "channels-last memory"
_SILU = Grouped(silu=True)

MUTANTS: tuple[Mutant, ...] = (
    _fault("mP01", "weight and bias are indexed by group, not by channel", Grouped(
           channel=lambda c: c.elements() // c.K, bias_channel=lambda c: c.elements() // c.K),
           ("y", "dx"), source="linkedin/Liger-Kernel#1375", when="several channels of a group"),
    _fault("mP02", "the weight is indexed by the linear offset of x", Grouped(
           channel=lambda c: c.elements() % c.C), ("y", "dx"), source="flagos-ai/FlagGems#4984", when="L above 1"),
    _fault("mP03", "the channel is that of the place in memory, as if it were channels-first", Grouped(
           channel=_of_offset), ("y", "dx"), when=_LAST),
    _fault("mP04", "channels-last memory is read as channels-first", Grouped(read=_by_memory),
           (*_EVERY, ""), source="pytorch/pytorch#140913", kinds=(*VALUES, "out_of_bounds_read"), when=_LAST),
    _fault("mP05", "the variance is divided by K - 1", Grouped(rstd=_unbiased), _RSTD,
           source="Oneflow-Inc/oneflow#9560", widest=4096),
    _fault("mP06", "the variance is E[x^2] - E[x]^2", Grouped(rstd=_cancelling), _RSTD,
           source="tenstorrent/tt-metal#57223", when="groups far from 0"),
    _fault("mP07", "the mean is that of a channel, not of its group", Grouped(
           xhat=lambda c: (c.x - _of_channels(c)) * c.r), ("y",), when="several channels of a group"),
    _fault("mP08", "eps is added outside the root", Grouped(
           rstd=lambda c: 1 / (c.mean_of((c.x - c.m).square()).sqrt() + c.eps)), _RSTD),
    _fault("mP09", "the elements of a group behind its last whole block are left out of the mean", Grouped(
           mean=lambda c: _of_blocks(c, c.x)), _EVERY, source="flagos-ai/FlagGems#4984", when="a ragged group"),
    _fault("mP10", "the padding of a ragged group counts in its variance", Grouped(rstd=_with_padding), _RSTD,
           source="tenstorrent/tt-metal#50682", when="a ragged group far from 0"),
    _fault("mP11", "the last channel of a group with an odd number is left out of the variance", Grouped(
           rstd=lambda c: torch.rsqrt(c.mean_of((c.x - c.m).square() * _channel_blocks(c)) + c.eps)), _RSTD,
           when="an odd number of channels of a group, above 1"),
    _fault("mP12", "the last group has the weight of the first one", Grouped(channel=_last_group_first),
           ("y", "dx"), when="several groups"),
    _fault("mP13", "the number of groups is ignored: all channels are one group", Grouped(groups=lambda c, groups: 1),
           ("y", "dx", "dw"), when="several groups"),
    _fault("mP14", "each channel is a group, whatever groups says", Grouped(groups=lambda c, groups: c.C),
           ("y", "dx", "dw"), source="flagos-ai/FlagGems#1057", when="several channels of a group"),
    _fault("mP15", "x^2 in fp16", Grouped(rstd=_squares_in_half), _RSTD, source="tenstorrent/tt-metal#26622"),
    _fault("mP16", "silu is applied before weight and bias", Grouped(
           silu=True, output=lambda c: c.xh * torch.sigmoid(c.xh) * c.w + c.b), ("y",)),
    _fault("mP17", "silu is applied, though none is declared", _SILU, ("y", "dx", "dw", "db"),
           model=Grouped().declared),
    _fault("mP18", "silu is not applied, though it is declared", Grouped(), ("y", "dx", "dw", "db"),
           model=_SILU.declared),
    _fault("mP19", "the backward leaves silu out", Grouped(silu=True, cotangent=lambda c: c.dy), ("dx", "dw", "db")),
    _fault("mP20", "the slope of silu is its sigmoid alone", Grouped(
           silu=True, cotangent=lambda c: c.dy * torch.sigmoid(c.z)), ("dx", "dw", "db")),
    _fault("mP21", "the slope of silu is that at xhat, without weight and bias", Grouped(
           silu=True, cotangent=lambda c: c.dy * (s := torch.sigmoid(c.xh)) * (1 + c.xh * (1 - s))),
           ("dx", "dw", "db")),
    _fault("mP22", "the norm is rounded before silu, though once is declared", Grouped(silu=True, each=True),
           ("y", "dx", "dw", "db"), model=_SILU.declared, dtypes=HALF),
    _fault("mP23", "dw is the mean over the channels of a group", Grouped(
           dw=lambda c: _per_group(c, c.dz * c.xh)), ("dw",), when="several channels of a group"),
    _fault("mP24", "dw misses the last sample", Grouped(dw=lambda c: _without_sample(c, c.dz * c.xh)), ("dw",),
           when="several samples"),
    _fault("mP25", "db is that of the first element of each channel alone", Grouped(
           db=lambda c: c.dz.reshape(c.B, c.C, c.L)[:, :, 0].sum(0)), ("db",), when="L above 1"),
    _fault("mP26", "partial sums of dw are rounded to the dtype of x", Grouped(
           dw=lambda c: chain_in((c.dz * c.xh).reshape(c.B, c.C, c.L).transpose(1, 2).reshape(-1, c.C), c.io)),
           ("dw",), dtypes=HALF, when="many elements of a channel"),
    _fault("mP27", "dx lacks the term of the mean", Grouped(
           dx=lambda c: (c.wd - c.xh * c.mean_of(c.xh * c.wd)) * c.r), ("dx",)),
    _fault("mP28", "dx lacks the term of the variance", Grouped(dx=lambda c: (c.wd - c.mean_of(c.wd)) * c.r), ("dx",)),
    _fault("mP29", "the means of dx are those of a channel, not of its group", Grouped(
           dx=lambda c: (c.wd - c.xh * (c.xh * c.wd).reshape(-1, c.L).mean(1, keepdim=True).expand(-1, c.L)
           .reshape(c.x.shape) - c.mean_of(c.wd)) * c.r), ("dx",), source="linkedin/Liger-Kernel#1376",
           when="several channels of a group"),
    _fault("mP30", "dx forgets the weight", Grouped(weighted=lambda c: c.dz), ("dx",)),
    _fault("mP31", "the bias is never added", Grouped(norm=lambda c: c.xh * c.w), ("y",), when="a bias"),
    _fault("mP32", "the bias has the channel of the next element", Grouped(
           bias_channel=lambda c: (c.elements() // c.L + 1) % c.C), ("y",), when="a bias of several channels"),
)  # fmt: skip

IMPLEMENTATIONS = (*CONTROLS, *implementations(MUTANTS))
