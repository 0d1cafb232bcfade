"""The codes of an op that quantises, and their scale: which are right.

    v = y, in fp32 or rounded on the way       q = round(v / scale), saturated       y is about q * scale

A scale that is not given is max |v| / the largest code, over a row or a block of columns; max |v| is limited to
scale_ub if the kernel gets that. A bound of y gives an interval of v, which gives one of the scale and, with the scale
that the kernel used, one of codes. A code outside it is wrong. If the interval has several codes, each of them is
right: such a code is in doubt, and counted.

What lies between y and the code is a contract, ``round_before_quant`` and ``scaling`` of a model:

    none      v is y in fp32: flashinfer
    io        v is y rounded to the dtype of x, as after a norm that is not fused: TensorRT-LLM's reference
    xhat      v is the rounded xhat times the weight, rounded again: vLLM

    division    v / scale, correctly rounded
    reciprocal  v * (1 / scale), both correctly rounded
    any         within ``count.code`` roundings of the quotient, such as v * (largest code / max |v|)

In fp32 the first three are one. Of a kernel that declares none, every case says which of them it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import LIMITED, Case
from normcheck.cases.dtypes import CODES, FORMATS, Format
from normcheck.cases.op import BLOCKS
from normcheck.cases.tensor_names import CODES as Q
from normcheck.cases.tensor_names import SCALE
from normcheck.oracle import casting
from normcheck.oracle.compare import Comparison, Expectation, merge
from normcheck.oracle.judge import END_TO_END, Checked, Judge, Reference, Truth, compared
from normcheck.oracle.judge_forward import sum_checks
from normcheck.oracle.rounding import Bound, Rules, half_ulp

ROUNDS = ("none", "io", "xhat")
"""What is rounded before a code is made of it, the simplest first."""

SCALINGS = ("division", "reciprocal", "any")
"""How the code is made of v and the scale, the tightest first."""

GIVEN_SCALE, OWN_SCALE = "by the given scale", "by the scale that it returned"
"""The checks of codes."""

FP32 = FORMATS["fp32"]
SMALL_SCALE = 2.0**-16
"""A scale up to this may be a floor that is not declared."""

NOTHING = 2.0**-64
"""A largest |v| below this is one of zeros."""

_LEAST = 2.0**FP32.emin


def formats() -> Mapping[torch.dtype, Format]:
    """The dtypes that codes may have, and their formats."""
    return {getattr(torch, fmt.torch_name): fmt for fmt in CODES.values()}


def scale_columns(case: Case, scale: str) -> int:
    """How many scales a row has under ``scale``, one of a model's that is returned."""
    return math.ceil(case.N / BLOCKS[scale]) if scale in BLOCKS else 1


def granularity(case: Case, scale: Tensor, declared: str) -> str:
    """What shares a scale, of what a kernel ``declared``, "any" included: by the shape of the ``scale`` it returned.

    "" if that is none of them.
    """
    options = ("token", *BLOCKS) if declared == "any" else (declared,)
    if "token" in options and scale.numel() == case.M and (scale.dim() == 1 or scale.shape[-1:] == (1,)):
        return "token"
    for name in options:
        columns = scale_columns(case, name)
        if scale.dim() and scale.shape[-1] == columns and scale.numel() == case.M * columns:
            return name
    return ""


@dataclass(frozen=True)
class Span:
    """What v may be, (m, N) in fp64: the reference has ``value``, a correct kernel ``low`` to ``high``."""

    value: Tensor
    low: Tensor
    high: Tensor

    @property
    def size(self) -> Span:
        """|v|."""
        low, high = self.low.abs(), self.high.abs()
        least = torch.where((self.low < 0) & (self.high > 0), 0.0, torch.minimum(low, high))
        return Span(self.value.abs(), least, torch.maximum(low, high))

    def each(self, change: Callable[[Tensor], Tensor]) -> Span:
        """The span with an increasing ``change`` applied to its ends."""
        return Span(change(self.value), change(self.low), change(self.high))


