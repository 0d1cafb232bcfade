"""Guard bands around a tensor, and patterns where nothing was written yet.

A tensor that an implementation gets lies in a buffer of its own, between two bands and with a pattern in the gaps
behind its rows. A band that has changed was written to; outputs that change with the pattern read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

_ALIGNED = 512
"""Bytes: what allocators align to on a GPU, and more than on a CPU. A band keeps it, so that kernels do as always."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Pattern:
    """What memory is filled with: dtype -> the bits of one element, as a signed integer of its size."""

    name: str
    bits: Mapping[torch.dtype, int]


def _pattern(name: str, half: int, brain: int, single: int, double: int, byte: int, boolean: int) -> Pattern:
    whole = {torch.uint8: byte, torch.int8: byte, torch.int16: byte * 0x0101, torch.int32: byte * 0x01010101}
    floats = {torch.float16: half, torch.bfloat16: brain, torch.float32: single, torch.float64: double}
    bits = {**floats, **whole, torch.int64: byte * 0x0101010101010101, torch.bool: boolean}
    signed = {dtype: _signed(value, 8 * dtype.itemsize) for dtype, value in bits.items()}
    return Pattern(name, MappingProxyType(signed))


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if width > 8 and value >= 1 << (width - 1) else value


NAN = _pattern("NaN", 0x7E5A, 0x7FDA, 0x7FDA5A5A, 0x7FFA5A5A5A5A5A5A, 0xFF, 1)
"""A NaN whose payload no computation makes, so that writing a NaN over it shows; integers: all ones."""
LARGE = _pattern("a large number", 0x7753, 0x7149, 0x7149F2CA, 0x46293E5939A08CEA, 0x5A, 0)
"""3e4 in fp16, 1e30 elsewhere: what a comparison or an fmax would not swallow, as it does a NaN."""
NEGATIVE = _pattern("a large negative number", 0xF753, 0xF149, 0xF149F2CA, 0xC6293E5939A08CEA, 0x25, 0)


PATTERNS = {pattern.name: pattern for pattern in (NAN, LARGE, NEGATIVE)}


def placed(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, *, shift: int = 0
) -> Tensor:
    """A tensor of this geometry in a buffer of its own, everything NAN. ``shift``: elements off the aligned base."""
    band = _band(shape[-1], dtype.itemsize)
    total = band + shift + _extent(shape, stride) + (stride[0] if len(shape) > 1 else 0) + band
    buffer = torch.empty(total, dtype=_INTEGER[dtype.itemsize], device=device).fill_(NAN.bits[dtype])
    return buffer.view(dtype).as_strided(shape, stride, band + shift)


def copy(tensor: Tensor, pattern: Pattern) -> Tensor:
    """``tensor`` with its whole buffer, of the same geometry, with ``pattern`` where the original has NAN's."""
    bits = _bits(tensor)
    if pattern is NAN:
        buffer = bits.clone()
    else:
        buffer = torch.where(bits == NAN.bits[tensor.dtype], pattern.bits[tensor.dtype], bits)
    return buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def in_bands(tensor: Tensor, pattern: Pattern) -> Tensor:
    """A copy of a dense tensor between bands of ``pattern``."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype not in NAN.bits or not tensor.numel():
        return tensor.clone()
    shape = tuple(tensor.shape)
    out = allocated(shape, tuple(tensor.stride()), tensor, pattern, None)[0]
    return out.copy_(tensor)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same bits; any NaN is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(_as_integers(a), _as_integers(b)):
        return True
    return a.is_floating_point() and not bool(differing(a, b).any())


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Bool like both: where the bits differ, one NaN counting like another."""
    unequal = _as_integers(a) != _as_integers(b)
    return unequal & ~(torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() else unequal


def moved(before: Tensor, after: Tensor) -> bool:
    """Whether ``after``, which began as a copy of ``before``, has another geometry or storage size by now."""
    return (
        after.shape != before.shape
        or after.stride() != before.stride()
        or after.storage_offset() != before.storage_offset()
        or after.untyped_storage().nbytes() != before.untyped_storage().nbytes()
    )


def untouched(before: Tensor, after: Tensor) -> bool:
    """Whether two buffers, bands and gaps included, have the same bits. Neither may have ``moved``."""
    return torch.equal(_bits(before), _bits(after))


def elements(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` that have memory of their own: a view with one row where all rows share one."""
    stride = tensor.stride()
    shape = tuple(min(n, 1) if s == 0 else n for n, s in zip(tensor.shape, stride, strict=True))
    return tensor.detach().as_strided(shape, stride, tensor.storage_offset())


def trespass(before: Tensor, after: Tensor) -> tuple[int, str]:
    """How many elements outside the tensor differ in two buffers of one geometry; where the first lies, in words."""
    wrong = _bits(before) != _bits(after)
    inside = torch.zeros_like(wrong)
    elements(inside.as_strided(before.shape, before.stride(), before.storage_offset())).fill_(True)
    places = (wrong & ~inside).nonzero().flatten()
    if not len(places):
        return 0, ""
    return len(places), _in_words(int(places[0]) - int(before.storage_offset()), tuple(before.shape), before.stride())


def _in_words(at: int, shape: tuple[int, ...], stride: Sequence[int]) -> str:
    """Where the element lies that is ``at`` elements behind a tensor's first one."""
    if at < 0:
        return f"{-at} before its first element"
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if at > last:
        return f"{at - last} behind its last element"
    row, column = divmod(at, stride[-2])
    return f"{column - shape[-1] + 1} behind the end of row {row}"


def allocated(
    shape: tuple[int, ...], stride: tuple[int, ...], like: Tensor, around: Pattern, fresh: Pattern | None
) -> tuple[Tensor, tuple[Tensor, int, int]]:
    """A tensor of ``like``'s dtype and device between bands, not a view of anything; its buffer and place there."""
    band, extent = _band(shape[-1] if shape else 1, like.element_size()), _extent(shape, stride)
    buffer = torch.empty(2 * band + extent, dtype=_INTEGER[like.element_size()], device=like.device)
    buffer.fill_(around.bits[like.dtype])
    if fresh is not None and fresh is not around:
        buffer[band : band + extent].fill_(fresh.bits[like.dtype])
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(buffer.untyped_storage(), band, shape, stride)
    return tensor, (buffer, band, band + extent)


@cache
def band_of(bits: int, dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
    """A band of so many elements, each with these ``bits``, for comparison."""
    return torch.full((length,), bits, dtype=dtype, device=device)


def _band(columns: int, size: int) -> int:
    """Elements of a guard band: a row and 256 elements more, so that a padded row ends within it."""
    return math.ceil((columns + 256) * size / _ALIGNED) * _ALIGNED // size


def _extent(shape: tuple[int, ...], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, gaps between them included."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def _bits(tensor: Tensor) -> Tensor:
    """The whole buffer behind ``tensor`` as integers, in one dimension."""
    total = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((total,), (1,), 0).view(_INTEGER[tensor.element_size()])


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.view(_INTEGER[tensor.element_size()])
