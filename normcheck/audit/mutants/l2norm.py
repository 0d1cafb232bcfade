"""Norms by the length of x: their correct kernels on each side of the convention, and faults of eps, sum and gradient.

``Length`` is a kernel of steps, as ``kernel.py`` has them for other norms. A variant states the steps that it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import blocked, pairwise, reverse, sequential, strided
from normcheck.audit.mutants.kernel import HALF, packed, rounded
from normcheck.audit.mutants.mutant import READ_BEYOND, Mutant, implementations
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.LENGTHS)
_VECTOR = 8


@dataclass(kw_only=True)
class Call:
    """One call: the inputs as stored and in fp32, and every step's result under its name.

    Shapes: x, y, dy (M, N); s (the sum of squares), r, c (M, 1). ``io``: the dtype of x.
    """

    kernel: Length
    x_io: Tensor
    eps: float
    dy_io: Tensor | None = None
    saved: Mapping[str, Tensor] = field(default_factory=dict)

    x: Tensor = field(init=False)
    s: Tensor = field(init=False)
    r: Tensor = field(init=False)
    y: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    c: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.N = self.x_io.shape[-1]
        self.M = self.x_io.numel() // self.N
        self.x = self.kernel.read(self).reshape(self.M, self.N).to(self.kernel.work)

    @property
    def io(self) -> torch.dtype:
        """The dtype of x."""
        return self.x_io.dtype

    def total(self, t: Tensor) -> Tensor:
        """(M, N) -> (M, 1): the sum over each row."""
        sums: Tensor = self.kernel.reduce_n(t.t())
        return sums.unsqueeze(1)

    @property
    def reached(self) -> Tensor:
        """Bool (M, 1): the rows that are divided by eps."""
        return self.s.sqrt() < self.eps


Step = Callable[[Call], Tensor]


def _rstd(c: Call) -> Tensor:
    if c.kernel.how == "max":
        return 1 / c.s.sqrt().clamp(min=c.eps)
    if c.kernel.how == "mean":
        return torch.rsqrt(c.s / c.N + c.eps) * math.sqrt(1 / c.N)
    return torch.rsqrt(c.s + c.eps)


def _coefficient(c: Call) -> Tensor:
    whole = c.total(c.y * c.dy)
    return torch.where(c.reached, torch.zeros_like(whole), whole) if c.kernel.how == "max" else whole


@dataclass(frozen=True, kw_only=True)
class Length:
    """The steps of a norm by length; the defaults are those of a clean one. ``how`` is the convention of eps."""

    how: str = "sum"
    work: torch.dtype = torch.float32
    reduce_n: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    read: Step = lambda c: c.x_io
    squares: Step = lambda c: c.total(c.x * c.x)
    rstd: Step = _rstd
    output: Step = lambda c: c.x * c.r
    # Backward, in this order.
    normed: Step = lambda c: c.x * c.r
    coefficient: Step = _coefficient
    dx: Step = lambda c: (c.dy - c.y * c.c) * c.r

    def forward(self, x: Tensor, weight: None, bias: None, *, eps: float) -> dict[str, Tensor]:
        """The forward of an l2 op, as ``Implementation.forward``."""
        c = Call(kernel=self, x_io=x, eps=eps)
        c.s = self.squares(c)
        c.r = self.rstd(c)
        c.y = self.output(c)
        return {"y": c.y.to(x.dtype).reshape(x.shape), "rstd": c.r.float()}

    def backward(
        self, dy: Tensor, x: Tensor, weight: None, bias: None, saved: Mapping[str, Tensor], *, eps: float
    ) -> dict[str, Tensor]:
        """The backward of an l2 op, as ``Implementation.backward``."""
        c = Call(kernel=self, x_io=x, eps=eps, dy_io=dy, saved=saved)
        c.dy = dy.reshape(c.M, c.N).to(self.work)
        c.s = c.total(c.x * c.x)
        c.r = saved["rstd"].reshape(c.M, 1).to(self.work)
        c.y = self.normed(c)
        c.c = self.coefficient(c)
        return {"dx": self.dx(c).to(x.dtype).reshape(x.shape)}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        own = {"model": {"eps": self.how}, **fields}
        return Implementation(name=name, op=op, forward=self.forward, backward=self.backward, **own)


# --- Correct kernels.


def _divided(c: Call) -> Tensor:
    """x over the length, in place of x times rstd."""
    return c.x / (c.s.sqrt().clamp(min=c.eps) if c.kernel.how == "max" else torch.sqrt(c.s + c.eps))


def _in_chunks(c: Call) -> Tensor:
    """The sum of the sums of 128 columns each, as of a row that is longer than a block."""
    total = torch.zeros_like(c.x[:, :1])
    for part in torch.split(c.x, 128, 1):
        total = total + (part * part).sum(1, keepdim=True)
    return total


def _stored(c: Call) -> Tensor:
    """y as it was stored, which fla's backward reads."""
    return c.saved["y"].reshape(c.M, c.N).to(c.x.dtype)


