"""Ops that add a residual first: their correct kernels, and faults of the sum, of what is stored, and of its cotangent.

``Adding`` puts the steps of a sum around a kernel of ``kernel.py``, which norms it. A variant states the steps that it
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.casting import IN_FP32, IN_IO
from normcheck.audit.mutants.casting import MUTANTS as OF_CASTING
from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import CLEAN, HALF, Kernel, packed, rounded, truncated
from normcheck.audit.mutants.mutant import READ_BEYOND, UNWRITTEN, Mutant, implementations, mutant_of
from normcheck.cases import ops as table
from normcheck.cases.op import Op
from normcheck.cases.ops import FUSED_ADD
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in FUSED_ADD)
LLAMA = tuple(op.name for op in FUSED_ADD if op.rounds_xhat)
GEMMA = tuple(op.name for op in FUSED_ADD if op.zero_centered)
"""The castings of models."""

_VECTOR = 8


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The sum of a call: ``x``, ``residual`` as given, ``wide`` in fp32, ``stored`` as residual_out."""

    x: Tensor
    residual: Tensor
    wide: Tensor
    stored: Tensor


def _added(x: Tensor, residual: Tensor) -> Tensor:
    return x.float() + residual.float()


def _no_more(call: Sum, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs


@dataclass(frozen=True, kw_only=True)
class Adding:
    """A kernel that adds a residual; the defaults are those of a clean one that norms the stored sum.

    ``add`` makes the sum in fp32, ``store`` residual_out of it, ``normed`` what ``kernel`` normalises. ``again`` is the
    sum that backward normalises, ``total`` adds the cotangent of residual_out to the norm's own dx, both in fp32, and
    ``cotangent`` is what the norm's backward gets as dy. ``finish`` is the last step of forward, ``split`` of backward.
    """

    kernel: Kernel = CLEAN
    add: Callable[[Tensor, Tensor], Tensor] = _added
    store: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda wide, x, residual: wide.to(residual.dtype)
    normed: Callable[[Sum], Tensor] = lambda s: s.stored
    again: Callable[[Sum], Tensor] = lambda s: s.stored
    cotangent: Callable[[Tensor, Tensor], Tensor] = lambda dy, added: dy
    total: Callable[[Tensor, Tensor], Tensor] = lambda dx, added: dx + added
    split: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda total, dx, added: (total, total)
    finish: Callable[[Sum, dict[str, Tensor]], dict[str, Tensor]] = _no_more

    def forward(
        self, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor
    ) -> dict[str, Tensor]:
        """The forward of an op, as ``Implementation.forward``."""
        wide = self.add(x, residual)
        call = Sum(x=x, residual=residual, wide=wide, stored=self.store(wide, x, residual))
        outputs = self.kernel.forward(op, self.normed(call), weight, bias, eps, x.dtype)
        return self.finish(call, {**outputs, "y": outputs["y"].to(x.dtype), "residual_out": call.stored})

    def backward(
        self,
        op: str,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        saved: Mapping[str, Tensor],
        *,
        eps: float,
        residual: Tensor,
        dresidual_out: Tensor,
    ) -> dict[str, Tensor]:
        """The backward of an op, as ``Implementation.backward``."""
        call = Sum(x=x, residual=residual, wide=_added(x, residual), stored=saved["residual_out"])
        added = dresidual_out.float()
        again = self.again(call).float()
        own = self.kernel.backward(op, self.cotangent(dy, added), again, weight, bias, saved, eps, x.dtype)
        dx, dresidual = self.split(self.total(own["dx"], added), own["dx"], added)
        return {**own, "dx": dx.to(x.dtype), "dresidual": dresidual.to(residual.dtype)}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``."""

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> dict[str, Tensor]:
            return self.forward(op, x, weight, bias, **options)

        def backward(*arguments: Any, **options: Any) -> dict[str, Tensor]:
            return self.backward(op, *arguments, **options)

        both = {"residual_dtypes": ("io", "fp32"), **fields}
        return Implementation(name=name, op=op, forward=forward, backward=backward, **both)


# --- Correct kernels.


def _mixed(op: str) -> Implementation:
    """The statistics of the sum in fp32, times the stored one; backward from what was saved."""
    clean = Adding()

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor) -> dict[str, Tensor]:
        wide = _added(x, residual)
        outputs = CLEAN.forward(op, wide, weight, bias, eps)
        stored = wide.to(residual.dtype)
        centre = outputs.get("mean", 0.0)
        y = _scaled(op, (stored.float() - centre) * outputs["rstd"], x, weight, bias)
        return {**outputs, "y": y, "residual_out": stored}

    def backward(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        return clean.backward(op, *arguments, **options)

    return Implementation(name="add_mixed", op=op, forward=forward, backward=backward, residual_dtypes=("io", "fp32"))


def _scaled(op: str, xhat: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y in the dtype of x, of xhat in fp32; as models write it, if xhat is rounded, with a product in that dtype."""
    facts = table.OPS[op]
    if facts.rounds_xhat:
        return (weight * xhat.to(x.dtype)).to(x.dtype)
    z = xhat * (1 + weight.float() if facts.zero_centered else weight.float())
    return (z if bias is None else z + bias.float()).to(x.dtype)


def _norm(op: str, wide: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The norm of rows in fp32, in the dtype of x, for autograd."""
    if table.OPS[op].centered:
        wide = wide - wide.mean(-1, keepdim=True)
    return _scaled(op, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), x, weight, bias)


def _eager(op: str) -> Implementation:
    """As a decoder layer is written: the sum in the io dtype, the norm upcasts it, gradients by autograd."""

    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        stored = x + residual
        return _norm(op, stored.float(), x, weight, bias, eps), stored

    return Implementation(name="add_eager", op=op, forward=forward)


def _eager_exact(op: str) -> Implementation:
    """The sum in fp32 is normed and, rounded, returned; gradients by autograd."""

    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = _added(x, residual)
        return _norm(op, wide, x, weight, bias, eps), wide.to(residual.dtype)

    return Implementation(name="add_eager_exact", op=op, forward=forward, residual_dtypes=("io", "fp32"))


def _in_place(name: str, op: str, adding: Adding, **fields: Any) -> Implementation:
    """y in the memory of x, residual_out in that of residual, as vLLM's and flashinfer's kernels."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs = adding.forward(op, x, weight, bias, eps=eps, residual=residual)
            x.copy_(outputs["y"])
            residual.copy_(outputs["residual_out"])
        return {**outputs, "y": x, "residual_out": residual}

    def backward(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        return adding.backward(op, *arguments, **options)

    declared: dict[str, Any] = {"overwrites": ("x", "residual"), "backward": backward, **fields}
    return Implementation(name=name, op=op, forward=forward, **declared)


_EXACT = Adding(normed=lambda s: s.wide)
_RIGHT: Mapping[str, Adding] = {
    "add_rounded": Adding(),
    "add_exact": _EXACT,
    "add_exact_again": Adding(normed=lambda s: s.wide, again=lambda s: s.wide),
    "add_pairwise": Adding(kernel=Kernel(reduce_n=pairwise, reduce_m=pairwise)),
    "add_sequential": Adding(normed=lambda s: s.wide, kernel=Kernel(reduce_n=sequential, reduce_m=sequential)),
}

CONTROLS = (
    *(adding.implementation(name, op) for name, adding in _RIGHT.items() for op in OPS),
    *(Adding(kernel=IN_IO).implementation("add_casting_in_io", op) for op in LLAMA),
    *(Adding(kernel=IN_FP32).implementation("add_casting_in_fp32", op) for op in (*LLAMA, *GEMMA)),
    *(make(op) for make in (_mixed, _eager, _eager_exact) for op in OPS),
    *(_in_place("add_in_place", op, Adding()) for op in OPS),
    *(_in_place("add_in_place_exact", op, _EXACT, backward=None) for op in OPS),
)

# --- Faults.


def _vector_columns(t: Tensor) -> Tensor:
    """bool (N,): the columns of whole vectors."""
    return torch.arange(t.shape[-1], device=t.device) < t.shape[-1] // _VECTOR * _VECTOR


def _stored_but_for_the_tail(s: Sum) -> Tensor:
    """The stored sum in the columns of whole vectors, the one in fp32 in the others."""
    return torch.where(_vector_columns(s.wide), s.stored.float(), s.wide)


def _without_tail(x: Tensor, residual: Tensor) -> Tensor:
    return x.float() + torch.where(_vector_columns(x), residual.float(), 0.0)


def _rows_packed(x: Tensor, residual: Tensor) -> Tensor:
    return x.float() + packed(residual).float()


def _last_row_unwritten(wide: Tensor, x: Tensor, residual: Tensor) -> Tensor:
    out = torch.empty_like(wide, dtype=residual.dtype)
    out[: max(len(out) - 1, 0)] = wide[: max(len(out) - 1, 0)].to(residual.dtype)
    return out


def _into_gaps(op: str) -> Implementation:
    """In place, but each row of residual_out is stored with one element more than the row has."""
    right = _in_place("mS24", op, Adding())

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor) -> Any:
        outputs = right.forward(x, weight, bias, eps=eps, residual=residual)
        if residual.dim() == 2 and residual.stride(0) > residual.shape[1]:
            wider = residual.as_strided((len(residual), residual.shape[1] + 1), residual.stride())
            wider[:, -1] = 0.0
        return outputs

    return Implementation(name="mS24", op=op, forward=forward, backward=right.backward, overwrites=("x", "residual"))


def _variance_of_x(op: str) -> Implementation:
    """The variance is taken before the residual is added, the numerator after it."""
    clean = Adding()

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor) -> dict[str, Tensor]:
        outputs = clean.forward(op, x, weight, bias, eps=eps, residual=residual)
        of_x = CLEAN.forward(op, x, weight, bias, eps)
        centre = outputs.get("mean", 0.0)
        y = _scaled(op, (outputs["residual_out"].float() - centre) * of_x["rstd"], x, weight, bias)
        return {**outputs, "y": y, "rstd": of_x["rstd"]}

    def backward(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        return clean.backward(op, *arguments, **options)

    return Implementation(name="mS23", op=op, forward=forward, backward=backward)


_Y, _STORED, _GRADIENTS = ("y", "mean", "rstd", "dx", "dresidual", "dw"), ("residual_out",), ("dx", "dresidual")


_fault = partial(mutant_of, ops=OPS)


def _cast_alike(one: Op, other: Op) -> bool:
    return (one.rounds_xhat, one.zero_centered) == (other.rounds_xhat, other.zero_centered)


def _after_a_sum(fault: Mutant) -> Mutant:
    """A fault of a casting, in the same casting of a sum."""
    assert fault.kernel is not None
    ops = tuple(op.name for op in FUSED_ADD if any(_cast_alike(op, table.OPS[name]) for name in fault.ops))
    id, adding = f"add-{fault.id}", Adding(kernel=fault.kernel())
    outputs = (*fault.outputs, "dresidual") if "dx" in fault.outputs else fault.outputs
    return replace(fault, id=id, ops=ops, make=lambda op: adding.implementation(id, op), outputs=outputs, kernel=None)


MUTANTS: tuple[Mutant, ...] = (
    _fault("mS01", "the norm of x alone: the residual is stored in the sum and dropped from the norm",
           Adding(normed=lambda s: s.x), _Y),
    _fault("mS02", "the norm of the residual alone", Adding(normed=lambda s: s.residual), _Y),
    _fault("mS03", "residual_out is the residual as it came: the sum is not stored",
           Adding(store=lambda wide, x, residual: residual.clone(), normed=lambda s: s.wide), _STORED + _GRADIENTS),
    _fault("mS04", "residual_out is x", Adding(store=lambda wide, x, residual: x.to(residual.dtype, copy=True),
           normed=lambda s: s.wide), _STORED + _GRADIENTS),
    _fault("mS05", "residual_out is y: both outputs are written to one place",
           Adding(finish=lambda s, out: {**out, "residual_out": out["y"].to(s.residual.dtype)}), _STORED + _GRADIENTS),
    _fault("mS06", "residual_out is zeros", Adding(finish=lambda s, out: {**out, "residual_out": s.stored * 0}),
           _STORED + _GRADIENTS),
    _fault("mS07", "the sum is stored toward zero", Adding(store=lambda wide, x, r: truncated(wide, r.dtype)),
           (*_STORED, *_Y), dtypes=HALF),
    _fault("mS08", "the sum is rounded to bf16 before it is stored",
           Adding(store=lambda wide, x, r: rounded(wide, torch.bfloat16).to(r.dtype)), (*_STORED, *_Y),
           dtypes=("fp16", "fp32")),
    _fault("mS09", "the residual is subtracted", Adding(add=lambda x, residual: x.float() - residual.float()),
           (*_STORED, *_Y)),
    _fault("mS10", "the residual of the next row is added",
           Adding(add=lambda x, r: _added(x, r.reshape(-1, r.shape[-1]).roll(1, 0).reshape(r.shape))),
           (*_STORED, *_Y), when="two rows"),
    _fault("mS11", "the row stride of the residual is ignored: its rows are read as packed",
           Adding(add=_rows_packed), (*_STORED, *_Y), kinds=READ_BEYOND, when="a strided residual"),
    _fault("mS12", "the residual is not added in the last columns, which fill no vector", Adding(add=_without_tail),
           (*_STORED, *_Y), when="N % 8 != 0"),
    _fault("mS13", "the last columns, which fill no vector, are normed before the sum is stored, the others after it",
           Adding(normed=_stored_but_for_the_tail), _Y, dtypes=HALF, when="N % 8 != 0"),
    _fault("mS14", "the sum that is normed depends on N: the stored one if vectors fill a row, else the one in fp32",
           Adding(normed=lambda s: s.wide if s.wide.shape[-1] % _VECTOR else s.stored), _Y, dtypes=HALF),
    _fault("mS15", "the last row of residual_out is not written", Adding(store=_last_row_unwritten,
           normed=lambda s: s.wide.to(s.residual.dtype)), _STORED + _GRADIENTS, kinds=UNWRITTEN),
    _fault("mS16", "dresidual_out is forgotten", Adding(total=lambda dx, added: dx), _GRADIENTS),
    _fault("mS17", "dresidual_out is forgotten in dx, and added to dresidual",
           Adding(split=lambda total, dx, added: (dx, total)), ("dx",)),
    _fault("mS18", "dresidual_out is forgotten in dresidual, and added to dx",
           Adding(split=lambda total, dx, added: (total, dx)), ("dresidual",)),
    _fault("mS19", "dresidual is dresidual_out: the norm's own gradient does not reach the residual",
           Adding(split=lambda total, dx, added: (total, added)), ("dresidual",)),
    _fault("mS20", "dresidual_out is added twice", Adding(total=lambda dx, added: dx + 2 * added), _GRADIENTS),
    _fault("mS21", "dresidual_out is added to dy, and so goes through the norm",
           Adding(cotangent=lambda dy, added: (dy.float() + added).to(dy.dtype), total=lambda dx, added: dx),
           (*_GRADIENTS, "dw", "db")),
    _fault("mS22", "backward takes x for the sum", Adding(again=lambda s: s.x), (*_GRADIENTS, "dw")),
    Mutant(id="mS23", what="the variance is that of x, before the residual is added", source="invented",
           make=_variance_of_x, ops=OPS, outputs=_Y),
    Mutant(id="mS24", what="in place, with one element more in each row of residual_out", source="invented",
           make=_into_gaps, ops=OPS, outputs=("residual",), kinds=("out_of_bounds_write",), when="a strided residual"),
    _fault("mS25", "an fp32 residual is rounded to the dtype of x before it is added",
           Adding(add=lambda x, r: _added(x, r.to(x.dtype))), (*_STORED, *_Y), dtypes=HALF, when="residual_dtype=fp32"),
    _fault("mS26", "dresidual is rounded to the dtype of x, though the residual has fp32",
           Adding(split=lambda total, dx, added: (total, rounded(total, torch.bfloat16))), ("dresidual",),
           dtypes=("fp16", "fp32")),
    Mutant(id="mS27", what="the sum is normed before it is stored, though the stored one is declared",
           source="invented", make=lambda op: _EXACT.implementation("mS27", op, model={"sum": "rounded"}),
           ops=(*LLAMA, *GEMMA), outputs=_Y, dtypes=HALF),
    _fault("mS28", "xhat is rounded to the dtype of the sum in place of that of x: not at all if that is fp32",
           Adding(kernel=Kernel(xhat=lambda c: rounded(c.xc * c.r, c.x_io.dtype))), ("y",), ops=LLAMA, dtypes=HALF,
           when="residual_dtype=fp32"),
    *map(_after_a_sum, OF_CASTING),
)  # fmt: skip

IMPLEMENTATIONS = (*CONTROLS, *implementations(MUTANTS))
