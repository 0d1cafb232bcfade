"""A norm kernel as a chain of small steps, so that a variant or a fault only states the few steps that it changes.

``Kernel`` holds the steps, ``KernelCall`` the results of one call so far; each step reads them and returns a tensor.
``Kernel()`` is the clean kernel: fp32 inside, two passes, centred y and dx, one rounding per store, and a backward that
takes the saved statistics and bits instead of computing them again. Every tensor is made on the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from normcheck.cases import ops
from normcheck.cases.op import Op
from normcheck.cases.ops import names_of
from normcheck.impls.implementation import Implementation

LLAMA = names_of(lambda op: op.rounds_xhat)
GEMMA = names_of(lambda op: op.of_models and op.zero_centered)
"""The two castings of models. ``casting.py`` has their correct kernels and faults."""

OPS = names_of(lambda op: op.name not in (*LLAMA, *GEMMA))
"""All other ops: the default for the ops that a fault is planted in."""


def _others(holds: Callable[[Op], bool]) -> tuple[str, ...]:
    return tuple(name for name in OPS if holds(ops.OPS[name]))


LAYERNORMS = _others(lambda op: op.centered)
RMSNORMS = _others(lambda op: not op.centered)
ZERO_CENTERED = _others(lambda op: op.zero_centered)
RELU = _others(lambda op: op.clamped)

HALF = ("fp16", "bf16")

BOTH = (False, True)
"""``weights`` of a kernel that is called without a weight as well."""

TILE = 8
"""Rows per program of a tiled kernel."""


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t rounded to the values that a store in ``dtype`` keeps, in its own dtype."""
    return t.to(dtype).to(t.dtype)


def chain_in(t: Tensor, dtype: torch.dtype) -> Tensor:
    """(K, L) -> (L,): the rows added one by one, with every partial sum rounded to ``dtype``."""
    total = torch.zeros_like(t[0]) if len(t) else t.sum(0)
    for row in t.unbind(0):
        total = rounded(total + row, dtype)
    return total


