"""Where a formula puts each element of the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS
from normcheck.cases.tensor_names import DRESIDUAL
from normcheck.diagnosis.evidence import Evidence
from normcheck.diagnosis.expected import Expected, bounded, moved
from normcheck.diagnosis.formula import Call
from normcheck.diagnosis.forward import cast_of, rows_of, scale_of
from normcheck.oracle import backward_bounds, bitmask, casting, reference
from normcheck.oracle.backward_bounds import Block, Doubt
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.rounding import Bound

_FP32 = FORMATS["fp32"]


def gradients(
    call: Call, found: Evidence, made: Mapping[str, Tensor], in_doubt: Tensor | None, given: StatisticsBound
) -> Iterator[Expected]:
    """dx, dw and db with their bounds. ``made``: those by autograd; {} if the formula's backward makes them."""
    rules, case, returned = found.rules(call.way), found.case, found.returned
    if not made:
        own = {n: returned[n].reshape(case.M, 1).double() for n in ("mean", "rstd") if n in returned}
        call.own = {**call.own, **(own if found.own_backward else {})}
        bits = None
        if found.op.clamped:
            bits = call.bits if found.bits is None or not found.own_backward else found.bits
        dx, dw, db = call.backward(bits)
        made = {"dx": dx, "dw": dw, "db": db}
    doubted = in_doubt if found.op.clamped and (found.bits is None or not found.own_backward) else None
    usual = _usual(call)
    rows = rows_of(call)
    part = Block(rows, usual, call.dy, given)
    scale = scale_of(call)
    doubt: Doubt | None = None
    if doubted is not None:
        doubted = doubted | bitmask.ties(call.z, case.option_values)  # autograd's clamp passes the gradient there
        dy = found.inputs.dy.reshape(case.M, case.N).double() * doubted
        doubt = backward_bounds.doubted(rules, rows, dy, scale, given, case.M)
    if call.casts:
        _, doubt = casting.gradients(rules, part, cast_of(call, found, rows, given), found.io, case.M)
    if scale.alone is not None:
        doubt = backward_bounds.by_lone_weight(rules, part, scale.alone, case.M, None, doubt)
    bound, sums = backward_bounds.output_dx(rules, part, _FP32, doubt)
    changed = call.formula.changed
    if {"dw", "db"} & changed:  # they may take dy before it is masked
        unmasked = Block(rows, usual, found.inputs.dy.reshape(case.M, case.N).double(), given)
        sums = backward_bounds.output_dx(rules, unmasked, _FP32, doubt)[1]
    parts = (usual.wd.abs() + (call.xh * usual.c1).abs() + (0.0 if usual.c2 is None else usual.c2.abs())) * call.r.abs()
    error = bound.upper * _grown(made["dx"], parts, 1)
    if "dx" in changed:  # which may multiply it, and its error, by one more rstd
        error = error * (1 + call.r.clamp(min=1))
    if found.joined > 1:  # x was upcast more than once, which is a fault of its own: nothing is predicted of dx
        error = torch.full_like(error, torch.inf)
    if found.op.adds_residual:
        yield from _with_residual(call, found, rows, usual, made["dx"], error)
    else:
        yield moved(call, "dx", made["dx"], error, found.io)
    by_name = {
        "dw": (backward_bounds.output_dw, usual.dw, None if doubt is None else doubt.dw, sums.dy_xhat),
        "db": (backward_bounds.output_db, usual.db, None if doubt is None else doubt.db, sums.dy_abs),
    }
    for name, (of, value, in_sum, size) in by_name.items():
        if name in returned:
            error = of(rules, case.M, value, sums, in_sum, _FP32).upper * _grown(made[name], size, 0)
            if name == "db" and "db" in changed:  # which may be the sum of another gradient
                error = error + bounded(bound.upper).sum(0) * (1 + rules.gam(case.M + 8))
            yield moved(call, name, made[name], error, found.weight)


def _with_residual(
    call: Call, found: Evidence, rows: reference.Rows, usual: reference.Backward, own: Tensor, error: Tensor
) -> Iterator[Expected]:
    """dx and dresidual: the norm's ``own`` dx, which is off by ``error``, and the cotangent of residual_out."""
    rules, (dx, dresidual) = found.rules(call.way), call.with_residual(own)
    added = backward_bounds.Added(call.added, found.io, _FP32, None)
    bound = backward_bounds.plus_residual(rules, Bound(error, None, dict), rows, replace(usual, dx=own), added)[1].upper
    grown = 1 + bool({"dx_sum", "dresidual"} & call.formula.changed)
    for name, value, fmt in (("dx", dx, found.io), (DRESIDUAL, dresidual, found.wide)):
        if name in found.returned:
            yield moved(call, name, value, bound * grown, fmt)


def _usual(call: Call) -> reference.Backward:
    """The textbook's backward from what the formula has in its place: the bounds are made of its magnitudes."""
    wd = call.dy * call.g
    c1 = (call.xh * wd).mean(1, keepdim=True)
    c1 = torch.maximum(c1.abs(), call.c1.abs()) if hasattr(call, "c1") and call.c1.shape == c1.shape else c1
    c2 = wd.mean(1, keepdim=True) if call.op.centered else None
    dx = (wd - (call.xh * c1 + (0.0 if c2 is None else c2))) * call.r
    return reference.Backward(wd, c1, c2, dx, (call.dy * call.xh).sum(0), call.dy.sum(0))


def _grown(value: Tensor, usual: Tensor, dim: int) -> Tensor | float:
    """How many times larger ``value`` is than the sums of absolute values behind the usual bound, at least 1."""
    if not value.numel():
        return 1.0
    size = value.abs()
    ratio = size.amax(1, keepdim=True) / usual.amax(1, keepdim=True) if dim else size / usual
    return torch.where(ratio > 1, ratio, 1.0)
