"""Modulated norms: their correct kernels on both sides of each convention, and faults of samples, scale and shift.

``Modulated`` is a kernel of steps, as ``kernel.py`` has them for plain norms. A variant states those that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import HALF, chain_in, packed, rounded
from normcheck.audit.mutants.mutant import READ_BEYOND, Mutant, implementations, mutant_of
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.MODULATED)
TILE = 8  # rows that a faulty kernel takes at a time


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
    p = c.xh * c.f
    return c.narrow(p) if (c.scale_io.dtype == c.io or c.kernel.round_wide) and not c.kernel.fused else p


def _mean(c: Call, t: Tensor) -> Tensor:
    return (c.kernel.reduce_n(t.t()) / c.N)[:, None]


def _centred(c: Call) -> Tensor:
    return c.x if c.m is None else c.x - c.m


def _rstd(c: Call) -> Tensor:
    xc = _centred(c)
    return torch.rsqrt(_mean(c, xc * xc) + c.eps)


def _dx(c: Call) -> Tensor:
    dx = c.wd - c.xh * _mean(c, c.xh * c.wd)
    return (dx if c.m is None else dx - _mean(c, c.wd)) * c.r


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
    work: torch.dtype = torch.float32
    reduce_n: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    reduce_m: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    samples: Step = lambda c: c.rows // max(c.S, 1)
    read_scale: Step = lambda c: c.scale_io
    read_shift: Step = lambda c: c.shift_io
    mean: Step = lambda c: _mean(c, c.x)
    rstd: Step = _rstd
    xhat: Step = lambda c: c.narrow(_centred(c) * c.r)
    factor: Step = _factor
    product: Step = _product
    output: Step = lambda c: c.p + c.t[c.sample]
    # Backward, in this order.
    factor_b: Step = _factor
    norm_b: Step = lambda c: _centred(c) * c.r
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
        return {"rounding": rounding, "round_factor": "io" if self.round_factor else "none"}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        kernel, own = replace(self, centered=table.OPS[op].centered), {"model": self.declared, **fields}
        return Implementation(name=name, op=op, forward=kernel.forward, backward=kernel.backward, **own)


# --- Correct kernels.

_RIGHT: Mapping[str, Modulated] = {
    "modulated": Modulated(),
    "modulated_factor": Modulated(round_factor=True),
    "modulated_each": Modulated(each=True, round_factor=True),
    "modulated_each_fp32_factor": Modulated(each=True),
    "modulated_each_rounds_wide": Modulated(each=True, round_factor=True, round_wide=True),
    "modulated_normed": Modulated(each=True, fused=True),
    "modulated_normed_factor": Modulated(each=True, fused=True, round_factor=True),
    "modulated_normed_plus": Modulated(each=True, fused=True, product=lambda c: c.xh + c.xh * c.s[c.sample]),
    "modulated_xhat_plus": Modulated(product=lambda c: c.xh + c.xh * c.s[c.sample]),
    "modulated_dy_plus": Modulated(cotangent=lambda c: c.dy + c.dy * c.s[c.sample]),
    "modulated_rstd_in_factor": Modulated(product=lambda c: _centred(c) * (c.r * c.f)),
    "modulated_pairwise": Modulated(reduce_n=pairwise, reduce_m=pairwise),
    "modulated_sequential": Modulated(reduce_n=sequential, reduce_m=sequential),
    "modulated_each_sequential": Modulated(each=True, round_factor=True, reduce_n=sequential, reduce_m=sequential),
    "modulated_in_fp64": Modulated(work=torch.float64),
    "modulated_each_in_fp64": Modulated(each=True, round_factor=True, work=torch.float64),
}

_OPEN = ("modulated", "modulated_factor", "modulated_normed", "modulated_each", "modulated_each_fp32_factor")


def plain_norm(op: str, x: Tensor, eps: float) -> Tensor:
    """The norm of ``x`` in fp32, as models write it, for autograd."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True) if table.OPS[op].centered else wide
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)


def _eager(op: str) -> Callable[..., Tensor]:
    """As a model that computes in fp32 is written, for autograd."""

    def forward(x: Tensor, weight: None, bias: None, *, eps: float, scale: Tensor, shift: Tensor) -> Tensor:
        return (plain_norm(op, x, eps) * (1 + scale.float()).unsqueeze(1) + shift.float().unsqueeze(1)).to(x.dtype)

    return forward


def _eager_each(op: str) -> Callable[..., Tensor]:
    """As DiT is written; with a scale in fp32 y is in fp32 as well."""

    def forward(x: Tensor, weight: None, bias: None, *, eps: float, scale: Tensor, shift: Tensor) -> Tensor:
        return plain_norm(op, x, eps).to(x.dtype) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    return forward


def _eager_addcmul(op: str) -> Callable[..., Tensor]:
    """The shift, and xhat with its product with scale, by one function of torch each."""

    def forward(x: Tensor, weight: None, bias: None, *, eps: float, scale: Tensor, shift: Tensor) -> Tensor:
        xhat = plain_norm(op, x, eps)
        return (torch.addcmul(xhat, xhat, scale.float()[:, None]) + shift.float()[:, None]).to(x.dtype)

    return forward