def truncated(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in ``dtype``, rounded toward zero if that has 16 bits, else to nearest."""
    nearest = t.to(dtype)
    if dtype not in (torch.float16, torch.bfloat16):
        return nearest
    # The formats are sign and magnitude: one less as an integer is one step toward zero, for either sign.
    step = (nearest.to(t.dtype).abs() > t.abs()).to(torch.int16)
    return (nearest.view(torch.int16) - step).view(dtype)


def _places(bits: Tensor, msb_first: bool) -> Tensor:
    """The shift of each of the eight bits of a byte."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return places.flip(0) if msb_first else places


def pack(bits: Tensor, *, msb_first: bool = False) -> Tensor:
    """bool (M, N) -> uint8 (M, ceil(N / 8)), least significant bit first unless said otherwise."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8))
    return (padded.view(-1, padded.shape[1] // 8, 8) << _places(bits, msb_first)).sum(2, dtype=torch.uint8)


def unpack(mask: Tensor, n: int, *, msb_first: bool = False) -> Tensor:
    """The bool (M, n) that ``pack`` packed; a bool mask as it is."""
    if mask.dtype == torch.bool:
        return mask.reshape(-1, n)
    mask = mask.reshape(-1, (n + 7) // 8)
    return ((mask[:, :, None] >> _places(mask, msb_first)) & 1).bool().flatten(1)[:, :n]


def packed(t: Tensor) -> Tensor:
    """``t`` read as if it were packed: row i begins at i times the columns, whatever the strides are."""
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride())


def only(t: Tensor, *region: EllipsisType | slice) -> Tensor:
    """A copy of t in which only ``region`` is stored: the rest is uninitialised memory of torch.empty."""
    out = torch.empty_like(t)
    out[region] = t[region]
    return out


def full_tiles(t: Tensor) -> Tensor:
    """t (M, N) with the rows of a last, partial tile not stored."""
    return only(t, slice(len(t) // TILE * TILE))


@dataclass(kw_only=True)
class KernelCall:
    """One call of a kernel: the inputs in the kernel's own precision, and every step's result under its name.

    Shapes: x, xc, xh, dy, wd, z, y, bits (M, N); m, v, r, c1, c2 (M, 1); w, g, b (N,). Without centring m and c2 are 0.
    ``of_x``: the dtype of x if ``x_io`` is a sum, which may have another one; None: that of ``x_io``.
    """

    kernel: Kernel
    op: str
    x_io: Tensor
    w_io: Tensor | None
    b_io: Tensor | None
    eps: float
    options: Mapping[str, float]
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    dy_io: Tensor | None = None
    of_x: torch.dtype | None = None

    m: Tensor = field(init=False)
    xc: Tensor = field(init=False)
    v: Tensor = field(init=False)
    r: Tensor = field(init=False)
    g: Tensor = field(init=False)
    xh: Tensor = field(init=False)
    z: Tensor = field(init=False)
    y: Tensor = field(init=False)
    bits: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    wd: Tensor = field(init=False)
    c1: Tensor = field(init=False)
    c2: Tensor = field(init=False)

    def __post_init__(self) -> None:
        work = self.kernel.work
        self.N = self.x_io.shape[-1]
        self.x = self.kernel.load(self.x_io, "x").reshape(-1, self.N).to(work)
        self.M = len(self.x)
        self.w = self.x.new_full((self.N,), 0.0 if self.facts.zero_centered else 1.0)  # so gamma is 1 without a weight
        if self.w_io is not None:
            self.w = self.w_io.to(work)
        self.b = None if self.b_io is None else self.b_io.to(work)
        self.lo = self.options.get("lower_clip", float("-inf"))
        self.hi = self.options.get("upper_clip", float("inf"))
        self.zeros = torch.zeros(self.M, 1, dtype=work, device=self.x.device)

    @property
    def io(self) -> torch.dtype:
        """The dtype of x, y and dy, and of dx unless x is a sum."""
        return self.of_x or self.x_io.dtype

    @property
    def facts(self) -> Op:
        """The op's row in the table of ops."""
        return ops.OPS[self.op]

    @property
    def centered(self) -> bool:
        """Whether the op subtracts a mean."""
        return self.facts.centered

    @property
    def relu(self) -> bool:
        """Whether the op clips and saves bits."""
        return self.facts.clamped

    @property
    def block(self) -> int:
        """The padded row of a kernel that holds it in one block: the next power of two."""
        return 1 << (self.N - 1).bit_length()

    def sum_n(self, t: Tensor) -> Tensor:
        """(M, N) -> (M, 1) in the kernel's order."""
        return self.kernel.reduce_n(t.t())[:, None]

    def mean_n(self, t: Tensor) -> Tensor:
        """(M, N) -> (M, 1): the sum over N, divided by N in the kernel's way."""
        return self.kernel.over_n(self.sum_n(t), self.N)

    def sum_m(self, t: Tensor) -> Tensor:
        """(M, N) -> (N,) in the kernel's order."""
        return self.kernel.reduce_m(t)

    def one_plus(self, w: Tensor) -> Tensor:
        """gamma of the op from w."""
        return 1 + w if self.facts.zero_centered else w

    def cast(self, xhat: Tensor) -> Tensor:
        """xhat as the op multiplies it by gamma and by dy: rounded to the io dtype if the op says so."""
        return rounded(xhat, self.io) if self.facts.rounds_xhat else xhat

    def plus_b(self, p: Tensor) -> Tensor:
        """p + bias; p itself without a bias."""
        return p if self.b is None else p + self.b


Step = Callable[[KernelCall], Tensor]


def mean_in_io(c: KernelCall, t: Tensor) -> Tensor:
    """(M, N) -> (M, 1): the mean over N, with every partial sum rounded to the io dtype."""
    return chain_in(t.t(), c.io)[:, None] / c.N


def _store(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return t.to(dtype)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The steps of a kernel; the defaults are those of the clean kernel.

    ``load(tensor, name)`` reads x and dy. ``reduce_n`` and ``reduce_m`` sum a (K, L) tensor over K. ``store(call,
    tensor, dtype, name)`` stores one of y, dx, dw and db. ``finish(call, outputs)`` is the last step of forward and of
    backward, and returns the outputs.
    """

    work: torch.dtype = torch.float32
    load: Callable[[Tensor, str], Tensor] = lambda t, name: t
    reduce_n: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    reduce_m: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    over_n: Callable[[Tensor, int], Tensor] = lambda s, n: s / n
    store: Callable[[KernelCall, Tensor, torch.dtype, str], Tensor] = _store
    finish: Callable[[KernelCall, dict[str, Tensor]], dict[str, Tensor]] = lambda c, out: out
    packed: bool = True
    # Forward, in this order.
    mean: Step = lambda c: c.mean_n(c.x)
    center: Step = lambda c: c.x - c.m
    variance: Step = lambda c: c.mean_n(c.xc * c.xc)
    rstd: Step = lambda c: 1 / torch.sqrt(c.v + c.eps)
    gamma: Step = lambda c: c.one_plus(c.w)
    xhat: Step = lambda c: c.cast(c.xc * c.r)
    preact: Step = lambda c: c.plus_b(c.xh * c.g)
    clip: Step = lambda c: c.z.clamp(c.lo, c.hi)
    mask: Step = lambda c: (c.z > c.lo) & (c.z < c.hi)
    mask_out: Step = lambda c: pack(c.bits) if c.kernel.packed else c.bits
    mean_out: Step = lambda c: c.m.float()
    rstd_out: Step = lambda c: c.r.float()
    # Backward, in this order.
    mask_in: Step = lambda c: unpack(c.saved["bitmask"], c.N)
    masked: Step = lambda c: torch.where(c.bits, c.dy, 0)
    center_b: Step = lambda c: c.x - c.m
    xhat_b: Step = lambda c: c.xc * c.r
    gamma_b: Step = lambda c: c.one_plus(c.w)
    wdy: Step = lambda c: c.dy * c.g
    mean1: Step = lambda c: c.mean_n(c.xh * c.wd)
    mean2: Step = lambda c: c.mean_n(c.wd)
    dx: Step = lambda c: (c.wd - (c.xh * c.c1 + c.c2)) * c.r
    dw: Step = lambda c: c.sum_m(c.dy * c.cast(c.xh))
    db: Step = lambda c: c.sum_m(c.dy)

    def forward(
        self,
        op: str,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        of_x: torch.dtype | None = None,
        **options: float,
    ) -> Any:
        """The forward of an op, as ``Implementation.forward``; ``of_x``: see ``KernelCall``."""
        c = KernelCall(kernel=self, op=op, x_io=x, w_io=weight, b_io=bias, eps=eps, options=options, of_x=of_x)
        c.m = self.mean(c) if c.centered else c.zeros
        c.xc = self.center(c)
        c.v = self.variance(c)
        c.r = self.rstd(c)
        c.g = self.gamma(c)
        c.xh = self.xhat(c)
        c.z = self.preact(c)
        c.y = self.clip(c) if c.relu else c.z
        out = {"y": self.store(c, c.y, c.io, "y").reshape(x.shape), "rstd": self.rstd_out(c)}
        if c.centered:
            out["mean"] = self.mean_out(c)
        if c.relu:
            c.bits = self.mask(c)
            out["bitmask"] = self.mask_out(c)
        return self.finish(c, out)

    def backward(
        self,
        op: str,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        saved: Mapping[str, Tensor],
        eps: float,
        of_x: torch.dtype | None = None,
        **options: float,
    ) -> Any:
        """The backward of an op, as ``Implementation.backward``; ``of_x``: see ``KernelCall``."""
        c = KernelCall(
            kernel=self, op=op, x_io=x, w_io=weight, b_io=bias, eps=eps, options=options, saved=saved, dy_io=dy,
            of_x=of_x,
        )  # fmt: skip
        c.dy = self.load(dy, "dy").reshape(-1, c.N).to(self.work)
        c.m = saved["mean"].reshape(-1, 1).to(self.work) if c.centered else c.zeros
        c.r = saved["rstd"].reshape(-1, 1).to(self.work)
        if c.relu:
            c.bits = self.mask_in(c)
            c.dy = self.masked(c)
        c.xc = self.center_b(c)
        c.xh = self.xhat_b(c)
        c.g = self.gamma_b(c)
        c.wd = self.wdy(c)
        c.c1 = self.mean1(c)
        c.c2 = self.mean2(c) if c.centered else c.zeros
        out = {"dx": self.store(c, self.dx(c), x.dtype, "dx").reshape(x.shape)}
        if weight is not None:
            out["dw"] = self.store(c, self.dw(c), weight.dtype, "dw")
        if bias is not None:
            out["db"] = self.store(c, self.db(c), bias.dtype, "db")
        return self.finish(c, out)

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``. It is of torch's own steps: it builds nothing."""

        def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **options: Any) -> Any:
            return self.forward(op, x, weight, bias, eps, **options)

        def backward(
            dy: Tensor,
            x: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            saved: Any,
            *,
            eps: float,
            **options: Any,
        ) -> Any:
            return self.backward(op, dy, x, weight, bias, saved, eps, **options)

        return Implementation(name=name, op=op, forward=forward, backward=backward, builds=False, **fields)


CLEAN = Kernel()
"""The clean kernel."""
