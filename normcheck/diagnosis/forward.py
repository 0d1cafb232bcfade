"""The forward of a formula, and where it puts each element that a forward returns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import format_of
from normcheck.cases.tensor_names import RESIDUAL_OUT
from normcheck.diagnosis.codes import codes
from normcheck.diagnosis.evidence import Evidence
from normcheck.diagnosis.expected import Expected, Forward, bounded, moved
from normcheck.diagnosis.formula import Call, Formula, Way
from normcheck.oracle import bitmask, casting, forward_bounds, reference, residual
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.rounding import Bound

_FP32 = FORMATS["fp32"]


def call_of(formula: Formula, found: Evidence, way: Way) -> Call:
    """The call of ``formula`` with the inputs of a case."""
    own = {name: found.returned[name] for name in ("q", "scale") if name in found.returned}
    return Call(
        formula=formula,
        op=found.op,
        inputs=found.inputs,
        eps=found.case.eps,
        io=found.io,
        weight=found.weight,
        limits=found.case.option_values,
        way=way,
        wide=found.wide,
        shared=found.shared,
        own=own if found.op.quantises else {"y": found.returned["y"].double()},
    )


def forward(formula: Formula, found: Evidence, way: Way) -> Forward:
    """The forward of ``formula`` and what it predicts, in the order in which a kernel computes it."""
    call = call_of(formula, found, way)
    call.forward()
    rows = rows_of(call)
    given = _given(call, found, rows)
    before = _before_store(call, found, rows, given)
    predicted = [*_sum(call, found), *_statistics(call, found, given)]
    if found.op.quantises:
        return Forward(call, given, None, (*predicted, *codes(call, found, before)))
    predicted.append(moved(call, "y", call.y, before, format_of(found.returned["y"].dtype)))
    doubt = None
    if found.op.clamped:
        how = found.rules(way).model.bitmask_compare
        doubt = bitmask.doubtful(call.z, before, found.case.option_values, found.io, how)
        if "bitmask" in found.returned:
            own = formula.mask_out(call).double()
            predicted.append(Expected("bitmask", torch.where(doubt, 0.0, own), torch.where(doubt, 1.0, own)))
    return Forward(call, given, doubt, tuple(predicted))


def scale_of(call: Call) -> reference.Scale:
    """The factor that the formula has, as that of a weight of the op."""
    offset = call.op.weight_offset
    return reference.Scale(call.g - offset, offset)


def rows_of(call: Call) -> reference.Rows:
    """The rows of a call as the bounds take them."""
    return reference.Rows(call.x, call.m if call.op.centered else None, call.v, call.r, call.xh)


def _sum(call: Call, found: Evidence) -> Iterator[Expected]:
    """residual_out has one right value, but for what a kernel may flush to zero."""
    if RESIDUAL_OUT in found.returned:
        value = call.formula.sum_out(call)
        sums = residual.sums_of(found.case, found.inputs, residual.ROUNDED)
        flushed = residual.stored_bound(found.rules(call.way), sums, slice(None)).upper
        yield Expected(RESIDUAL_OUT, value - flushed, value + flushed)


def _statistics(call: Call, found: Evidence, given: StatisticsBound) -> Iterator[Expected]:
    saved = {"mean": (call.formula.mean_out(call), given.mean), "rstd": (call.formula.rstd_out(call), given.rstd)}
    for name in found.op.statistics:
        value, bound = saved[name]
        if name not in found.returned or bound is None:
            continue
        up, down = bound.upper, bound.upper if bound.lower is None else bound.lower
        if name == "rstd" and "rstd_out" in call.formula.changed:  # another power of rstd, whatever eps is
            rows = rows_of(call)
            up = down = 3 * value.abs() * forward_bounds.statistics(found.rules(call.way), rows, 0.0).al
        up, down = bounded(up), bounded(down)
        keep = call.formula.keep
        yield Expected(name, keep(call, value - down, name), keep(call, value + up, name))


def _given(call: Call, found: Evidence, rows: reference.Rows) -> StatisticsBound:
    """The errors of the statistics of a correct kernel; of one whose variance cancels, if the formula says so."""
    eps = call.formula.eps(call)
    usual = forward_bounds.statistics(found.rules(call.way), rows, eps)
    if not call.formula.one_pass or rows.var is None or rows.mean is None:
        return usual
    lost = (rows.var + 2 * rows.mean**2) * found.rules(call.way).gam(found.rules(call.way).chain(call.N) + 8)
    q = rows.var + eps
    upper = (q / (q - lost).clamp(min=0)).sqrt() * (1 + usual.al) - 1
    lower = 1 - (q / (q + lost)).sqrt() * (1 - usual.al)
    al = torch.maximum(upper, lower)
    of_rstd = Bound(rows.rstd * upper, rows.rstd * lower, dict)
    return StatisticsBound(al, usual.d, usual.mean, lambda: of_rstd)


def _before_store(call: Call, found: Evidence, rows: reference.Rows, given: StatisticsBound) -> Tensor:
    """The error of y before its store, (M, N)."""
    rules, scale = found.rules(call.way), scale_of(call)
    bias = None if call.b is None else call.b.abs()
    forward = reference.Forward(call.p, call.z, call.y)
    before = forward_bounds.output_y(rules, rows, forward, scale, bias, given, _FP32).before_store
    if call.casts:
        before = before + cast_of(call, found, rows, given).doubt * scale.abs
    if {"preact", "xhat"} & call.formula.changed:  # other products: the error grows with them
        before = before * (1 + call.g.abs()) + call.z.abs() * (8 * rules.u)
    return before


def cast_of(call: Call, found: Evidence, rows: reference.Rows, given: StatisticsBound) -> casting.Cast:
    """The narrowed xhat: what a correct kernel's xhat, which is off by a little, may become."""
    rules, narrowed = found.rules(call.way), call.formula.cast
    per_xh = (1 + given.al) * (1 + rules.count["xhat"] * rules.u) - 1
    e = rows.xh_abs * per_xh + rules.eta * (1 + rows.rstd * (1 + given.al))
    return casting.Cast(*(narrowed(t, found.io) for t in (call.xh, call.xh - e, call.xh + e)))
