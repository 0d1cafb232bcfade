"""How two results of one case differ, output by output: in bits, in ulps, over the bound, and against fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.tensor_names import ROOT_FIRST
from normcheck.checks.check import Result
from normcheck.oracle.compare import Expectation
from normcheck.oracle.distance import moved
from normcheck.oracle.expectations import whole
from normcheck.oracle.judge import END_TO_END
from normcheck.oracle.judge_forward import bits_of
from normcheck.oracle.rounding import NO_ROOM

_BITMASK = "bitmask"


@dataclass(frozen=True, slots=True)
class Ran:
    """One side of a case: its result, and output -> (expected, upper, lower), each (elements,) in fp64, on its device.

    ``upper`` bounds value - expected, ``lower`` expected - value: an rstd may be far too small, or a little too large.
    """

    result: Result
    held: Mapping[str, tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def of(cls, result: Result, watched: Sequence[Expectation]) -> Ran:
        """``watched``: all that the result was compared with, in the order of the comparisons."""
        last = {(part.output, part.check, part.first): part for part in watched}  # a part that was judged again
        held = {
            output: (expected.reshape(-1), upper.reshape(-1), lower.reshape(-1))
            for (output, check), (expected, upper, lower) in whole(tuple(last.values())).items()
            if check == END_TO_END
        }
        return cls(result, held)


@dataclass(frozen=True, slots=True)
class Off:
    """The errors of one side against fp64, over ``count`` elements; ``sum_ratio``: the sum of those over the bound.

    ``nearer``: of all elements that differ, those in which this side is nearer.
    """

    nearer: int
    count: int
    sum_abs: float
    max_abs: float
    sum_ratio: float


@dataclass(frozen=True, slots=True)
class Moved:
    """How one output of one case differs, see ``results.OutputPair``.

    ``off``: the two sides, None if the output has no single right value.
    """

    output: str
    elements: int
    differing: int
    signs: int
    ulps: float | None
    of_bound: float | None
    off: tuple[Off, Off] | None


def differences(a: Ran, b: Ran) -> Iterator[Moved | str]:
    """How each output that both returned differs, in the order of computation; a note for one that only one returned,
    or that has another form.
    """
    case, named = a.result.case, (a.result.seen.named, b.result.seen.named)
    for output in ROOT_FIRST:
        there = [output in side for side in named]
        if all(there):
            yield _difference(output, case, _flat(output, named[0], case), _flat(output, named[1], case), (a, b))
        elif any(there):
            yield f"{output} is returned only by {'A' if there[0] else 'B'}"


def unlike(a: Ran, b: Ran) -> tuple[str, ...]:
    """The outputs that both returned, but of another dtype or size: they have not the same bits, whatever is in them.

    A bitmask may be packed or not.
    """
    one, other = a.result.seen.named, b.result.seen.named
    both = [name for name in ROOT_FIRST if name in one and name in other and name != _BITMASK]
    return tuple(n for n in both if (one[n].dtype, one[n].numel()) != (other[n].dtype, other[n].numel()))


def _flat(output: str, named: Mapping[str, Tensor], case: Case) -> Tensor:
    """The elements of an output in the order of its rows; those of a bitmask are its bits."""
    tensor = named[output].detach()
    return bits_of(tensor, case).reshape(-1) if output == _BITMASK else tensor.reshape(-1)


def _difference(output: str, case: Case, one: Tensor, other: Tensor, sides: tuple[Ran, Ran]) -> Moved | str:
    if one.numel() != other.numel():
        return f"{output} has {one.numel()} elements of A and {other.numel()} of B in {case}: not compared"
    if one.dtype != other.dtype and not (one.is_floating_point() and other.is_floating_point()):
        return f"{output} is {_name(one)} of A and {_name(other)} of B: not compared"
    fine, coarse = one, other
    if one.dtype != other.dtype:  # in ulps of the coarser format, in which a reader has both
        dtype = max((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        fine, coarse = one.to(dtype), other.to(dtype)
    changed, ulps = moved(fine, coarse)
    equal = fine.float() == coarse.float() if fine.is_floating_point() else ~changed
    signs, changed = changed & equal, changed & ~equal
    count = int(changed.sum())
    of_bound, off = _against_fp64(output, one, other, changed, sides)
    bits = output == _BITMASK
    return Moved(output, one.numel(), count, int(signs.sum()), None if bits else ulps, of_bound if count else 0.0, off)


def _against_fp64(
    output: str, one: Tensor, other: Tensor, changed: Tensor, sides: tuple[Ran, Ran]
) -> tuple[float | None, tuple[Off, Off] | None]:
    """The largest difference over the bound, and the errors of both sides; None for what there is not.

    The bound of a side is the one that holds where its value lies, and of both it is the wider one. So if both values
    are inside theirs, the difference is 2 of it at most.
    """
    held = [side.held.get(output) for side in sides]
    first, second = held
    if first is None or second is None or any(len(part[0]) != one.numel() for part in (first, second)):
        return None, None
    values = one.double(), other.double()
    errors = tuple(_error(value, part[0]) for value, part in zip(values, (first, second), strict=True))
    bounds = tuple(
        torch.where(value >= expected, upper, lower)
        for value, (expected, upper, lower) in zip(values, (first, second), strict=True)
    )
    judged = (
        torch.isfinite(errors[0]) & torch.isfinite(errors[1]) & torch.isfinite(bounds[0]) & torch.isfinite(bounds[1])
    )
    share = _over((values[0] - values[1]).abs(), torch.maximum(*bounds))[changed & judged]
    nearer = [int((changed & (mine < its)).sum()) for mine, its in (errors, errors[::-1])]
    off = []
    for error, bound, count in zip(errors, bounds, nearer, strict=True):
        of_bound = _over(error[judged], bound[judged])
        error = error[judged]
        off.append(Off(count, error.numel(), float(error.sum()), _most(error), float(of_bound.sum())))
    return (float(share.max()) if share.numel() else None), (off[0], off[1])


def _over(error: Tensor, bound: Tensor) -> Tensor:
    """error / bound; infinite for an error if the bound stands for 0."""
    return torch.where((bound <= NO_ROOM) & (error > 0), torch.inf, error / bound)


def _error(value: Tensor, expected: Tensor) -> Tensor:
    """|value - expected|: 0 for equal infinities, and infinite for a NaN, from which everything is equally far."""
    error = torch.where(value == expected, 0.0, (value - expected).abs())
    return torch.where(torch.isnan(error), torch.inf, error)


def _most(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
