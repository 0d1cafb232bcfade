"""Loads and stores of Triton's interpreter in C: it takes some 40 ns for an element, half of the time of a kernel here.

Triton copies element by element through Python's objects. Here the same addresses are read and written in the same
order by ``interpreter_memory.c``, if the machine has a C compiler. An address that is not the kernel's ends its process
in both. Conversions between fp16 and fp32 are in C, too: numpy converts one element after the other, in software.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from normcheck import c_library

__all__ = ["converted", "quick"]

_SOURCE = Path(__file__).with_suffix(".c")
_BEFORE = (c_library.structure("elements", ("pointers", "mask", "values", "n", "size")),)
_SIZES = (1, 2, 4, 8)
_CONVERSIONS = {(np.dtype("f2"), np.dtype("f4")): "from_half", (np.dtype("f4"), np.dtype("f2")): "to_half"}
_MANY = 2048  # elements, from which on a call of C costs less than numpy


def quick(memory: Any) -> Any:
    """``memory``, the module by which the interpreter reads and writes, with its load and store in C.

    It is returned as it is if there is no C compiler. What C has no way for goes to ``memory``: arguments of several
    shapes, or of other dtypes than the interpreter's.
    """
    library = c_library.loaded(_SOURCE, _BEFORE)
    if library is None:
        return memory

    def move(name: str, pointers: Any, mask: Any, values: Any) -> None:
        arrays = np.ascontiguousarray(pointers), np.ascontiguousarray(mask), values
        c_library.call(library, name, (*map(_address, arrays), values.size, values.dtype.itemsize))

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        if not (_fits(pointers, mask, other) and other.dtype == dtype):
            return memory.load(pointers, mask, other, dtype)
        values = np.array(other, order="C")
        move("load", pointers, mask, values)
        return values

    def store(pointers: Any, values: Any, mask: Any) -> None:
        if not _fits(pointers, mask, values):
            memory.store(pointers, values, mask)
            return
        move("store", pointers, mask, np.ascontiguousarray(values))

    return SimpleNamespace(**{**vars(memory), "load": load, "store": store})


def converted(values: Any, dtype: Any) -> Any:
    """``values.astype(dtype)``, to nearest even. A signalling NaN may become a quiet one, as it does on a GPU."""
    name = _CONVERSIONS.get((values.dtype, np.dtype(dtype)), "")
    library = c_library.loaded(_SOURCE, _BEFORE) if name and values.size >= _MANY else None
    if library is None or not hasattr(library, name):
        return values.astype(dtype)
    values = np.ascontiguousarray(values)
    result = np.empty(values.shape, dtype)
    c_library.call(library, name, (_address(values), 0, _address(result), values.size, 0))
    return result


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _fits(pointers: Any, mask: Any, values: Any) -> bool:
    if not all(isinstance(each, np.ndarray) for each in (pointers, mask, values)):
        return False  # of a descriptor the interpreter gives the mask's memory
    alike = pointers.shape == mask.shape == values.shape
    return alike and pointers.dtype == np.uint64 and mask.dtype == np.bool_ and values.dtype.itemsize in _SIZES
