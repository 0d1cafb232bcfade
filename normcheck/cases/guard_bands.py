"""Guard bands around tensors, and the bit patterns that fill bands, gaps and uninitialised memory.

A tensor that an implementation gets lies in a buffer of its own, between two bands and with a pattern in the gaps
behind its rows. If a band has changed, the kernel wrote to it. If outputs change with the pattern, the kernel read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 26
"""Elements that are compared at once. A sum of bools takes eight bytes for each, and torch on a GPU does not index more
than 2^31 elements in every operation."""

_ALIGNED_BYTES = 512
"""Bytes, the alignment of torch's allocator on a GPU. A band keeps it, so that kernels take their usual paths."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Pattern:
    """A fill of memory. ``bits``: dtype -> the bits of one element, as an integer of its size as torch has it.

    ``word``: the two bytes of which elements of every dtype consist, but for those of one byte. So memory can be filled
    before it is known what will lie there.
    """

    name: str
    word: bytes
    bits: Mapping[torch.dtype, int]


_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64)


def _pattern(name: str, word: int, byte: int, boolean: int) -> Pattern:
    two = word.to_bytes(2, "little")
    wide = {dtype: int.from_bytes(two * (dtype.itemsize // 2), "little", signed=True) for dtype in _WIDE}
    bytes_ = dict.fromkeys((torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2), byte)
    bits = {**wide, **bytes_, torch.bool: boolean}
    return Pattern(name, two, MappingProxyType(bits))


NAN = _pattern("NaN", 0x7FFA, 0xFF, 1)
"""A NaN whose payload no computation makes, so that a NaN written over it shows; integers: large, or all ones."""
LARGE = _pattern("a large number", 0x7149, 0x5A, 0)
"""1e4 in fp16, 1e30 in other formats: unlike a NaN it is not lost in a comparison or an fmax."""
NEGATIVE = _pattern("a large negative number", 0xF149, 0x25, 0)
ONE = _pattern("a number near 1", 0x3F80, 0x38, 1)
"""1.875 in fp16, 1.0 in other formats: what comes of it is finite, where a NaN and a large number both make a NaN."""

PATTERNS = {pattern.name: pattern for pattern in (NAN, LARGE, NEGATIVE, ONE)}


def placed(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, *, shift: int = 0
) -> Tensor:
    """A tensor of this geometry in a buffer of its own, filled with NAN, ``shift`` elements off an aligned address."""
    band = _band(shape[-1], dtype.itemsize)
    total = band + shift + _extent(shape, stride) + (stride[0] if len(shape) > 1 else 0) + band
    buffer = torch.empty(total, dtype=_INTEGER[dtype.itemsize], device=device).fill_(NAN.bits[dtype])
    return buffer.view(dtype).as_strided(shape, stride, band + shift)


def restrided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of ``tensor``, bit for bit, with other strides, in a buffer of its own."""
    moved = placed(tuple(tensor.shape), stride, tensor.dtype, tensor.device.type)
    as_integers(moved).copy_(as_integers(tensor))
    return moved


def copy(tensor: Tensor, pattern: Pattern) -> Tensor:
    """A copy of ``tensor`` and of its whole buffer, with ``pattern`` in place of NAN."""
    bits = _bits(tensor)
    buffer = bits.clone()
    if pattern is not NAN:
        buffer.masked_fill_(bits == NAN.bits[tensor.dtype], pattern.bits[tensor.dtype])
    return buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def in_bands(tensor: Tensor, pattern: Pattern, reach: int = 0) -> Tensor:
    """A contiguous copy of ``tensor`` between bands of ``pattern``, each at least as wide as for rows of ``reach``."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype not in NAN.bits or not tensor.numel():
        return tensor.clone()
    shape = tuple(tensor.shape)
    out = allocated(shape, tuple(tensor.stride()), tensor, pattern, None, reach)[0]
    return out.copy_(tensor)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; all NaNs count as the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(as_integers(a), as_integers(b)):
        return True
    return a.is_floating_point() and how_many_differ(a, b) == 0


def how_many_differ(a: Tensor, b: Tensor) -> int:
    """The number of elements whose bits differ; all NaNs count as the same. Both have one shape and dtype.

    Elements are compared in blocks: a temporary of many bytes for each would be larger than the tensors.
    """
    if a.numel() <= BLOCK_ELEMENTS:
        return int(differing(a, b).sum())
    if len(a) == 1:
        return how_many_differ(a[0], b[0])
    height = max(1, BLOCK_ELEMENTS * len(a) // a.numel())
    blocks = (slice(first, first + height) for first in range(0, len(a), height))
    return sum(how_many_differ(a[block], b[block]) for block in blocks)


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Bool, True at the elements whose bits differ; all NaNs count as the same. Both have one shape and dtype."""
    unequal = as_integers(a) != as_integers(b)
    return unequal & ~(_is_nan(a) & _is_nan(b)) if a.is_floating_point() else unequal


def _is_nan(t: Tensor) -> Tensor:
    """``torch.isnan``, also of numbers of 8 bits, which not every device compares."""
    return torch.isnan(t.float() if t.element_size() == 1 else t)


def moved(before: Tensor, after: Tensor) -> bool:
    """Whether ``after``, once a copy of ``before``, has another geometry or storage size now."""
    return bool(
        after.shape != before.shape
        or after.stride() != before.stride()
        or after.storage_offset() != before.storage_offset()
        or after.untyped_storage().nbytes() != before.untyped_storage().nbytes()
    )


def all_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the tensors of every pair, of one shape and dtype, are equal. A GPU is waited for once."""
    flags = equality(pairs)
    return flags is not None and (not flags or bool(torch.stack(flags).all()))


def equality(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor] | None:
    """Whether the tensors of the pairs on a GPU are equal: a bool () each, not waited for; None if others are not."""
    if not all(torch.equal(a, b) for a, b in pairs if not a.is_cuda):
        return None
    return [(a == b).all() for a, b in pairs if a.is_cuda]


def all_untouched(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether no buffer has ``moved`` or changed; the pairs are (before, after), see ``untouched``."""
    return not any(moved(*pair) for pair in pairs) and all_equal([(_bits(a), _bits(b)) for a, b in pairs])


def untouched(before: Tensor, after: Tensor) -> bool:
    """Whether two buffers, bands and gaps included, have the same bits. Neither may have ``moved``."""
    return torch.equal(_bits(before), _bits(after))


def elements(tensor: Tensor) -> Tensor:
    """The elements of ``tensor``, each once: a view in which a dimension of stride 0 has one element."""
    stride = tensor.stride()
    shape = tuple(min(n, 1) if s == 0 else n for n, s in zip(tensor.shape, stride, strict=True))
    return tensor.detach().as_strided(shape, stride, tensor.storage_offset())


def trespass(before: Tensor, after: Tensor) -> tuple[int, str]:
    """How many elements outside the tensor differ in two buffers of one geometry; the place of the first, in words."""
    old, new = _bits(before), _bits(after)
    inside = torch.zeros_like(old, dtype=torch.bool)
    elements(inside.as_strided(before.shape, before.stride(), before.storage_offset())).fill_(True)
    count, first = 0, 0
    for start in range(0, len(old), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        wrong = (old[block] != new[block]).logical_and_(~inside[block])
        here = int(wrong.sum())
        if here and not count:
            first = start + int(wrong.int().argmax())
        count += here
    if not count:
        return 0, ""
    return count, _in_words(first - int(before.storage_offset()), tuple(before.shape), before.stride())


def _in_words(at: int, shape: tuple[int, ...], stride: Sequence[int]) -> str:
    """The place of the element that is ``at`` elements behind a tensor's first one."""
    if at < 0:
        return f"{-at} before its first element"
    if len(shape) == 3 and stride[0] > shape[1] * stride[1] and at < shape[0] * stride[0]:
        return _among_heads(at, shape, stride)
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if at > last:
        return f"{at - last} behind its last element"
    row, column = divmod(at, stride[-2])
    return f"{column - shape[-1] + 1} behind the end of row {row}"


def _among_heads(at: int, shape: Sequence[int], stride: Sequence[int]) -> str:
    """As ``_in_words``, in a buffer that has other heads behind those of each token."""
    token, rest = divmod(at, stride[0])
    head, column = divmod(rest, stride[1])
    own = f"the {shape[1]} heads" if shape[1] > 1 else "the head"
    where = f"head {head} of token {token}"
    if head < shape[1]:
        return f"{column - shape[2] + 1} behind the end of {where}"
    return f"element {column} of {where}, which lies behind {own} of x"


def allocated(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    like: Tensor,
    around: Pattern,
    fresh: Pattern | None,
    reach: int = 0,
) -> tuple[Tensor, tuple[Tensor, int, int]]:
    """A tensor of ``like``'s dtype and device between bands of ``around``, filled with ``fresh`` if that is given.

    It is no view of another tensor. Also returns its buffer as integers, and its first and end index there. The bands
    are at least as wide as for rows of ``reach`` elements.
    """
    band, extent = footprint(shape, stride, like.element_size())
    band = max(band, _band(reach, like.element_size()))
    buffer = torch.empty(2 * band + extent, dtype=_INTEGER[like.element_size()], device=like.device)
    buffer.fill_(around.bits[like.dtype])
    if fresh is not None and fresh is not around:
        buffer[band : band + extent].fill_(fresh.bits[like.dtype])
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(buffer.untyped_storage(), band, shape, stride)
    return tensor, (buffer, band, band + extent)


@cache
def band_of(bits: int, dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
    """A band of ``length`` elements, each with these ``bits``, to compare with."""
    return torch.full((length,), bits, dtype=dtype, device=device)


def footprint(shape: tuple[int, ...], stride: Sequence[int], size: int) -> tuple[int, int]:
    """Elements of ``size`` bytes in a band beside a tensor, and from its first to its last, including gaps."""
    return _band(shape[-1] if shape else 1, size), _extent(shape, stride)


def _band(columns: int, size: int) -> int:
    """Elements in a guard band: one row and 256 elements, so that a padded row ends within it."""
    return math.ceil((columns + 256) * size / _ALIGNED_BYTES) * _ALIGNED_BYTES // size


def _extent(shape: tuple[int, ...], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, including gaps."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def _bits(tensor: Tensor) -> Tensor:
    """The whole buffer behind ``tensor`` as integers, in one dimension."""
    storage, base = tensor.untyped_storage(), tensor._base
    total = storage.nbytes() // tensor.element_size()
    if base is None or base.shape != (total,) or base.data_ptr() != storage.data_ptr() or base.requires_grad:
        base = tensor.detach().as_strided((total,), (1,), 0)
    return base.view(_INTEGER[tensor.element_size()])  # of ``placed`` and ``copy``, base is the whole buffer


def buffer_of(tensor: Tensor) -> Tensor:
    """The whole storage behind ``tensor`` as bytes: uint8, one dimension."""
    count = tensor.untyped_storage().nbytes()
    plain = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return plain.set_(tensor.untyped_storage(), 0, (count,), (1,))


def as_integers(tensor: Tensor) -> Tensor:
    """``tensor`` with its bits as integers: a view, or a copy of one that torch negates only when it is read."""
    return tensor if tensor.dtype == torch.bool else tensor.resolve_neg().view(_INTEGER[tensor.element_size()])


def in_memory(tensor: Tensor) -> Tensor:
    """A view of what lies in the memory of ``tensor``, without the mark by which torch negates it when it is read."""
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
