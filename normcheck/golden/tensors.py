"""A safetensors file from somebody else: its header is read and held against what is expected before it is loaded.

The format: eight bytes that count the header's bytes (little endian), the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normcheck.errors import UsageError, one_line, shown

MOST_BYTES = 1 << 26
"""Bytes of a file of tensors: 64 MiB. A whole record is to stay under 5 MB."""

_HEADER_BYTES = 1 << 22
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "BOOL": torch.bool}


def load(content: bytes, who: str) -> dict[str, Tensor]:
    """The tensors in ``content`` by name. Raises UsageError, which begins with ``who``, for whatever else it is."""
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    _check(content, who)
    try:
        return dict(read(content))
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise UsageError(f"{who}: expected safetensors: {one_line(str(error), 200)}") from None


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """``tensors`` as the bytes of a file; the same tensors give the same bytes."""
    from safetensors.torch import save

    return bytes(save({name: tensors[name].contiguous().clone() for name in sorted(tensors)}))


def _check(content: bytes, who: str) -> None:
    """That the header is there, and that its tensors lie one behind another and fill the file."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(_HEADER_BYTES, len(content) - 8):
        raise UsageError(
            f"{who}: its header is said to have {size} bytes, the file has {len(content)}: expected all of it"
        )
    try:
        header = json.loads(content[8 : 8 + size].decode("utf-8"))
    except (ValueError, RecursionError):
        raise UsageError(f"{who}: expected a header in JSON") from None
    if not isinstance(header, dict):
        raise UsageError(f"{who}: its header is {type(header).__name__}: expected an object")
    extents = sorted(_extent(name, described, who) for name, described in header.items())
    end = 0
    for first, last, name in extents:
        if first != end:
            raise UsageError(f"{who}: tensor {shown(name, 60)} begins at byte {first}: expected {end}")
        end = last
    if end != len(content) - 8 - size:
        raise UsageError(f"{who}: its tensors have {end} bytes, expected {len(content) - 8 - size} as in the file")


def _extent(name: str, described: Any, who: str) -> tuple[int, int, str]:
    """(first, last, name): where a tensor's bytes lie."""
    what = f"{who}: tensor {shown(name, 60)}"
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise UsageError(f"{what}: expected dtype, shape and data_offsets of it, and nothing else")
    dtype, shape, offsets = (described[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UsageError(f"{what}: dtype={shown(dtype, 60)}: expected one of {', '.join(_DTYPES)}")
    if not _are_sizes(shape, 2) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise UsageError(f"{what}: shape={shown(shape, 60)} data_offsets={shown(offsets, 60)}: expected small integers")
    first, last = offsets
    if last - first != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise UsageError(f"{what}: has {last - first} bytes: expected those of its dtype and shape")
    return first, last, name


def _are_sizes(numbers: Any, most: int) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) <= most
        and all(type(n) is int and 0 <= n <= MOST_BYTES for n in numbers)
    )