def span_of(judge: Judge, truth: Truth) -> Span:
    """What v may be in a block, before the scale."""
    how, io = judge.rules.model.round_before_quant, judge.io
    if how == "xhat" and io.name != judge.rules.model.accumulate:
        cast = casting.cast(judge.rules, truth.rows, truth.statistics, io)
        g, u = judge.scale.g, judge.rules.u
        ends = cast.low * g, cast.high * g
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        once = Span(cast.value * g, low, high)
        if judge.weight == io:  # the product of two numbers of the io dtype is exact in fp32
            return once.each(lambda v: casting.rounded(v, io))
        once = replace(once, low=low - low.abs() * u, high=high + high.abs() * u)
        twice = once.each(lambda v: casting.rounded(v, io))  # by promotion a product with a wider weight has its dtype
        return Span(twice.value, torch.minimum(once.low, twice.low), torch.maximum(once.high, twice.high))
    z, e = truth.forward.z, truth.y.before_store
    span = Span(z, z - e, z + e)
    return span.each(lambda v: casting.rounded(v, io)) if how == "io" and io.name != "fp32" else span


def quantised(t: Tensor, fmt: Format) -> Tensor:
    """``t`` (fp64) as a code of ``fmt``, as a number in fp64: the nearest, ties to even, saturated."""
    least = -fmt.max - (fmt.name == "int8")
    return casting.rounded(t.clamp(least, fmt.max), fmt)


def codes_of(span: Span, scale: Tensor, fmt: Format, rules: Rules) -> Span:
    """The codes that a correct kernel may make of v by ``scale`` (m, 1) or (m, N), fp32 in fp64, all > 0."""
    scaling = rules.model.scaling
    if scaling == "division":
        quotient = span.each(lambda v: _fp32(v / scale))
    elif scaling == "reciprocal":
        factor = _fp32(1.0 / scale)
        quotient = span.each(lambda v: _fp32(v * factor))
    else:
        exact, k = span.each(lambda v: v / scale), torch.full_like(scale, rules.count["code"] * rules.u)
        if rules.model.scale == "given":  # by a power of two every way to divide is exact
            k.masked_fill_(torch.frexp(scale).mantissa == 0.5, 0.0)
        quotient = Span(exact.value, exact.low - exact.low.abs() * k, exact.high + exact.high.abs() * k)
    codes = quotient.each(lambda t: quantised(t, fmt))
    if fmt.name == "int8":  # a kernel may saturate at -127, as the scale is made for that
        codes = replace(codes, high=torch.where(codes.low < -fmt.max, codes.high.clamp(min=-fmt.max), codes.high))
    return codes


def _fp32(t: Tensor) -> Tensor:
    """``t`` rounded to fp32. Of a quotient or a product of two fp32 numbers that is what fp32 arithmetic returns."""
    return t.float().double()


