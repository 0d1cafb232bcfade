"""Modulated norms of a sum with a residual: their correct kernels, and faults of the gate, the sum and gradients.

``GatedAdding`` puts the steps of the sum around a kernel of ``modulated.py``, which norms it. A variant states the
steps that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import HALF, chain_in, packed, rounded, truncated
from normcheck.audit.mutants.modulated import RAGGED, SEVERAL, TILE, plain_norm
from normcheck.audit.mutants.modulated_kernel import Modulated
from normcheck.audit.mutants.mutant import READ_BEYOND, Mutant, implementations
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.MODULATED_ADD)


@dataclass(kw_only=True)
class Sum:
    """One call: ``x``, ``residual`` (B, S, N) and ``gate`` (B, N) as given; ``wide`` and ``stored``, the sum in fp32
    and as residual_out. Of a backward ``own``, the norm's dx, ``added``, the cotangent of the sum, and ``ds``.
    """

    x: Tensor
    residual: Tensor
    gate: Tensor
    wide: Tensor
    stored: Tensor
    own: Tensor
    added: Tensor
    ds: Tensor

    @property
    def rows(self) -> Tensor:
        """The gate of each row, (B, S, N), in fp32."""
        return self.gate.float()[:, None].expand(self.x.shape)

    @property
    def numbers(self) -> Tensor:
        """The number of each row of the case, (B, S)."""
        samples, of_sample = self.x.shape[:2]
        return torch.arange(samples * of_sample, device=self.x.device).view(samples, of_sample)


Step = Callable[[Sum], Tensor]
_ONCE = Modulated()


def _product_rounded(s: Sum) -> Tensor:
    """The product in the dtype of x; with a gate in fp32 torch has it in fp32."""
    product = s.rows * s.x.float()
    return rounded(product, s.x.dtype) if s.gate.dtype == s.x.dtype else product


@dataclass(frozen=True, kw_only=True)
class GatedAdding:
    """The steps around a ``kernel``; the defaults are those of a clean one that norms the stored sum.

    ``normed`` is what forward norms, ``again`` what backward does; ``add`` makes the sum in fp32 of ``product``.
    ``declares`` is the convention of the sum, as a model.
    """

    kernel: Modulated = _ONCE
    product: Step = lambda s: s.rows * s.x.float()
    add: Callable[[Sum, Tensor], Tensor] = lambda s, product: s.residual.float() + product
    store: Step = lambda s: s.wide.to(s.residual.dtype)
    normed: Step = lambda s: s.stored
    again: Step = lambda s: s.stored
    total: Step = lambda s: s.own + s.added
    dresidual: Step = lambda s: s.ds
    dx: Step = lambda s: s.rows * s.ds
    dgate: Step = lambda s: (s.ds * s.x.float()).sum(1)
    declares: tuple[tuple[str, str], ...] = (("sum", "rounded"), ("round_gated", "none"))

    def _sum(self, x: Tensor, residual: Tensor, gate: Tensor) -> Sum:
        s = Sum(x=x, residual=residual, gate=gate, **dict.fromkeys(("wide", "stored", "own", "added", "ds"), x))
        s.wide = self.add(s, self.product(s))
        s.stored = self.store(s)
        return s

    def forward(
        self,
        x: Tensor,
        weight: None,
        bias: None,
        *,
        eps: float,
        residual: Tensor,
        residual_gate: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> dict[str, Tensor]:
        """The forward of an op, as ``Implementation.forward``."""
        s = self._sum(x, residual, residual_gate)
        own = self.kernel.forward(self.normed(s), weight, bias, eps=eps, scale=scale, shift=shift, io=x.dtype)
        return {**own, "residual_out": s.stored}

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: None,
        bias: None,
        saved: Mapping[str, Tensor],
        *,
        eps: float,
        residual: Tensor,
        residual_gate: Tensor,
        dresidual_out: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> dict[str, Tensor]:
        """The backward of an op, as ``Implementation.backward``."""
        s = self._sum(x, residual, residual_gate)
        s.stored, s.added = saved["residual_out"], dresidual_out.float()
        both: dict[str, Any] = {"eps": eps, "scale": scale, "shift": shift, "io": x.dtype}
        own = self.kernel.backward(dy, self.again(s).float(), weight, bias, saved, **both)
        s.own = own["dx"]
        s.ds = self.total(s)
        of_sum = {"dx": self.dx(s).to(x.dtype), "dresidual": self.dresidual(s).to(residual.dtype)}
        return {**own, **of_sum, "dresidual_gate": self.dgate(s).to(residual_gate.dtype)}

    @property
    def declared(self) -> dict[str, Any]:
        """The convention as a model."""
        return {**self.kernel.declared, **dict(self.declares)}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        kernel = replace(self, kernel=replace(self.kernel, centered=table.OPS[op].centered))
        own = {"model": self.declared, "residual_dtypes": ("io", "fp32"), **fields}
        return Implementation(name=name, op=op, forward=kernel.forward, backward=kernel.backward, **own)


# --- Correct kernels.

_EACH = Modulated(each=True, round_factor=True)
_EXACT: dict[str, Any] = {"normed": lambda s: s.wide, "declares": (("sum", "exact"), ("round_gated", "none"))}
_OF_EAGER: dict[str, Any] = {
    "kernel": _EACH,
    "product": _product_rounded,
    "declares": (("sum", "rounded"), ("round_gated", "io")),
}


def _fma(s: Sum, product: Tensor) -> Tensor:
    """The sum with an exact product, rounded once."""
    return (s.residual.double() + s.rows.double() * s.x.double()).float()


_RIGHT: Mapping[str, GatedAdding] = {
    "gated_add": GatedAdding(),
    "gated_add_exact": GatedAdding(again=lambda s: s.wide, **_EXACT),
    "gated_add_exact_stored_backward": GatedAdding(**_EXACT),
    "gated_add_fma": GatedAdding(add=_fma),
    "gated_add_exact_fma": GatedAdding(add=_fma, **_EXACT),
    "gated_add_eager": GatedAdding(**_OF_EAGER),
    "gated_add_product_rounded": GatedAdding(
        product=_product_rounded, declares=(("sum", "rounded"), ("round_gated", "io"))
    ),
    "gated_add_each": GatedAdding(kernel=_EACH),
    "gated_add_ds_stored": GatedAdding(total=lambda s: rounded(s.own + s.added, s.residual.dtype)),
    "gated_add_pairwise": GatedAdding(
        kernel=Modulated(reduce_n=pairwise, reduce_m=pairwise),
        dgate=lambda s: pairwise((s.ds * s.x.float()).transpose(0, 1).reshape(s.x.shape[1], -1)).view(s.gate.shape),
    ),
    "gated_add_sequential": GatedAdding(
        kernel=Modulated(reduce_n=sequential, reduce_m=sequential),
        dgate=lambda s: sequential((s.ds * s.x.float()).transpose(0, 1).reshape(s.x.shape[1], -1)).view(s.gate.shape),
    ),
    "gated_add_in_fp64": GatedAdding(kernel=Modulated(work=torch.float64)),
}

_OPEN = ("gated_add", "gated_add_exact", "gated_add_eager")


def _autograd(op: str) -> Implementation:
    """In fp32 from the sum as it is stored, for autograd."""

    def forward(
        x: Tensor,
        weight: None,
        bias: None,
        *,
        eps: float,
        residual: Tensor,
        residual_gate: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gate, factor, added = (t.float().unsqueeze(1) for t in (residual_gate, scale, shift))
        stored = torch.addcmul(residual.float(), gate, x.float()).to(residual.dtype)
        return (plain_norm(op, stored, eps) * (1 + factor) + added).to(x.dtype), stored

    return Implementation(name="gated_add_autograd", op=op, forward=forward, residual_dtypes=("io", "fp32"))


def _autograd_eager(op: str) -> Implementation:
    """As a block of DiT is written; the residual has the dtype of x."""

    def forward(
        x: Tensor,
        weight: None,
        bias: None,
        *,
        eps: float,
        residual: Tensor,
        residual_gate: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> tuple[Tensor, Tensor]:
        stored = (residual + residual_gate.unsqueeze(1) * x).to(x.dtype)
        normed = plain_norm(op, stored, eps).to(x.dtype)
        return (normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)).to(x.dtype), stored

    return Implementation(name="gated_add_autograd_eager", op=op, forward=forward)


CONTROLS = (
    *(kernel.implementation(name, op) for name, kernel in _RIGHT.items() for op in OPS),
    *(_RIGHT[name].implementation(f"{name}_open", op, model={}) for name in _OPEN for op in OPS),
    *(make(op) for make in (_autograd, _autograd_eager) for op in OPS),
)

# --- Faults.


def _of_rows(s: Sum, sample: Tensor) -> Tensor:
    """The gates of these samples, (B, S), for each row."""
    return s.gate.float()[sample]


def _next(s: Sum) -> Tensor:
    """The gate of the next sample, for each row."""
    return s.rows.roll(-1, 0)


def _of_row(s: Sum) -> Tensor:
    """The gate whose number is that of the row."""
    return _of_rows(s, s.numbers % s.gate.shape[0])


def _of_tile(s: Sum) -> Tensor:
    """The gate of the first row of each tile, for all of its rows."""
    return _of_rows(s, s.numbers // TILE * TILE // max(s.x.shape[1], 1))


def _packed(s: Sum) -> Tensor:
    """The gate read as if its rows lay one behind the other."""
    return packed(s.gate).float()[:, None].expand(s.x.shape)


def _fault(id: str, what: str, outputs: tuple[str, ...], *, model: GatedAdding | None = None, **fields: Any) -> Mutant:
    """A fault whose kernel differs from a clean one by the steps among ``fields``; it declares that of ``model``."""
    steps = {name: fields.pop(name) for name in GatedAdding.__dataclass_fields__ if name in fields}
    kernel = GatedAdding(**steps)
    own = {"source": "invented", "ops": OPS, **fields}
    declared = (model or kernel).declared

    def make(op: str) -> Implementation:
        return kernel.implementation(id, op, model=declared)

    return Mutant(id=id, what=what, make=make, outputs=outputs, **own)


_FORWARD = ("residual_out", "mean", "rstd", "y")

MUTANTS: tuple[Mutant, ...] = (
    _fault("mJ01", "the gate of the first sample is applied to all", _FORWARD,
           product=lambda s: s.rows[:1] * s.x.float(), source="vllm-project/vllm-omni#1537", when=SEVERAL),
    _fault("mJ02", "each sample has the gate of the next one", _FORWARD,
           product=lambda s: _next(s) * s.x.float(), when=SEVERAL),
    _fault("mJ03", "the gate is indexed by rows, not by samples", _FORWARD,
           product=lambda s: _of_row(s) * s.x.float(), when="several samples of several rows"),
    _fault("mJ04", "a tile of rows has the gate of its first row", _FORWARD,
           product=lambda s: _of_tile(s) * s.x.float(), when=RAGGED),
    _fault("mJ05", "the gate multiplies the residual in place of x", _FORWARD,
           product=lambda s: s.x.float(), add=lambda s, product: s.rows * s.residual.float() + product),
    _fault("mJ06", "the gate multiplies the whole sum", _FORWARD, product=lambda s: s.x.float(),
           add=lambda s, product: s.rows * (s.residual.float() + product)),
    _fault("mJ07", "the gate is never applied", _FORWARD, product=lambda s: s.x.float()),
    _fault("mJ08", "1 + gate is applied, as scale is", _FORWARD, product=lambda s: (1 + s.rows) * s.x.float()),
    _fault("mJ09", "x without its gate is in the sum that is stored", ("residual_out",),
           store=lambda s: (s.residual.float() + s.x.float()).to(s.residual.dtype), normed=lambda s: s.wide,
           again=lambda s: s.wide, declares=(("sum", "exact"), ("round_gated", "none"))),
    _fault("mJ10", "the sum without the gate is normed", ("mean", "rstd", "y"),
           normed=lambda s: s.residual.float() + s.x.float()),
    _fault("mJ11", "the residual is stored in place of the sum", ("residual_out",), store=lambda s: s.residual.clone(),
           normed=lambda s: s.wide, again=lambda s: s.wide, declares=(("sum", "exact"), ("round_gated", "none"))),
    _fault("mJ12", "the product is stored without the residual", ("residual_out",),
           store=lambda s: (s.rows * s.x.float()).to(s.residual.dtype), normed=lambda s: s.wide,
           again=lambda s: s.wide, declares=(("sum", "exact"), ("round_gated", "none"))),
    _fault("mJ13", "the sum is rounded toward zero", ("residual_out", "y"), dtypes=HALF,
           store=lambda s: truncated(s.wide, s.residual.dtype).to(s.residual.dtype),
           when="a residual in half precision"),
    _fault("mJ14", "the product is rounded to the dtype of x, though fp32 is declared", ("residual_out", "y"),
           product=_product_rounded, dtypes=HALF, when="a gate in the dtype of x"),
    _fault("mJ15", "the product is in fp32, though its rounding is declared", ("residual_out", "y"), dtypes=HALF,
           model=GatedAdding(declares=(("sum", "rounded"), ("round_gated", "io"))), when="a gate in the dtype of x"),
    _fault("mJ16", "norms the sum before it is stored, though the stored one is declared", ("y",), dtypes=HALF,
           normed=lambda s: s.wide, when="a residual in half precision"),
    _fault("mJ17", "the gate is rounded to bf16", ("residual_out", "y"),
           product=lambda s: rounded(s.rows, torch.bfloat16) * s.x.float(), source="NVIDIA/TensorRT-LLM#14773",
           when="a gate that is not in bf16"),
    _fault("mJ18", "the row stride of the gate is ignored: its rows are read as packed", _FORWARD,
           product=lambda s: _packed(s) * s.x.float(), kinds=READ_BEYOND,
           when="a strided gate of several samples"),
    _fault("mJ19", "dx is not multiplied by the gate", ("dx",), dx=lambda s: s.ds),
    _fault("mJ20", "dresidual is multiplied by the gate", ("dresidual",), dresidual=lambda s: s.rows * s.ds),
    _fault("mJ21", "dresidual misses the cotangent of the sum", ("dresidual",), dresidual=lambda s: s.own),
    _fault("mJ22", "the cotangent of the sum is in no gradient", ("dx", "dresidual", "dresidual_gate"),
           total=lambda s: s.own),
    _fault("mJ23", "dx misses the cotangent of the sum", ("dx",), dx=lambda s: s.rows * s.own),
    _fault("mJ24", "dresidual_gate misses the cotangent of the sum", ("dresidual_gate",),
           dgate=lambda s: (s.own * s.x.float()).sum(1)),
    _fault("mJ25", "dx has the gate of the next sample", ("dx",), dx=lambda s: _next(s) * s.ds, when=SEVERAL),
    _fault("mJ26", "dresidual_gate is summed over the rows of all samples", ("dresidual_gate",),
           dgate=lambda s: (s.ds * s.x.float()).sum((0, 1)).expand(s.gate.shape), when=SEVERAL),
    _fault("mJ27", "dresidual_gate is summed from the sum in place of x", ("dresidual_gate",),
           dgate=lambda s: (s.ds * s.stored.float()).sum(1)),
    _fault("mJ28", "dresidual_gate misses the rows of a sample that fill no tile", ("dresidual_gate",),
           dgate=lambda s: (s.ds * s.x.float())[:, : s.x.shape[1] // TILE * TILE or s.x.shape[1]].sum(1),
           when="S above 8, and S % 8 != 0"),
    _fault("mJ29", "partial sums of dresidual_gate are rounded to the dtype of x", ("dresidual_gate",), dtypes=HALF,
           dgate=lambda s: chain_in((s.ds * s.x.float()).transpose(0, 1).reshape(s.x.shape[1], -1), s.x.dtype)
           .view(s.gate.shape), when="many rows of a sample"),
    _fault("mJ30", "backward takes the residual for the sum", ("dx", "dresidual", "dscale", "dresidual_gate"),
           again=lambda s: s.residual),
    _fault("mJ31", "backward takes x for the sum", ("dx", "dresidual", "dscale", "dresidual_gate"),
           again=lambda s: s.x),
)  # fmt: skip

IMPLEMENTATIONS = (*CONTROLS, *implementations(MUTANTS))
