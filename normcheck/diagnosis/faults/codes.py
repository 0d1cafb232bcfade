"""Faults of codes, and of the scale that is returned with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.dtypes import CODES, Format
from normcheck.diagnosis.faults.fault import BF16, FP16, Fault, fault, quantising_ops
from normcheck.diagnosis.formula import TEXTBOOK, Call, stored, truncated
from normcheck.oracle.casting import rounded
from normcheck.oracle.quantised import Span, quantised


def _fault(name: str, words: str, **more: Any) -> Fault:
    return fault(name, words, takes=quantising_ops, **more)


def _clamped(c: Call, t: Tensor) -> Tensor:
    return quantised(t, c.codes)


def _away_from_zero(c: Call, t: Tensor) -> Tensor:
    if c.codes.name != "int8":
        return _clamped(c, t)
    return _clamped(c, torch.copysign((t.abs() + 0.5).floor(), t))


def _toward_zero(c: Call, t: Tensor) -> Tensor:
    kept = t.clamp(-c.codes.max - (c.codes.name == "int8"), c.codes.max)
    return kept.trunc() if c.codes.name == "int8" else truncated(kept, c.codes)


def _wrapped(c: Call, t: Tensor) -> Tensor:
    return (t.round() + 128) % 256 - 128 if c.codes.name == "int8" else _clamped(c, t)


def _nan_past(c: Call, t: Tensor, near: Tensor) -> Tensor:
    """NaN in place of what is past the largest code, by ``near``: t, or t as it is rounded to an unlimited code."""
    return torch.where(near.abs() > c.codes.max, torch.nan, _clamped(c, t))


def _through(fmt: Format) -> Callable[[Call, Tensor], Tensor]:
    return lambda c, t: quantised(stored(t, fmt), c.codes)


def _most(of: Callable[[Call, Tensor], Tensor], *, signed: bool = False) -> Callable[[Call, Span], Span]:
    """The largest |v|, or v, that counts, as ``of`` makes it of (M, N)."""
    return lambda c, v: (v if signed else v.size).each(lambda t: of(c, t))


def _largest(c: Call, t: Tensor) -> Tensor:
    return c.blocks(t).amax(2)


def _without_tail(k: int) -> Callable[[Call, Tensor], Tensor]:
    return lambda c, t: _largest(c, torch.where(torch.arange(c.N) < max(c.N // k * k, 1), t, 0.0))


def _last_from_before(c: Call, t: Tensor) -> Tensor:
    most = _largest(c, t)
    if c.N % c.width and most.shape[1] > 1:
        most[:, -1] = most[:, -2]
    return most


def _by_max(largest: float) -> Callable[[Call, Tensor], Tensor]:
    return lambda c, most: c.limited(most) / largest


def _scale_of_block_after(c: Call) -> Tensor:
    by = c.of_columns(c.scales)
    return by.roll(-c.width, 1) if c.width < c.N else by


def _wider_blocks(c: Call) -> Tensor:
    by = c.of_columns(c.scales)
    return by if by.numel() == 1 else by[:, torch.arange(c.N) // (2 * c.width) * (2 * c.width)]


def _before_rounding(c: Call, v: Span) -> Span:
    return TEXTBOOK.most(c, c.unrounded)


FAULTS = (
    _fault(
        "codes_ties_away",
        "ties between two codes go away from zero: they must go to the even one",
        code=_away_from_zero,
    ),
    _fault("codes_truncated", "codes are cut off toward zero: they must be rounded to nearest", code=_toward_zero),
    _fault("codes_wrap", "codes past the largest wrap around: saturation is missing", code=_wrapped),
    _fault("codes_nan", "codes past the largest are NaN: saturation is missing", code=lambda c, t: _nan_past(c, t, t)),
    _fault(
        "codes_nan",
        "codes past the largest are NaN: saturation is missing",
        code=lambda c, t: _nan_past(c, t, rounded(t, c.codes)),
    ),
    *(
        _fault(
            f"codes_end_at_{largest}",
            f"codes end at {largest}, which is not the largest of this format",
            code=lambda c, t, largest=largest: _clamped(c, t.clamp(-largest, largest)),
        )
        for largest in (120, 240)
    ),
    _fault("codes_zero", "every code is 0", code=lambda c, t: 0 * t.nan_to_num()),
    _fault("codes_without_sign", "the sign of y is lost", v=lambda c, y: y.size),
    _fault("codes_twice", "codes are rounded twice: the quotient goes through bf16 first", code=_through(BF16)),
    _fault("codes_twice_fp16", "codes are rounded twice: the quotient goes through fp16 first", code=_through(FP16)),
    _fault(
        "codes_of_bf16",
        "y is rounded to bf16 before it is quantised",
        v=lambda c, y: y.each(lambda t: rounded(t, BF16)),
        but="bf16",
    ),
    _fault(
        "codes_of_fp16",
        "y is rounded to fp16 before it is quantised",
        v=lambda c, y: y.each(lambda t: rounded(t, FP16)),
        but="fp16",
    ),
    _fault(
        "scale_multiplied",
        "y is multiplied by the scale: it must be divided",
        quotient=lambda c, v, by: v.each(lambda t: t * by),
    ),
    _fault("scale_ignored", "the scale is not used for the codes", quotient=lambda c, v, by: v),
    _fault(
        "scale_inverse",
        "the scale that is returned is its reciprocal",
        scale_out=lambda c, scale: 1 / scale,
        divisor=lambda c: c.of_columns(1 / c.scales if "scale" in c.own else c.scales),
    ),
    _fault(
        "scale_signed",
        "the scale is of the largest v: it must be of the largest |v|",
        most=_most(_largest, signed=True),
    ),
    *(
        _fault(
            f"scale_without_tail_{k}",
            f"the last N mod {k} columns do not count for the scale",
            most=_most(_without_tail(k)),
        )
        for k in (4, 8, 16, 32)
    ),
    _fault(
        "scale_of_all_rows",
        "all rows share the scale of the largest",
        most=_most(lambda c, t: _largest(c, t).amax(0, keepdim=True).expand(c.M, -1)),
    ),
    _fault("scale_limit_missing", "scale_ub does not limit the largest |y|", scale=lambda c, most: most / c.codes.max),
    _fault(
        "scale_limit_missing",
        "scale_ub does not limit the largest |y|",
        scale=lambda c, most: (most / c.codes.max).clamp(max=c.limits.get("scale_ub", torch.inf)),
    ),
    *(
        _fault("scale_of_other_format", "the scale is made for the codes of another format", scale=_by_max(fmt.max))
        for fmt in CODES.values()
    ),
    _fault(
        "scale_power_of_two",
        "the scale is rounded up to a power of two",
        scale=lambda c, most: torch.exp2(torch.ceil(torch.log2(TEXTBOOK.scale(c, most)))),
    ),
    _fault(
        "scale_of_other_row",
        "each row returns the scale of the row before it",
        scale_out=lambda c, scale: scale.roll(1, 0),
        divisor=lambda c: c.of_columns(c.scales.roll(-1, 0)),
    ),
    _fault(
        "scale_of_next_block",
        "each block of codes is divided by the scale of the next one",
        divisor=_scale_of_block_after,
    ),
    _fault(
        "scale_of_block_before",
        "a last block that is not full has the scale of the one before it",
        most=_most(_last_from_before),
    ),
    _fault("scale_of_wider_blocks", "codes are divided by the scale of a block twice as wide", divisor=_wider_blocks),
    _fault(
        "scale_before_rounding",
        "the scale is of y before it is rounded, the codes are of y after it",
        most=_before_rounding,
        narrow=True,
    ),
)