def judge_codes(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[tuple[Checked, ...], Reference]:
    """Check the scale, unless it was given, and the codes by the scale that was used; and residual_out.

    ``outputs`` has q, and the scale or an implementation that gets it. See ``judge_forward``.
    """
    case, parts, rstd = judge.case, dict[tuple[str, str], list[tuple[int, Comparison]]](), []
    codes = outputs[Q].reshape(case.M, case.N)
    fmt = formats()[codes.dtype]
    own = outputs.get(SCALE)
    shared = "" if own is None else granularity(case, own, judge.rules.model.scale)
    whole = None if own is None else own.reshape(case.M, scale_columns(case, shared)).double()
    for block in judge.blocks():
        truth = judge.truth(block)
        rstd.append(truth.rows.rstd.float())
        found = sum_checks(judge, outputs, block)
        span, ok = span_of(judge, truth), truth.checkable
        if whole is not None:
            found.append((SCALE, END_TO_END, _scale_comparison(judge, span, whole[block], fmt, shared, ok, block)))
            of_columns = _of_columns(whole[block], shared, case.N)
            found.append((Q, OWN_SCALE, _code_comparison(judge, span, of_columns, codes[block], fmt, ok, block)))
        elif judge.given_scale is not None:
            given = judge.given_scale.double().reshape(1, 1)
            found.append((Q, GIVEN_SCALE, _code_comparison(judge, span, given, codes[block], fmt, ok, block)))
        for output, check, comparison in found:
            parts.setdefault((output, check), []).append((block.start, comparison))
    checked = tuple(Checked(output, check, merge(several, case.M)) for (output, check), several in parts.items())
    return checked, Reference(None, torch.cat(rstd), None, None, None)


def expected_scale(judge: Judge, span: Span, fmt: Format, shared: str) -> tuple[Span, Tensor]:
    """The scales (m, G) that a correct kernel may return, without a floor; bool (m, G): all its v are 0, or underflow.

    ``shared``: what shares a scale, as ``granularity`` has it.
    """
    rules, size, width = judge.rules, span.size, BLOCKS.get(shared, judge.case.N)
    count = scale_columns(judge.case, shared)

    def largest(a: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(a, (0, count * width - judge.case.N))
        most = padded.view(-1, count, width).amax(2)
        return most.clamp(max=judge.case.option_values["scale_ub"]) if judge.case.scale == LIMITED else most

    most = Span(largest(size.value), largest(size.low), largest(size.high))
    k = rules.count["scale"] * rules.u
    scale = Span(
        most.value / fmt.max, most.low / fmt.max * (1 - k) - rules.eta, most.high / fmt.max * (1 + k) + rules.eta
    )
    floor = rules.model.scale_floor
    if floor is not None:
        scale = Span(
            scale.value.clamp(min=floor), scale.low.clamp(min=floor * (1 - k)), scale.high.clamp(min=floor * (1 + k))
        )
    return scale, (most.value == 0) & (most.high < NOTHING)


def _scale_comparison(
    judge: Judge, span: Span, own: Tensor, fmt: Format, shared: str, ok: Tensor | None, block: slice
) -> Comparison:
    """Compare scales. Without a declared floor, one that is tiny may be any that all such scales of the block have."""
    scale, nothing = expected_scale(judge, span, fmt, shared)
    low, high = scale.low, scale.high
    if judge.rules.model.scale_floor is None:
        raised = (own > high) & (own <= SMALL_SCALE)
        floors = own[raised]
        if floors.numel() and float(floors.max()) <= float(floors.min()) * (1 + 2 * judge.rules.u):
            high = torch.where(raised, 2.0 * floors.max(), high)
        high = torch.where(nothing, high.clamp(min=2.0), high)  # 1 is a usual scale of zeros
    upper, lower = high - scale.value, scale.value - low

    def terms() -> Mapping[str, Tensor]:
        return {"max |v|": (high - low) / 2}

    held = Expectation(SCALE, END_TO_END, block.start, scale.value, Bound(upper, lower, terms), FP32)
    return compared(judge, own, held, ok, finite=False)


def _code_comparison(
    judge: Judge, span: Span, scale: Tensor, codes: Tensor, fmt: Format, ok: Tensor | None, block: slice
) -> Comparison:
    """Compare codes by ``scale``, (m, N), (m, 1) or (1, 1), as numbers.

    The bound is the distance to the furthest code that is right, and a quarter of a step. So a right code has a ratio
    below 1, and the next one has one above. By a scale that is no positive number, which has its own check, a code must
    not be NaN.
    """
    usable = (scale >= _LEAST) & (scale < math.inf)
    right = codes_of(span, torch.where(usable, scale, 1.0), fmt, judge.rules)
    whole = torch.full_like(right.value, fmt.max + 1.0)
    step = half_ulp(right.value.abs(), fmt) / 2
    upper = torch.where(usable, right.high - right.value + step, whole)
    lower = torch.where(usable, right.value - right.low + step, whole)
    expected = torch.where(usable, right.value, 0.0)
    check = OWN_SCALE if judge.given_scale is None else GIVEN_SCALE

    def terms() -> Mapping[str, Tensor]:
        return {"codes in doubt": right.high - right.low, "a quarter of a step": step}

    held = Expectation(Q, check, block.start, expected, Bound(upper, lower, terms), fmt)
    found = compared(judge, codes.double(), held, ok, finite=False)
    doubt = (right.low < right.high) | ~usable if ok is None else (right.low < right.high) | ~usable | ~ok
    return replace(found, uncheckable=int(torch.count_nonzero(doubt)))


def _of_columns(scale: Tensor, shared: str, columns: int) -> Tensor:
    """The scale of each column, (m, N), or (m, 1) if a row has one."""
    return scale.repeat_interleave(BLOCKS[shared], 1)[:, :columns] if shared in BLOCKS else scale