_RIGHT: Mapping[str, Length] = {
    **{f"l2_{how}": Length(how=how) for how in ("sum", "max", "mean")},
    **{f"l2_{how}_pairwise": Length(how=how, reduce_n=pairwise) for how in ("sum", "max", "mean")},
    **{f"l2_{how}_in_fp64": Length(how=how, work=torch.float64) for how in ("sum", "max", "mean")},
    "l2_sum_sequential": Length(reduce_n=sequential),
    "l2_max_reverse": Length(how="max", reduce_n=reverse),
    "l2_mean_blocked": Length(how="mean", reduce_n=blocked(32)),
    "l2_sum_strided": Length(reduce_n=strided(32)),
    "l2_sum_divided": Length(output=_divided),
    "l2_max_divided": Length(how="max", output=_divided),
    "l2_sum_in_chunks": Length(squares=_in_chunks),
    "l2_sum_from_stored_y": Length(normed=_stored),
    "l2_max_from_stored_y": Length(how="max", normed=_stored),
    "l2_sum_of_mean": Length(rstd=lambda c: torch.rsqrt(c.s / c.N + c.eps / c.N) * c.N**-0.5),
    "l2_max_of_squares": Length(how="max", rstd=lambda c: torch.rsqrt(c.s.clamp(min=c.eps * c.eps))),
    "l2_mean_of_sum": Length(how="mean", rstd=lambda c: torch.rsqrt(c.s + c.N * c.eps)),
    "l2_factored": Length(dx=lambda c: c.dy * c.r - c.x * (c.c * c.r * c.r)),
}


def _eager(x: Tensor, weight: None, bias: None, *, eps: float, how: str) -> Tensor:
    """As a model is written, for autograd."""
    wide, columns = x.float(), x.shape[-1]
    if how == "max":
        y: Tensor = torch.nn.functional.normalize(wide, dim=-1, eps=eps)
    elif how == "mean":
        y = torch.nn.functional.rms_norm(wide, (columns,), eps=eps) / columns**0.5
    else:
        y = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + eps)
    return y.to(x.dtype)


_OPEN = ("l2_sum", "l2_max", "l2_mean", "l2_sum_from_stored_y")

CONTROLS = (
    *(kernel.implementation(name, op) for name, kernel in _RIGHT.items() for op in OPS),
    *(_RIGHT[name].implementation(f"{name}_open", op, model={}) for name in _OPEN for op in OPS),
    *(Implementation(name=f"l2_eager_{how}", op=op, forward=partial(_eager, how=how), heads=True)
      for how in ("sum", "max", "mean") for op in OPS),
)  # fmt: skip

# --- Faults.


def _root_first(x: Tensor, weight: None, bias: None, *, eps: float) -> Tensor:
    """The slope of a root at 0 is infinite, and autograd multiplies it by the 0 of what is clamped."""
    wide = x.float()
    length: Tensor = wide.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)
    return (wide / length).to(x.dtype)