def _eager_repeated(op: str) -> Callable[..., Tensor]:
    """Scale and shift of each row are made first."""

    def forward(x: Tensor, weight: None, bias: None, *, eps: float, scale: Tensor, shift: Tensor) -> Tensor:
        factor, added = (t.float().repeat_interleave(x.shape[1], 0).view(x.shape) for t in (scale + 0.0, shift))
        return (plain_norm(op, x, eps) * (1 + factor) + added).to(x.dtype)

    return forward


_EAGER: Mapping[str, Callable[[str], Callable[..., Tensor]]] = {
    "modulated_eager": _eager,
    "modulated_eager_each": _eager_each,
    "modulated_eager_addcmul": _eager_addcmul,
    "modulated_eager_repeated": _eager_repeated,
}

CONTROLS = (
    *(kernel.implementation(name, op) for name, kernel in _RIGHT.items() for op in OPS),
    *(_RIGHT[name].implementation(f"{name}_open", op, model={}) for name in _OPEN for op in OPS),
    *(Implementation(name=name, op=op, forward=make(op)) for name, make in _EAGER.items() for op in OPS),
)

# --- Faults.


def _of_tile(c: Call) -> Tensor:
    """The sample of the first row of each tile, for all of its rows."""
    return c.rows // TILE * TILE // max(c.S, 1)


