"""Modulated norms: their correct kernels on both sides of each convention, and faults of samples, scale and shift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import HALF, chain_in, packed, rounded
from normcheck.audit.mutants.modulated_kernel import Call, Modulated, centred_of, mean_of, plus_product_of
from normcheck.audit.mutants.mutant import READ_BEYOND, Mutant, implementations, mutant_of
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.MODULATED)
TILE = 8  # rows that a faulty kernel takes at a time

# --- Correct kernels.

_RIGHT: Mapping[str, Modulated] = {
    "modulated": Modulated(),
    "modulated_factor": Modulated(round_factor=True),
    "modulated_each": Modulated(each=True, round_factor=True),
    "modulated_each_fp32_factor": Modulated(each=True),
    "modulated_each_rounds_wide": Modulated(each=True, round_factor=True, round_wide=True),
    "modulated_apart": Modulated(each=True, apart=True, cotangent=lambda c: plus_product_of(c, c.dy)),
    "modulated_normed": Modulated(each=True, fused=True),
    "modulated_normed_factor": Modulated(each=True, fused=True, round_factor=True),
    "modulated_normed_plus": Modulated(each=True, fused=True, product=lambda c: c.xh + c.xh * c.s[c.sample]),
    "modulated_xhat_plus": Modulated(product=lambda c: c.xh + c.xh * c.s[c.sample]),
    "modulated_dy_plus": Modulated(cotangent=lambda c: c.dy + c.dy * c.s[c.sample]),
    "modulated_rstd_in_factor": Modulated(product=lambda c: centred_of(c) * (c.r * c.f)),
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
           mean=lambda c: mean_of(c, c.x).reshape(c.B, c.S).mean(1).repeat_interleave(c.S)[:, None],
           rstd=lambda c: torch.rsqrt(mean_of(c, centred_of(c).square()).reshape(c.B, c.S).mean(1)
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
    _fault("mM33", "adds the product with scale, though the rounding of 1 + scale is declared",
           Modulated(each=True, apart=True), ("y",), model=_EACH, dtypes=HALF,
           when="scale in the dtype of x"),
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