def _without_tail(c: Call) -> Tensor:
    whole = c.x[:, : max(c.N // _VECTOR, 1) * _VECTOR]
    return (whole * whole).sum(1, keepdim=True)


def _as_packed(c: Call) -> Tensor:
    return packed(c.x_io)


def _fault(id: str, what: str, kernel: Length, outputs: tuple[str, ...], **fields: Any) -> Mutant:
    """A fault whose kernel differs from a clean one by the steps of ``kernel``; it declares ``how``, or its own."""
    model = {"eps": fields.pop("how", kernel.how)}
    own = {"source": "invented", "ops": OPS, "weights": (False,), **fields}
    return Mutant(id=id, what=what, make=lambda op: kernel.implementation(id, op, model=model), outputs=outputs, **own)


_ALL = ("y", "rstd", "dx")
_MLX, _AXLEARN, _FLA = "ml-explore/mlx-lm#1624", "apple/axlearn#21", "fla-org/flash-linear-attention#507"

MUTANTS: tuple[Mutant, ...] = (
    _fault("mL01", "eps is added to the mean of squares, which is N times as much", Length(how="mean"), _ALL, how="sum",
           source=_MLX, when="N > 1"),
    _fault("mL02", "eps is added to the sum of squares, declared the mean", Length(), _ALL, how="mean", when="N > 1"),
    _fault("mL03", "eps is added to the sum of squares, declared the larger of the two", Length(), _ALL, how="max",
           source=_AXLEARN),
    _fault("mL04", "divides by the larger of |x| and eps, declared added to the sum", Length(how="max"), _ALL,
           how="sum"),
    _fault("mL05", "eps is added to the length, behind the root", Length(rstd=lambda c: 1 / (c.s.sqrt() + c.eps)), _ALL,
           source=_FLA),
    _fault("mL06", "eps is left out: a row of zeros is 0 / 0", Length(rstd=lambda c: torch.rsqrt(c.s)), _ALL),
    _fault("mL07", "eps is not squared where the sum of squares is compared with it",
           Length(how="max", rstd=lambda c: torch.rsqrt(c.s.clamp(min=c.eps))), _ALL),
    _fault("mL08", "eps is 1e-6 whatever it is called with", Length(rstd=lambda c: torch.rsqrt(c.s + 1e-6)), _ALL,
           when="another eps"),
    _fault("mL09", "an RMSNorm: nothing is divided by sqrt(N)", Length(rstd=lambda c: torch.rsqrt(c.s / c.N + c.eps)),
           _ALL, when="N > 1"),
    _fault("mL10", "the root is never taken", Length(rstd=lambda c: 1 / (c.s + c.eps)), _ALL),
    _fault("mL11", "divides by the sum of |x|", Length(rstd=lambda c: 1 / (c.total(c.x.abs()) + c.eps)), _ALL),
    _fault("mL12", "divides by the length of all rows together",
           Length(squares=lambda c: c.total(c.x * c.x).sum(0, keepdim=True).expand(c.M, 1)), _ALL, when="two rows"),
    _fault("mL13", "the last columns, which fill no vector, are not in the sum", Length(squares=_without_tail), _ALL,
           when="N % 8 != 0"),
    _fault("mL14", "rounds the length to the dtype of x", Length(
           output=lambda c: c.x / rounded(torch.sqrt(c.s + c.eps), c.io)), ("y",), dtypes=HALF),
    _fault("mL15", "rounds each square to the dtype of x",
           Length(squares=lambda c: c.total(rounded(c.x * c.x, c.io))), _ALL, dtypes=HALF),
    _fault("mL16", "dx leaves out the sum: dy * rstd", Length(coefficient=lambda c: torch.zeros_like(c.r)), ("dx",)),
    _fault("mL17", "dx takes the mean of y * dy for the sum",
           Length(coefficient=lambda c: c.total(c.y * c.dy) / c.N), ("dx",), when="N > 1"),
    _fault("mL18", "dx takes x for y", Length(normed=lambda c: c.x), ("dx",)),
    _fault("mL19", "dx of a row that is divided by eps has the sum of one that is not",
           Length(how="max", coefficient=lambda c: c.total(c.y * c.dy)), ("dx",), when="a row shorter than eps"),
    _fault("mL20", "dx forgets rstd", Length(dx=lambda c: c.dy - c.y * c.c), ("dx",)),
    _fault("mL21", "the row stride of x is ignored: its rows are read as packed", Length(read=_as_packed), _ALL,
           kinds=READ_BEYOND, when="a strided x"),
    _fault("mL22", "dx has the sign of the sum wrong", Length(dx=lambda c: (c.dy + c.y * c.c) * c.r), ("dx",)),
    Mutant(id="mL23", what="autograd through the root of a sum of squares of 0, clamped only behind it: dx is NaN",
           source="invented", ops=OPS, weights=(False,), outputs=("dx",), when="a row of zeros",
           make=lambda op: Implementation(name="mL23", op=op, forward=_root_first, model={"eps": "max"})),
)  # fmt: skip

IMPLEMENTATIONS = (*CONTROLS, *implementations(MUTANTS))