def _padded_samples(c: Call) -> Tensor:
    """As if each sample began at a whole tile."""
    return (c.rows // max(-(-c.S // TILE) * TILE, 1)).clamp(max=c.B - 1)


def _next_sample(c: Call) -> Tensor:
    return (c.rows // max(c.S, 1) + 1) % c.B


def _factor_in_bf16(c: Call) -> Tensor:
    return rounded(1 + c.s, torch.bfloat16)[c.sample]


def _without_tail(c: Call, t: Tensor) -> Tensor:
    """The sum over the rows of each sample that fill a tile; over all if none does."""
    whole = t.reshape(c.B, c.S, c.N)
    return whole[:, : c.S // TILE * TILE].sum(1) if c.S > TILE else whole.sum(1)


def _by_tiles(c: Call, t: Tensor) -> Tensor:
    """Sums of tiles of rows, each added to the sample of its first row."""
    return torch.zeros_like(c.s).index_add_(0, _of_tile(c), t)


def _of_first(t: Tensor) -> Tensor:
    return torch.cat((t[:1], torch.zeros_like(t[1:])))


def _all_rows(c: Call, t: Tensor) -> Tensor:
    return t.sum(0).expand(c.B, -1)


_fault = partial(mutant_of, ops=OPS)

_ONCE, _EACH = Modulated().declared, Modulated(each=True, round_factor=True).declared
SEVERAL, RAGGED = "several samples", "several samples of S % 8 != 0 rows"

MUTANTS: tuple[Mutant, ...] = (
    _fault("mM01", "every sample has the scale and the shift of the first one", Modulated(
           samples=lambda c: c.rows * 0), ("y", "dx"), source="vllm-project/vllm-omni#1537", when=SEVERAL),
    _fault("mM02", "scale and shift are swapped", Modulated(read_scale=lambda c: c.shift_io,
           read_shift=lambda c: c.scale_io), ("y", "dx"), source="AMD-AGI/Primus#1087"),
    _fault("mM03", "a tile of rows has the scale and the shift of its first row", Modulated(samples=_of_tile),
           ("y", "dx"), when=RAGGED),
    _fault("mM04", "the sample of a row is counted as if each began at a whole tile",
           Modulated(samples=_padded_samples), ("y", "dx"), when=RAGGED),
    _fault("mM05", "each sample has the scale and the shift of the next one", Modulated(samples=_next_sample),
           ("y", "dx"), when=SEVERAL),
    _fault("mM06", "scale is the factor, not 1 + scale", Modulated(factor=lambda c: c.s[c.sample],
           factor_b=lambda c: c.s[c.sample]), ("y", "dx")),
    _fault("mM07", "2 + scale is the factor", Modulated(factor=lambda c: 2 + c.s[c.sample],
           factor_b=lambda c: 2 + c.s[c.sample]), ("y", "dx")),
    _fault("mM08", "1 + scale is rounded to bf16, though fp32 is declared", Modulated(
           factor=_factor_in_bf16, factor_b=_factor_in_bf16), ("y", "dx"), source="NVIDIA/TransformerEngine#789"),
    _fault("mM09", "scale and shift are rounded to bf16", Modulated(
           read_scale=lambda c: rounded(c.scale_io, torch.bfloat16),
           read_shift=lambda c: rounded(c.shift_io, torch.bfloat16)), ("y", "dx"),
           source="NVIDIA/TensorRT-LLM#14773", when="scale and shift are not in bf16"),
    _fault("mM10", "the shift is never added", Modulated(output=lambda c: c.p), ("y",)),
    _fault("mM11", "the shift is added before the product", Modulated(product=lambda c: (c.xh + c.t[c.sample]) * c.f,
           output=lambda c: c.p), ("y",)),
    _fault("mM12", "the row stride of scale is ignored: its rows are read as packed",
           Modulated(read_scale=lambda c: packed(c.scale_io)), ("y", "dx"), kinds=READ_BEYOND,
           when="a strided scale of several samples"),
    _fault("mM13", "the row stride of shift is ignored: its rows are read as packed",
           Modulated(read_shift=lambda c: packed(c.shift_io)), ("y",), kinds=READ_BEYOND,
           when="a strided shift of several samples"),
    _fault("mM14", "the statistics are those of a sample, not of a row", Modulated(
           mean=lambda c: _mean(c, c.x).reshape(c.B, c.S).mean(1).repeat_interleave(c.S)[:, None],
           rstd=lambda c: torch.rsqrt(_mean(c, _centred(c).square()).reshape(c.B, c.S).mean(1)
           .repeat_interleave(c.S)[:, None] + c.eps)),
           ("mean", "rstd", "y", "dx", "dscale", "dshift"), when="several rows of a sample"),
    _fault("mM15", "rounds each step, though once is declared", Modulated(each=True), ("y", "dscale"), model=_ONCE,
           dtypes=HALF),
    _fault("mM16", "rounds once, though each step is declared", Modulated(round_factor=True), ("y", "dscale"),
           model=_EACH, dtypes=HALF),
    _fault("mM17", "rounds 1 + scale, though fp32 is declared", Modulated(round_factor=True), ("y", "dx"), model=_ONCE,
           dtypes=HALF, when="scale in the dtype of x"),
    _fault("mM18", "1 + scale in fp32, though its rounding is declared", Modulated(),
           ("y", "dx"), model=Modulated(round_factor=True).declared, dtypes=HALF, when="scale in the dtype of x"),
    _fault("mM19", "dscale of each sample is summed over the rows of all",
           Modulated(dscale=lambda c: _all_rows(c, c.dy * c.xh)), ("dscale",), when=SEVERAL),
    _fault("mM20", "dshift of each sample is summed over the rows of all",
           Modulated(dshift=lambda c: _all_rows(c, c.dy)), ("dshift",), when=SEVERAL),
    _fault("mM21", "dscale and dshift are those of the first sample, 0 for others", Modulated(
           dscale=lambda c: _of_first(c.summed(c.dy * c.xh)), dshift=lambda c: _of_first(c.summed(c.dy))),
           ("dscale", "dshift"), when=SEVERAL),
    _fault("mM22", "dscale is summed in tiles of rows, each added to the sample of its first row",
           Modulated(dscale=lambda c: _by_tiles(c, c.dy * c.xh)), ("dscale",), when=RAGGED),
    _fault("mM23", "dshift misses the rows of a sample that fill no tile",
           Modulated(dshift=lambda c: _without_tail(c, c.dy)), ("dshift",), when="S above 8, and S % 8 != 0"),
    _fault("mM24", "dscale forgets xhat", Modulated(dscale=lambda c: c.summed(c.dy)), ("dscale",)),
    _fault("mM25", "dscale is summed from the product with the factor",
           Modulated(dscale=lambda c: c.summed(c.dy * c.xh * c.f)), ("dscale",)),
    _fault("mM26", "dscale is summed from x", Modulated(dscale=lambda c: c.summed(c.dy * c.x)), ("dscale",)),
    _fault("mM27", "dscale is summed from an xhat that is not rounded, though each step is declared",
           Modulated(each=True, round_factor=True, dscale=lambda c: c.summed(c.dy * c.xh)), ("dscale",), dtypes=HALF,
           when="a scale in fp32, and one row of a sample"),
    _fault("mM28", "partial sums of dscale are rounded to the dtype of x",
           Modulated(dscale=lambda c: chain_in((c.dy * c.xh).reshape(c.B, c.S, c.N).transpose(0, 1).reshape(c.S, -1),
           c.io).reshape(c.B, c.N)), ("dscale",), dtypes=HALF, when="many rows of a sample"),
    _fault("mM29", "dx forgets the factor", Modulated(cotangent=lambda c: c.dy), ("dx",)),
    _fault("mM30", "dx takes scale for the factor", Modulated(cotangent=lambda c: c.dy * c.s[c.sample]), ("dx",)),
    _fault("mM31", "dx has the factor of the first sample", Modulated(factor_b=lambda c: (1 + c.s)[:1].expand_as(c.x)),
           ("dx",), source="vllm-project/vllm-omni#1537", when=SEVERAL),
    _fault("mM32", "dscale and dshift are swapped", Modulated(dscale=lambda c: c.summed(c.dy),
           dshift=lambda c: c.summed(c.dy * c.xh)), ("dscale", "dshift")),
)  # fmt: skip

IMPLEMENTATIONS = (*CONTROLS, *implementations(MUTANTS))
