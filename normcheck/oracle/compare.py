"""Comparison of one output with its reference: error / bound of each element, and the worst one.

The code writes ``not (ratio <= 1)``, so that a NaN is a mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.oracle.rounding import Bound, half_ulp

_INFINITE = 1e200  # a ratio above it comes from NO_ROOM, a bound that stands for 0


_MOST_RATIOS = 1 << 24  # elements whose ratios are kept


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected values of a block of an output and their bound, in fp64, (m, N), (m, 1) or (N,).

    ``first``: the number of the block's first row; ``fmt``: the format of the stored output.
    """

    output: str
    check: str
    first: int
    expected: Tensor
    bound: Bound
    fmt: Format


@dataclass(frozen=True, slots=True)
class Element:
    """The worst element of a comparison, as plain numbers. ``ulps``: its error in units in the last place there;
    ``terms``: the parts of its bound, if it is wrong.
    """

    index: tuple[int, ...]
    actual: float
    expected: float
    error: float
    ulps: float
    bound: float
    terms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing a block of an output with its reference.

    ``ratio``: the largest error / bound (NaN counts as infinite). ``max_abs``, ``max_ulp`` and ``worst`` are filled
    in only if the ratio is above 1 or above the caller's ``floor``. ``wrong``: bool like the block, None if nothing is
    wrong. ``uncheckable``: the number of elements without a finite bound. ``zeros``: the number of elements with a
    finite bound that a 0 would pass as well; None if they were not counted. ``ratios``: error / bound of each element,
    fp32 like ``wrong``, with 0 in blocks of rows that are right; None if nothing is wrong, or there are too many.
    """

    ratio: float
    numel: int
    uncheckable: int
    zeros: int | None = None
    max_abs: float = 0.0
    max_ulp: float = 0.0
    non_finite: bool = False
    wrong: Tensor | None = None
    worst: Element | None = None
    ratios: Tensor | None = None


def compare(
    actual: Tensor, held: Expectation, *, floor: float = 0.0, finite: bool = False, zeros: bool = False
) -> Comparison:
    """Compare ``actual`` (any dtype) with the expectation that it is ``held`` against, of its shape.

    No bound may be 0: ``rounding.NO_ROOM`` stands for it. ``finite``: the caller knows that every bound is finite.
    ``zeros``: whether to count the elements that a 0 would pass.
    """
    if actual.numel() == 0:
        return Comparison(0.0, 0, 0, 0 if zeros else None)
    uncheckable = 0
    if not (finite or _all_finite(held.bound)):
        held = replace(held, bound=_unbounded(held.bound))
        uncheckable = int(torch.isinf(held.bound.upper).sum())
    zeros_passed = _zeros(held, uncheckable) if zeros else None
    ratio = _ratio(_error(actual, held), held.bound)
    largest = float(ratio.amax())
    brief = Comparison(largest, actual.numel(), uncheckable, zeros_passed)
    if largest <= 1 and largest <= floor:
        return brief
    got, error = actual.double(), _error(actual, held)
    if not largest <= 1:
        ratio = _excuse(ratio, got, held)
        largest = float(ratio.max())
        brief = replace(brief, ratio=math.inf if largest > _INFINITE else largest)
    return _with_worst(brief, ratio, error, got, held)


def _with_worst(brief: Comparison, ratio: Tensor, error: Tensor, got: Tensor, held: Expectation) -> Comparison:
    """``brief`` with the largest errors, the wrong elements and the worst one."""
    failed = not brief.ratio <= 1
    at = int(ratio.argmax())
    size = error.abs()
    if brief.uncheckable:
        size = torch.where(torch.isinf(held.bound.upper), 0.0, size)
    largest = float(size.amax())
    if not math.isfinite(largest):
        size = torch.where(torch.isfinite(error), size, 0.0)
        largest = float(size.amax())
    ulp = size.div_(half_ulp(held.expected.abs(), held.fmt).mul_(2))
    found = replace(brief, max_abs=largest, max_ulp=float(ulp.amax()), worst=_element(at, got, error, held, failed))
    if not failed:
        return found
    wrong = ~(ratio <= 1)
    ratios = ratio.float() if ratio.numel() <= _MOST_RATIOS else None
    return replace(found, wrong=wrong, non_finite=bool((wrong & ~torch.isfinite(got)).any()), ratios=ratios)


def _error(actual: Tensor, held: Expectation) -> Tensor:
    """actual - expected in fp64, a new tensor. A tensor is widened first: mixed operands are slower."""
    return actual.to(torch.float64, copy=True).sub_(held.expected)


def _all_finite(bound: Bound) -> bool:
    """Whether every bound is finite, by its sum: bounds are not negative, so none cancels another."""
    return math.isfinite(float(bound.upper.sum())) and (bound.lower is None or math.isfinite(float(bound.lower.sum())))


def _unbounded(bound: Bound) -> Bound:
    """The bound with inf for NaN, which 0 * inf gives if eps and a variance are 0."""
    upper = torch.where(torch.isnan(bound.upper), math.inf, bound.upper)
    lower = None if bound.lower is None else torch.where(torch.isnan(bound.lower), math.inf, bound.lower)
    return Bound(upper, lower, bound.terms)


def _zeros(held: Expectation, uncheckable: int) -> int:
    """How many elements with a finite bound a 0 would pass."""
    bound, expected = held.bound, held.expected
    limit = bound.upper if bound.lower is None else torch.where(expected > 0, bound.lower, bound.upper)
    passed = expected.abs() <= limit
    if uncheckable or bound.lower is not None:
        passed &= limit < math.inf
    return int(torch.count_nonzero(passed))


def _ratio(error: Tensor, bound: Bound) -> Tensor:
    """|error| / its bound. ``error`` is overwritten."""
    if bound.lower is None:
        return error.abs_().div_(bound.upper)
    return torch.maximum(error / bound.upper, error.div_(bound.lower).neg_())


def _excuse(ratio: Tensor, got: Tensor, held: Expectation) -> Tensor:
    """``ratio`` with 0 for a legitimate overflow of the store and for a bound that is not finite, and inf for NaN.

    If the bound reaches past the format's maximum, a kernel may store an infinity of that sign; if the expected value
    lies past it, a kernel may store the maximum.
    """
    bound, expected, fmt = held.bound, held.expected, held.fmt
    reach = got.sign() * expected + bound.upper
    may_overflow = torch.isinf(got) & (reach >= fmt.max * (1 + 2.0 ** -(fmt.p + 1)))
    saturated = torch.isfinite(got) & (expected.abs() > fmt.max) & (got == expected.sign() * fmt.max)
    excused = may_overflow | saturated | (got == expected)
    unbounded = torch.isinf(bound.upper)
    if bound.lower is None:
        excused |= unbounded
    else:
        excused |= unbounded & (torch.isinf(bound.lower) | (got > expected))
    ratio = torch.where(torch.isnan(ratio), torch.full_like(ratio, math.inf), ratio)
    return torch.where(excused, torch.zeros_like(ratio), ratio)


def _element(at: int, got: Tensor, error: Tensor, held: Expectation, failed: bool) -> Element:
    bound = held.bound
    limit = bound.upper.flatten()[at]
    if bound.lower is not None and not float(error.flatten()[at]) > 0:
        limit = bound.lower.flatten()[at]
    if got.dim() == 1:
        index: tuple[int, ...] = (at,)
    else:
        row, column = divmod(at, got.shape[1])
        index = (row + held.first, column)
    expected = held.expected.flatten()[at : at + 1]
    size = abs(float(error.flatten()[at]))
    parts: Mapping[str, Tensor] = bound.terms() if failed else {}
    terms = ((name, float(term.expand_as(got).flatten()[at])) for name, term in parts.items())
    return Element(
        index=index,
        actual=float(got.flatten()[at]),
        expected=float(expected),
        error=size,
        ulps=size / (2 * float(half_ulp(expected.abs(), held.fmt))),
        bound=float(limit),
        terms=tuple(sorted(((n, t) for n, t in terms if t > 0), key=lambda part: -part[1])),
    )


def merge(blocks: list[tuple[int, Comparison]], rows: int) -> Comparison:
    """One comparison over all ``rows`` rows from those of consecutive blocks, each with the number of its first row."""
    if len(blocks) == 1:
        return blocks[0][1]
    worst = max((b for _, b in blocks), key=lambda b: b.ratio)
    numel = sum(b.numel for _, b in blocks)
    return Comparison(
        ratio=worst.ratio,
        numel=numel,
        uncheckable=sum(b.uncheckable for _, b in blocks),
        zeros=sum(b.zeros or 0 for _, b in blocks) if worst.zeros is not None else None,
        max_abs=max(b.max_abs for _, b in blocks),
        max_ulp=max(b.max_ulp for _, b in blocks),
        non_finite=any(b.non_finite for _, b in blocks),
        wrong=_whole([(first, b.wrong) for first, b in blocks], rows),
        worst=worst.worst,
        ratios=_whole([(first, b.ratios) for first, b in blocks], rows) if numel <= _MOST_RATIOS else None,
    )


def _whole(blocks: list[tuple[int, Tensor | None]], rows: int) -> Tensor | None:
    """One tensor of ``rows`` rows from blocks of it, with zeros for each that is None; None if all are."""
    whole: Tensor | None = None
    for first, block in blocks:
        if block is not None:
            if whole is None:
                whole = block.new_zeros((rows, block.shape[1]))
            whole[first : first + block.shape[0]] = block
    return whole
