"""Gated norms: their correct kernels on both sides of each convention, and faults of the gate and of its gradient.

``Gated`` is a kernel of steps, as ``kernel.py`` has them for plain norms. A variant states the steps that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import HALF, packed, rounded
from normcheck.audit.mutants.mutant import READ_BEYOND, Mutant, implementations
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.GATED)
_VECTOR, _GROUP = 8, 64


@dataclass(kw_only=True)
class Call:
    """One call: the inputs as stored and in fp32, and every step's result under its name.

    Shapes: x, z (the gate), a, slope, h, xh, p, y, dy, dh (M, N); r (M, groups); w (N,). ``io``: the dtype of x.
    """

    kernel: Gated
    x_io: Tensor
    gate_io: Tensor
    weight: Tensor | None
    eps: float
    dy_io: Tensor | None = None

    x: Tensor = field(init=False)
    z: Tensor = field(init=False)
    w: Tensor = field(init=False)
    a: Tensor = field(init=False)
    slope: Tensor = field(init=False)
    h: Tensor = field(init=False)
    r: Tensor = field(init=False)
    xh: Tensor = field(init=False)
    p: Tensor = field(init=False)
    y: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    own: Tensor = field(init=False)
    dh: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.N = self.x_io.shape[-1]
        self.M = self.x_io.numel() // self.N
        work = self.kernel.work
        self.x = self.kernel.read_x(self).reshape(self.M, self.N).to(work)
        self.z = self.kernel.read_gate(self).reshape(self.M, self.N).to(work)
        if self.weight is None:
            self.w = torch.ones(self.N, dtype=work, device=self.x.device)
        else:
            self.w = self.weight.flatten().to(work)

    @property
    def io(self) -> torch.dtype:
        """The dtype of x."""
        return self.x_io.dtype

    def narrow(self, t: Tensor) -> Tensor:
        """``t``, rounded to the dtype of x if each product is."""
        return rounded(t, self.io) if self.kernel.each else t

    def mean(self, t: Tensor, group: int) -> Tensor:
        """(M, N) -> (M, groups): the mean over each group of columns, or over the row."""
        columns = group or self.N
        parts = t.reshape(-1, columns)
        return (self.kernel.reduce_n(parts.t()) / columns).reshape(self.M, self.N // columns)

    def wide(self, of_groups: Tensor) -> Tensor:
        """(M, groups) -> (M, N)."""
        return of_groups.repeat_interleave(self.N // of_groups.shape[1], 1)


Step = Callable[[Call], Tensor]


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _sigmoid_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 - s)


_ACTIVATIONS: Mapping[bool, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    False: (torch.nn.functional.silu, _silu_slope),
    True: (torch.sigmoid, _sigmoid_slope),
}


@dataclass(frozen=True, kw_only=True)
class Gated:
    """The steps of a gated norm; the defaults are those of a clean one, which gates by silu behind the norm of a row.

    ``before``, ``sigmoid``, ``each``, ``stores`` and ``group`` are the convention; ``group_b`` is that of backward.
    """

    before: bool = False
    sigmoid: bool = False
    each: bool = False
    stores: bool = False
    group: int = 0
    group_b: int | None = None
    work: torch.dtype = torch.float32
    reduce_n: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    reduce_m: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    read_x: Step = lambda c: c.x_io
    read_gate: Step = lambda c: c.gate_io
    act: Step = lambda c: _ACTIVATIONS[c.kernel.sigmoid][0](c.z)
    gated_x: Step = lambda c: rounded(c.x * c.a, c.io) if c.kernel.stores else c.x * c.a
    rstd: Step = lambda c: torch.rsqrt(c.mean(c.h * c.h, c.kernel.group) + c.eps)
    xhat: Step = lambda c: c.narrow(c.h * c.wide(c.r))
    product: Step = lambda c: c.narrow(c.xh * c.w)
    output: Step = lambda c: c.p if c.kernel.before else c.p * c.a
    # Backward, in this order.
    slopes: Step = lambda c: _ACTIVATIONS[c.kernel.sigmoid][1](c.z)
    act_b: Step = lambda c: _ACTIVATIONS[c.kernel.sigmoid][0](c.z)
    weight_b: Step = lambda c: c.w
    cotangent: Step = lambda c: c.dy if c.kernel.before else c.dy * c.a
    norm_b: Step = lambda c: c.h * c.wide(c.r)
    dx: Step = lambda c: c.dh * c.a if c.kernel.before else c.dh
    dgate: Step = lambda c: (c.dh * c.x if c.kernel.before else c.dy * c.xh * c.w) * c.slope
    dw: Step = lambda c: c.kernel.reduce_m(c.own * c.narrow(c.xh))

    def forward(self, x: Tensor, weight: Tensor | None, bias: None, *, eps: float, gate: Tensor) -> dict[str, Tensor]:
        """The forward of a gated op, as ``Implementation.forward``."""
        c = Call(kernel=self, x_io=x, gate_io=gate, weight=weight, eps=eps)
        c.a = self.act(c)
        c.h = self.gated_x(c) if self.before else c.x
        c.r = self.rstd(c)
        c.xh = self.xhat(c)
        c.p = self.product(c)
        c.y = self.output(c)
        return {"y": c.y.to(x.dtype).reshape(x.shape), "rstd": c.r.float()}

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: None,
        saved: Mapping[str, Tensor],
        *,
        eps: float,
        gate: Tensor,
    ) -> dict[str, Tensor]:
        """The backward of a gated op, as ``Implementation.backward``."""
        c = Call(kernel=self, x_io=x, gate_io=gate, weight=weight, eps=eps, dy_io=dy)
        c.dy = dy.reshape(c.M, c.N).to(self.work)
        c.a, c.slope, c.w = self.act_b(c), self.slopes(c), self.weight_b(c)
        c.h = self.gated_x(c) if self.before else c.x
        c.r = saved["rstd"].reshape(c.M, -1).to(self.work)
        c.own, c.xh = self.cotangent(c), self.norm_b(c)
        group = self.group if self.group_b is None else self.group_b
        wd = c.own * c.w
        c.dh = (wd - c.xh * c.wide(c.mean(c.xh * wd, group))) * c.wide(c.r)
        out = {"dx": self.dx(c).to(x.dtype).reshape(x.shape), "dgate": self.dgate(c).to(x.dtype).reshape(x.shape)}
        return out if weight is None else {**out, "dw": self.dw(c).to(weight.dtype).reshape(weight.shape)}

    @property
    def declared(self) -> dict[str, Any]:
        """The convention as a model."""
        return {
            "gate": "before" if self.before else "after",
            "activation": "sigmoid" if self.sigmoid else "silu",
            "rounding": "each" if self.each else "once",
            "group": self.group,
        }

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        own = {"model": self.declared, "weights": (False, True), **fields}
        return Implementation(name=name, op=op, forward=self.forward, backward=self.backward, **own)


# --- Correct kernels.


def _exp_sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _tanh_sigmoid(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(0.5 * z))


def _by(sigmoid: Callable[[Tensor], Tensor], **own: Any) -> Gated:
    """A kernel whose silu and slope are made of this sigmoid."""

    def slope(c: Call) -> Tensor:
        s = sigmoid(c.z)
        return s + c.z * s * (1 - s)

    def silu(c: Call) -> Tensor:
        return c.z * sigmoid(c.z)

    return Gated(act=silu, act_b=silu, slopes=slope, **own)


_RIGHT: Mapping[str, Gated] = {
    "gated": Gated(),
    "gated_sigmoid": Gated(sigmoid=True),
    "gated_each": Gated(each=True),
    "gated_sigmoid_each": Gated(sigmoid=True, each=True),
    "gated_before": Gated(before=True),
    "gated_before_sigmoid": Gated(before=True, sigmoid=True),
    "gated_before_each": Gated(before=True, each=True),
    "gated_before_each_stored": Gated(before=True, each=True, stores=True),
    "gated_groups": Gated(group=_GROUP),
    "gated_before_groups": Gated(before=True, group=_GROUP),
    "gated_before_groups_each": Gated(before=True, group=_GROUP, each=True),
    "gated_by_exp": _by(_exp_sigmoid),
    "gated_by_tanh": _by(_tanh_sigmoid),
    "gated_before_by_tanh": _by(_tanh_sigmoid, before=True),
    "gated_pairwise": Gated(reduce_n=pairwise, reduce_m=pairwise),
    "gated_before_sequential": Gated(before=True, reduce_n=sequential, reduce_m=sequential),
    "gated_in_fp64": Gated(work=torch.float64),
    "gated_before_in_fp64": Gated(before=True, work=torch.float64),
}


def _eager(before: bool) -> Callable[..., Tensor]:
    """As a model is written, for autograd."""

    def forward(x: Tensor, weight: Tensor | None, bias: None, *, eps: float, gate: Tensor) -> Tensor:
        factor = torch.nn.functional.silu(gate.float())
        h = x.float() * factor if before else x.float()
        y = h / torch.sqrt((h * h).mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight.float()
        return (y if before else y * factor).to(x.dtype)

    return forward


def _factor_first(x: Tensor, weight: Tensor | None, bias: None, *, eps: float, gate: Tensor) -> Tensor:
    """The weight times the activation is one factor, and the root the last one."""
    wide, factor = x.float(), torch.nn.functional.silu(gate.float())
    factor = factor if weight is None else weight.float() * factor
    return (wide * factor * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _by_rows(x: Tensor, weight: Tensor | None, bias: None, *, eps: float, gate: Tensor) -> Tensor:
    """A few rows at a time, which share one upcast of the weight: autograd would add up several in half precision."""
    wide = None if weight is None else weight.float()
    pieces = zip(torch.split(x, 3), torch.split(gate, 3), strict=True)
    return torch.cat([_eager(False)(part, wide, bias, eps=eps, gate=own) for part, own in pieces])


_EAGER: Mapping[str, Callable[..., Tensor]] = {
    "gated_eager": _eager(False),
    "gated_eager_before": _eager(True),
    "gated_factor_first": _factor_first,
    "gated_by_rows": _by_rows,
}

CONTROLS = (
    *(kernel.implementation(name, op) for name, kernel in _RIGHT.items() for op in OPS),
    *(kernel.implementation(f"{name}_open", op, model={"group": kernel.group}) for name, kernel in _RIGHT.items()
      if name in ("gated", "gated_sigmoid_each", "gated_before_each", "gated_before_groups") for op in OPS),
    *(Implementation(name=name, op=op, forward=forward, weights=(False, True)) for name, forward in _EAGER.items()
      for op in OPS),
)  # fmt: skip

# --- Faults.


def _rows_packed(c: Call) -> Tensor:
    return packed(c.gate_io)


def _rows_as_of_x(c: Call) -> Tensor:
    return c.gate_io.as_strided((c.M, c.N), (c.x_io.stride(-2) if c.x_io.dim() > 1 else c.N, 1))


def _act_in_io(c: Call) -> Tensor:
    return torch.nn.functional.silu(c.z.to(c.io)).to(c.z.dtype)


def _quick(c: Call) -> Tensor:
    return c.z * torch.sigmoid(1.702 * c.z)


def _slope_of_ratio(c: Call) -> Tensor:
    """e^-z / (1 + e^-z)^2, which is infinity over infinity where e^-z overflows."""
    e = torch.exp(-c.z)
    s = 1 / (1 + e)
    return s + c.z * (e / (1 + e).square())


def _ungated_tail(c: Call) -> Tensor:
    at = torch.arange(c.N, device=c.p.device) < c.N // _VECTOR * _VECTOR
    return torch.where(at, c.p * c.a, c.p)


def _of_row(c: Call) -> Tensor:
    """rstd of the row, once for each group."""
    return torch.rsqrt(c.mean(c.h * c.h, 0) + c.eps).repeat(1, c.N // c.kernel.group)


def _normed_twice(c: Call) -> Tensor:
    return c.p * torch.rsqrt((c.p * c.p).mean(-1, keepdim=True) + c.eps)


def _fault(id: str, what: str, kernel: Gated, outputs: tuple[str, ...], **fields: Any) -> Mutant:
    """A fault whose kernel differs from a clean one by the steps of ``kernel``; it declares ``model``, or its own."""
    model = fields.pop("model", kernel.declared)
    own = {"source": "invented", "ops": OPS, **fields}
    return Mutant(
        id=id, what=what, make=lambda op: kernel.implementation(id, op, model=model, weights=(True,)), outputs=outputs,
        **own,
    )  # fmt: skip


_Y = ("y", "rstd", "dx", "dgate", "dw")
_AFTER, _BEFORE = Gated().declared, Gated(before=True).declared

_FLA, _MAMBA, _VLLM = "fla-org/flash-linear-attention#", "state-spaces/mamba#", "vllm-project/vllm#"
_BOTH_SIDES = f"{_FLA}57, {_FLA}63"

MUTANTS: tuple[Mutant, ...] = (
    _fault("mG01", "sigmoid for silu", Gated(sigmoid=True), _Y, model=_AFTER, source=_VLLM + "40245"),
    _fault("mG02", "silu for sigmoid", Gated(), _Y, model=Gated(sigmoid=True).declared, source=_VLLM + "35479"),
    _fault("mG03", "gates before the norm, declared after it", Gated(before=True), _Y, model=_AFTER,
           source=_BOTH_SIDES),
    _fault("mG04", "gates after the norm, declared before it", Gated(), _Y, model=_BEFORE, source=_BOTH_SIDES),
    _fault("mG05", "the mean is over the row, though groups of columns are declared",
           Gated(before=True, group=_GROUP, group_b=0, rstd=_of_row), _Y, source="huggingface/transformers#35943",
           when="more than one group"),
    _fault("mG06", "backward takes its mean over the row, forward over groups",
           Gated(before=True, group=_GROUP, group_b=0), ("dx", "dgate"), source=f"{_MAMBA}910, {_MAMBA}547",
           when="more than one group"),
    _fault("mG07", "the norm is applied twice", Gated(before=True, output=_normed_twice), ("y",),
           source=_MAMBA + "919"),
    _fault("mG08", "the weight never reaches the kernel", Gated(product=lambda c: c.narrow(c.xh),
           weight_b=lambda c: torch.ones_like(c.w)), ("y", "dx", "dgate")),
    _fault("mG09", "x and the gate are swapped", Gated(read_x=lambda c: c.gate_io, read_gate=lambda c: c.x_io), _Y),
    _fault("mG10", "dgate takes the sigmoid for the slope of silu", Gated(slopes=lambda c: torch.sigmoid(c.z)),
           ("dgate",)),
    _fault("mG11", "dx forgets the gate", Gated(cotangent=lambda c: c.dy), ("dx", "dw")),
    _fault("mG12", "dx forgets the gate, which is before the norm", Gated(before=True, dx=lambda c: c.dh), ("dx",)),
    _fault("mG13", "dw is summed from the gated output", Gated(dw=lambda c: c.kernel.reduce_m(c.own * c.xh * c.a)),
           ("dw",), source=_FLA + "1071"),
    _fault("mG14", "dw forgets the gate", Gated(dw=lambda c: c.kernel.reduce_m(c.dy * c.xh)), ("dw",),
           source=_FLA + "1071"),
    _fault("mG15", "the row stride of the gate is ignored: its rows are read as packed", Gated(read_gate=_rows_packed),
           _Y, kinds=READ_BEYOND, when="a strided gate"),
    _fault("mG16", "the gate is read with the row stride of x", Gated(read_gate=_rows_as_of_x), _Y,
           kinds=READ_BEYOND, when="x and the gate have other strides"),
    _fault("mG17", "silu is computed in the dtype of x", Gated(act=_act_in_io), ("y",), dtypes=HALF),
    _fault("mG18", "z * sigmoid(1.702 z), which is an estimate of gelu, for silu", Gated(act=_quick), ("y",)),
    _fault("mG19", "the slope is a quotient that overflows for a gate below -88", Gated(slopes=_slope_of_ratio),
           ("dgate",), when="gate=turning"),
    _fault("mG20", "the gate of the next row", Gated(read_gate=lambda c: c.gate_io.reshape(c.M, c.N).roll(-1, 0)), _Y,
           when="two rows"),
    _fault("mG21", "the last columns, which fill no vector, are not gated", Gated(output=_ungated_tail), ("y",),
           when="N % 8 != 0"),
    _fault("mG22", "rounds each product, though once is declared", Gated(each=True), ("y",), model=_AFTER,
           dtypes=HALF),
    _fault("mG23", "rounds once, though each product is declared", Gated(), ("y",), model=Gated(each=True).declared,
           dtypes=HALF),
    _fault("mG24", "dgate forgets the weight", Gated(dgate=lambda c: c.dy * c.xh * c.slope), ("dgate",)),
    _fault("mG25", "dgate is zeros", Gated(dgate=lambda c: torch.zeros_like(c.x)), ("dgate",)),
    _fault("mG26", "backward norms x, not the gated x", Gated(before=True, norm_b=lambda c: c.x * c.wide(c.r)),
           ("dx", "dgate", "dw")),
    _fault("mG27", "no activation: the gate itself is the factor", Gated(act=lambda c: c.z), ("y",),
           source=_VLLM + "35423"),
)  # fmt: skip

IMPLEMENTATIONS = (*CONTROLS, *implementations(MUTANTS))
