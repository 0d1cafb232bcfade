"""Where a formula puts the codes of an op that quantises, and their scale: by the rules of ``oracle/quantised.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS
from normcheck.diagnosis.evidence import Evidence
from normcheck.diagnosis.expected import Expected
from normcheck.diagnosis.formula import Call
from normcheck.oracle.casting import rounded
from normcheck.oracle.quantised import NOTHING, SMALL_SCALE, Span
from normcheck.oracle.rounding import Rules

_LEAST = 2.0 ** FORMATS["fp32"].emin


def codes(call: Call, found: Evidence, before: Tensor) -> Iterator[Expected]:
    """The scale, unless it was given, and the codes by the scale that was used. ``before``: the error of y, (M, N)."""
    rules, formula = found.rules(call.way), call.formula
    call.unrounded = Span(call.z, call.z - before, call.z + before)
    span = formula.v(call, _rounded(call, found, call.unrounded))
    if found.shared:
        yield _scale(call, rules, span)
    by = formula.divisor(call)
    usable = (by >= _LEAST) & (by < torch.inf)
    quotient = formula.quotient(call, span, torch.where(usable, by, 1.0))
    if call.way.scaling == "any" or "quotient" in formula.changed:
        k = torch.full_like(by, rules.count["code"] * rules.u)
        if not found.shared:  # by a power of two every way to divide is exact
            k = torch.where(torch.frexp(by).mantissa == 0.5, 0.0, k)
        quotient = replace(quotient, low=quotient.low - quotient.low.abs() * k)
        quotient = replace(quotient, high=quotient.high + quotient.high.abs() * k)
    low, high = _ends(quotient.each(lambda t: formula.code(call, t.float().double())))
    if call.codes.name == "int8":  # a kernel may saturate at -127, as the scale is made for that
        high = torch.where(low < -call.codes.max, high.clamp(min=-call.codes.max), high)
    yield Expected("q", torch.where(usable, low, -torch.inf), torch.where(usable, high, torch.inf))


def _rounded(call: Call, found: Evidence, span: Span) -> Span:
    """``span`` of y as the way of the call rounds it before it is quantised."""
    if call.way.rounds not in ("io", "xhat") or call.io.name == "fp32":
        return span
    in_io: Callable[[Tensor], Tensor] = lambda t: rounded(t, call.io)  # noqa: E731
    once = span.each(in_io)
    if call.way.rounds == "io" or found.weight == call.io:
        return once
    return Span(once.value, torch.minimum(span.low, once.low), torch.maximum(span.high, once.high))


def _scale(call: Call, rules: Rules, span: Span) -> Expected:
    formula, k, own = call.formula, rules.count["scale"] * rules.u, call.scales
    most = formula.most(call, span)
    scale = most.each(lambda t: formula.scale(call, t))
    low, high = scale.low * (1 - k) - rules.eta, scale.high * (1 + k) + rules.eta
    floor = rules.model.scale_floor
    if floor is not None:
        low, high = low.clamp(min=floor * (1 - k)), high.clamp(min=floor * (1 + k))
    else:
        high = torch.where((most.value == 0) & (most.high < NOTHING), high.clamp(min=2.0), high)
    low, high = _ends(Span(low, low, high).each(lambda t: formula.scale_out(call, t)))
    if floor is None:  # a floor that is not declared
        unknown = ((own > high) & (own <= SMALL_SCALE)) | (scale.high <= SMALL_SCALE) & ("scale_out" in formula.changed)
    else:
        unknown = torch.zeros_like(own, dtype=torch.bool)
    return Expected("scale", torch.where(unknown, -torch.inf, low), torch.where(unknown, torch.inf, high))


def _ends(span: Span) -> tuple[Tensor, Tensor]:
    """The lowest and the highest of what may be; NaN if one of them is."""
    return torch.minimum(span.low, span.high), torch.maximum(span.low, span.high)
