"""Modulated ops that add a residual: the sum that they norm, and what its gate does to the gradients.

    s = residual + residual_gate * x,   residual_out = s,   y = the modulated norm of s

with a gate for each sample. Which sum is normed is a convention, as ``residual.py`` has it. That sum is not one
number: the product of x and its gate is rounded, to fp32 or not at all by an FMA, or, as ``round_gated`` of a model
says, to the dtype of x, as eager torch does; and so is the sum, before it is stored. So a kernel's sum lies between two
ends, which are one number of half precision for most elements, and every bound is made for any sum between them.

With ds the gradient of s, the norm's own dx + dresidual_out, dresidual = ds, dx = residual_gate * ds, and
dresidual_gate is the sum of ds * x over the rows of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.oracle import backward_bounds, forward_bounds, reference
from normcheck.oracle.activation import IO
from normcheck.oracle.backward_bounds import Added, Block, GradientSums
from normcheck.oracle.casting import rounded
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.reference import Rows
from normcheck.oracle.residual import MIXED, ROUNDED
from normcheck.oracle.rounding import NO_ROOM, Bound, Rules, plus_store, store

ROUND_PRODUCT = ("none", IO)
"""Whether the product of x and its gate is rounded to the dtype of x, the tightest first."""

_LEAST = 2.0 ** FORMATS["fp32"].emin


@dataclass(frozen=True)
class Part:
    """The sums of some rows, (m, N) in fp64: ``exact``, and how far a kernel's may be ``off`` before it is stored;
    ``stored``, and the least and the largest one that a kernel may store. ``gate``, ``x``: the factors of each row.
    """

    exact: Tensor
    off: Tensor
    stored: Tensor
    low: Tensor
    high: Tensor
    gate: Tensor
    x: Tensor

    @property
    def stored_off(self) -> Tensor:
        """How far a stored sum may be from ``stored``."""
        return torch.maximum(self.high - self.stored, self.stored - self.low)

    def of(self, how: str, *, norm: bool) -> tuple[Tensor, Tensor]:
        """What is normed by a kernel that norms ``how``, or what its statistics are of, and how far it may be off."""
        stored = how == ROUNDED or (norm and how == MIXED)
        return (self.stored, self.stored_off) if stored else (self.exact, self.off)


@dataclass(frozen=True)
class GatedSum:
    """The sums of a case whose kernel norms ``how``. ``x``, ``residual``, ``dresidual_out``: (M, N) as stored,
    ``gate``: (B, N); ``io``, ``fmt``, ``gate_fmt``: the formats of x, of the residual and of the gate.
    """

    case: Case
    rules: Rules
    how: str
    x: Tensor
    residual: Tensor
    dresidual_out: Tensor
    gate: Tensor
    io: Format
    fmt: Format
    gate_fmt: Format
    latest: dict[tuple[int, int], Part] = field(default_factory=dict, compare=False, repr=False)
    """The part that was made last: of it come the rows, the bound of the sum, and what a backward adds."""

    @property
    def rounds_product(self) -> bool:
        """Whether the product of x and its gate is rounded to the dtype of x; with a gate in fp32 it is in fp32."""
        narrow = self.rules.model.accumulate not in (self.io.name, self.gate_fmt.name)
        return narrow and self.rules.model.round_gated == IO

    @property
    def is_mixed(self) -> bool:
        """Whether the sum that is normed is not the one of the statistics."""
        return self.how == MIXED and self.fmt.name != self.rules.model.accumulate

    def part(self, first: int, end: int) -> Part:
        """The sums of the rows ``first`` to ``end``, made once for all who ask in turn."""
        if (first, end) not in self.latest:
            self.latest.clear()
            self.latest[first, end] = self._part(first, end)
        return self.latest[first, end]

    def _part(self, first: int, end: int) -> Part:
        """A product, or a sum, that fp32 has exactly is not rounded by a kernel. What is subnormal in fp32 it may read,
        and store, as 0.
        """
        rules = self.rules
        x, residual = self.x[first:end].double(), self.residual[first:end].double()
        at = torch.arange(first, end, device=x.device) // max(self.case.M // self.case.batch, 1)
        gate = self.gate[at].double()
        product = gate * x
        off = _rounding(rules, product, torch.zeros_like(product))
        if self.rounds_product:
            product = torch.where(torch.isfinite(product), rounded(product, self.io), product)
            product = torch.where(product.abs() > self.io.max, product * torch.inf, product)
            off = _flushed(rules, product, self.io)
        if rules.model.ftz:
            tiny = ((x.abs() < _LEAST) | (gate.abs() < _LEAST)) & (product != 0)
            for where, term in ((tiny, product), ((residual.abs() < _LEAST) & (residual != 0), residual)):
                off = off + torch.where(where, 2 * term.abs(), 0.0) if bool(where.any()) else off
        exact = residual + product
        off = off + _rounding(rules, exact, off)
        if self.fmt.name == rules.model.accumulate:
            return Part(exact, off, exact, exact - off, exact + off, gate, x)
        flushed = _flushed(rules, exact, self.fmt)
        stored, low, high = (_stored(exact + side * off, self.fmt) + side * flushed for side in (0, -1, 1))
        return Part(exact, off, stored, low, high, gate, x)

    def bound(self, block: slice) -> tuple[Tensor, Bound]:
        """The stored sum of a block of rows, and its bound."""
        part = self.part(block.start, block.stop)
        upper, lower = ((side).clamp(min=NO_ROOM) for side in (part.high - part.stored, part.stored - part.low))
        size = torch.maximum(upper, lower)
        return part.stored, Bound(upper, lower, lambda: {"product and sum": size})

    def normalised(self, op: Op, first: int, end: int) -> tuple[Rows, StatisticsBound, Tensor | None]:
        """The rows of the sum from ``first`` to ``end``, the bounds of their statistics, and which have bounds."""
        part = self.part(first, end)
        source, off = part.of(self.how, norm=False)
        rows = replace(reference.normalise(op, source, self.case.eps), off=off)
        statistics = forward_bounds.statistics(self.rules, rows, self.case.eps, off)
        checkable = forward_bounds.checkable_rows(rows, self.case)
        if self.is_mixed:
            normed, off = part.of(self.how, norm=True)
            rows = reference.renormalised(rows, normed)
            finite = torch.isfinite(off.sum(1, keepdim=True))  # what is stored overflows before its statistics do
            if not bool(finite.all()):
                checkable = finite if checkable is None else checkable & finite
        return replace(rows, off=off), statistics, checkable

    def added(self, rows: Rows, first: int, end: int) -> GatedAdded:
        """What the backward of ``rows``, the rows ``first`` to ``end`` of the case, adds and multiplies by."""
        part = self.part(first, end)
        apart = None
        if self.is_mixed:
            apart = (part.stored - part.exact).abs() * rows.rstd
        own = Added(self.dresidual_out[first:end].double(), self.io, self.fmt, apart)
        return GatedAdded(own, part.gate, part.x, self.rounds_product)


def sum_of(case: Case, inputs: Inputs, rules: Rules, how: str) -> GatedSum:
    """The sums of ``inputs`` if the kernel norms ``how``, one of ``residual.SUMS``."""
    of_rows = inputs.x, inputs.residual, inputs.dresidual_out
    assert inputs.residual_gate is not None
    x, residual, cotangent = (t.reshape(case.M, case.N) for t in of_rows if t is not None)
    io, fmt, gate_fmt = (FORMATS[name] for name in (case.dtype, case.residual_format, case.weight_format))
    return GatedSum(case, rules, how, x, residual, cotangent, inputs.residual_gate, io, fmt, gate_fmt)


@dataclass(frozen=True)
class GatedAdded:
    """What a backward adds to the gradient of a sum, and the two factors of what was added to the residual.

    ``rounds_product``: the product of x and its gate was rounded to the dtype of x, as autograd rounds ds and x.
    """

    added: Added
    gate: Tensor
    x: Tensor
    rounds_product: bool


@dataclass(frozen=True, slots=True)
class GateShare:
    """dresidual_gate (samples, N) of a block; the sum of the magnitudes of its terms, and that of their errors."""

    value: Tensor
    size: Tensor
    off: Tensor

    def plus(self, other: GateShare) -> GateShare:
        """This and that of the next block of rows of the same sample."""
        return GateShare(self.value + other.value, self.size + other.size, self.off + other.off)

    def bound(self, rules: Rules, rows: int, fmt: Format) -> Bound:
        """The bound of the sum over the ``rows`` of a sample, stored in ``fmt``."""
        sums = GradientSums(self.size, self.size, self.size)
        return backward_bounds.output_db(rules, rows, self.value, sums, self.off, fmt)


@dataclass(frozen=True)
class SumGradients:
    """``ds``, dx and dresidual_gate of a block, with the bounds of what is stored of the first two."""

    ds: Tensor
    of_ds: Bound
    dx: Tensor
    of_dx: Bound
    gate: GateShare


def gradients(rules: Rules, part: Block, own: Bound, of_sum: GatedAdded) -> SumGradients:
    """``own``: the bound of the norm's dx, that of ``part``, before any store.

    A kernel may multiply ds as it is stored, or before that; or, if the product was rounded to the dtype of x, as
    autograd hands it to that product, in the dtype of x. If it may be infinite there, nothing is said of its products.
    """
    added = of_sum.added
    ds = part.backward.dx + added.dresidual_out
    narrow, of_ds = backward_bounds.plus_residual(rules, own, part.rows, part.backward, added)
    handed = torch.maximum(narrow.upper, of_ds.upper) if of_sum.rounds_product else of_ds.upper
    e, gate, x = handed / rules.safety, of_sum.gate.abs(), of_sum.x.abs()
    largest = min(added.residual.max, added.io.max if of_sum.rounds_product else math.inf)
    e = torch.where(ds.abs() + e > largest, torch.inf, e)
    most = ds.abs() + e
    dx = of_sum.gate * ds
    off = gate * e + most * gate * rules.u + rules.eta * (1 + gate)
    off = torch.where((of_sum.gate == 0) & torch.isfinite(e), 0.0, off)
    upper = (plus_store(rules, off, dx.abs(), added.io, "dx") * rules.safety).clamp_(min=NO_ROOM)

    def terms() -> Mapping[str, Tensor]:
        stored = store(rules, dx.abs() + off, added.io, "dx") * torch.ones_like(dx)
        return {"store": stored, "ds": gate * e, "product": (off - gate * e).clamp(min=0)}

    term = e * x + most * x * rules.u + rules.eta * (1 + x)
    if of_sum.rounds_product:
        term = term + store(rules, most * x, added.io, "dx")
        term = torch.where(most * x + term > added.io.max, torch.inf, term)  # a product that is infinite there
    grow = 1 + rules.gam(rules.chain(max(part.rows.x.shape[0], 1)) + 16)
    share = GateShare(*(part.rows.total(t) for t in (ds * of_sum.x, most * x, term * grow)))
    return SumGradients(ds, of_ds, dx, Bound(upper, None, terms), share)


def _rounding(rules: Rules, value: Tensor, off: Tensor) -> Tensor:
    """The error of one rounding to fp32 of a number within ``off`` of ``value``; 0 if fp32 has that very number.

    An infinity beside a number that was rounded is as certain as one beside another.
    """
    size = value.abs()
    inexact = ((value.float().double() != value) | (off != 0) | ((size < _LEAST) & (size > 0))) & torch.isfinite(value)
    if not bool(inexact.any()):  # as most products of two numbers of half precision
        return torch.zeros_like(value)
    return torch.where(inexact, (size + off) * rules.u + rules.eta, 0.0)


def _flushed(rules: Rules, value: Tensor, fmt: Format) -> Tensor:
    """How far a number of ``fmt`` is off if it is flushed to 0."""
    if not rules.model.ftz or fmt.emin != FORMATS["fp32"].emin:
        return torch.zeros_like(value)
    return torch.where((value.abs() < _LEAST) & (value != 0), _LEAST, 0.0)


def _stored(value: Tensor, fmt: Format) -> Tensor:
    """``value`` as ``fmt`` stores it, infinite if that is too large."""
    if value.numel() and float(value.abs().amax()) <= fmt.max:  # as in most cases
        return rounded(value, fmt)
    near = torch.where(torch.isfinite(value), rounded(value, fmt), value)
    return torch.where(near.abs() > fmt.max, value.sign() * torch.inf, near)
