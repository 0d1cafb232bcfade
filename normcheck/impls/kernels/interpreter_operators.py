"""Operators of Triton's interpreter that go to numpy at once, if what triton does before makes no difference.

Between ``a + b`` and numpy's sum lie some ninety calls of Python, which choose the type of the result, convert and
broadcast both sides and make a type: 80 us, of which numpy's part is 2. Here operands whose common type numpy has too
are added as they are, and numpy broadcasts them by the same rule. All others take triton's way: bf16, unsigned
integers, integers with floats, numbers that the type does not hold, shapes that do not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from normcheck.impls.kernels.interpreter_memory import converted

__all__ = ["Operators"]

_FLOATS, _INTEGERS = {"fp16": "f2", "fp32": "f4", "fp64": "f8"}, {"int32": "i4", "int64": "i8"}
_DTYPES = {name: np.dtype(code) for name, code in (_FLOATS | _INTEGERS).items()}
_LEAST_NORMAL, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of fp32: beyond it triton makes a number an fp64

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_INSTALLED = "_normcheck_operators"


class Operators:
    """The operators of ``tl.core.tensor`` for one interpreter; a handle is its value, as ``Remedy`` has it."""

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self._interpreter, self._builder = interpreter, interpreter.interpreter_builder
        self._handle, self._tensor, self._block_type = interpreter.TensorHandle, tl.core.tensor, tl.core.block_type
        self._boolean = tl.int1
        self._kinds = {name: getattr(tl, name.replace("fp", "float")) for name in _DTYPES}
        ranked = [[self._kinds[name] for name in kind] for kind in (_FLOATS, _INTEGERS)]
        self._common = {(a.name, b.name): max(a, b, key=kind.index) for kind in ranked for a in kind for b in kind}
        self._fields: dict[Any, dict[str, Any]] = {}

    def install(self, tensor: Any, semantic: Any) -> None:
        """Replace the operators of the class ``tensor``, whose own they fall back on, once. Raises AttributeError.

        ``semantic``: TritonSemantic, whose ``full`` and ``load`` are replaced as well.
        """
        if hasattr(tensor, _INSTALLED):
            return
        setattr(tensor, _INSTALLED, True)
        semantic.full = self._full(semantic.full)
        semantic.load = self._load(semantic.load)
        tensor.to = self._to(tensor.to)
        for name, ufunc in _ARITHMETIC.items():
            self._replace(tensor, f"__{name}__", self._arithmetic, ufunc)
            self._replace(tensor, f"__r{name}__", self._arithmetic, lambda a, b, ufunc=ufunc: ufunc(b, a))
        for name, ufunc in _COMPARISONS.items():
            self._replace(tensor, f"__{name}__", self._comparison, ufunc)
        self._replace(tensor, "__and__", self._conjunction, np.bitwise_and)
        self._replace(tensor, "__getitem__", self._with_an_axis, None)

    def _replace(self, tensor: Any, name: str, quick: Callable[..., Any], ufunc: Any) -> None:
        slow = getattr(tensor, name)

        @functools.wraps(slow)
        def operator(this: Any, other: Any) -> Any:
            try:
                result = quick(ufunc, this, other)
            except ValueError:  # shapes that do not fit, or a block that is too large: triton's words tell it
                result = None
            return slow(this, other) if result is None else result

        operator.of = functools.partial(quick, ufunc)  # type: ignore[attr-defined]
        setattr(tensor, name, operator)

    def _full(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """``full`` of a number, which triton makes a scalar first."""

        @functools.wraps(slow)
        def full(semantic: Any, shape: Any, value: Any, kind: Any) -> Any:
            number = self._number(value, kind.name)
            if number is None or not shape or not all(type(size) is int for size in shape):
                return slow(semantic, shape, value, kind)
            number_kind = self._kinds[kind.name]
            return self._made(np.full(tuple(shape), number[0]), number_kind, number_kind, block=True)

        return full

    def _to(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """``x.to(dtype)`` between dtypes that numpy has, to nearest even."""

        @functools.wraps(slow)
        def to(this: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            kind = self._kinds.get(getattr(dtype, "name", ""))
            if kind is None or args or kwargs or this.dtype.name not in _DTYPES:
                return slow(this, dtype, *args, **kwargs)
            if this.dtype.name == kind.name:
                return this
            data = converted(this.handle.data, _DTYPES[kind.name])
            return self._made(data, kind, kind, block=this.type is not this.dtype)

        return to

    def _load(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """``load`` of a block whose mask fits it, in place of whose other elements there is one number, or nothing."""

        @functools.wraps(slow)
        def load(semantic: Any, pointer: Any, mask: Any, other: Any, boundary: Any, padding: str, *hints: Any) -> Any:
            if not self._is_plain(pointer, mask, other) or boundary or padding:
                return slow(semantic, pointer, mask, other, boundary, padding, *hints)
            places, element = pointer.handle.data, pointer.dtype.element_ty
            semantic._str_to_load_cache_modifier(hints[0])
            semantic._str_to_eviction_policy(hints[1])
            dtype = self._interpreter._get_np_dtype(element)
            if other is None or not any(other.handle.data.tobytes()):  # a zero is zero in every dtype
                values = np.zeros(places.shape, dtype)
            else:
                values = np.full(places.shape, semantic.cast(other, element).handle.data, dtype)
            mask = np.broadcast_to(mask.handle.data, places.shape)
            values = self._interpreter._interpreter.load(places, mask, values, dtype)
            return self._made(values, element, element, block=True)

        return load

    def _is_plain(self, pointer: Any, mask: Any, other: Any) -> bool:
        """Whether each element of a block has an address, a mask, and the same number in its place."""
        if type(pointer.handle) is not self._handle or pointer.type is pointer.dtype or not pointer.dtype.is_ptr():
            return False
        if mask is None or mask.dtype.name != "int1" or mask.handle.data.shape not in (pointer.handle.data.shape, (1,)):
            return False
        return pointer.dtype.element_ty.name != "int1" and (other is None or not other.type.is_block())

    def _arithmetic(self, ufunc: Any, this: Any, other: Any) -> Any:
        """A sum, difference or product; None if it is triton's task."""
        kind = this.dtype
        if type(other) is self._tensor:
            if kind.name.startswith("pointer<"):
                return self._moved(this, other) if ufunc is np.add else None
            common, right = self._common.get((kind.name, other.dtype.name)), other.handle.data
            block = this.type is not kind or other.type is not other.dtype
        else:
            common, right, block = kind, self._number(other, kind.name), this.type is not kind
        if common is None or right is None or self._builder.options.debug:  # then an overflow is told
            return None
        data = ufunc(this.handle.data, right)
        return self._made(data, common, common, block=block) if data.dtype == _DTYPES[common.name] else None

    def _moved(self, pointer: Any, offset: Any) -> Any:
        """A pointer and an offset in elements."""
        element = pointer.dtype.element_ty
        if offset.dtype.name not in _INTEGERS or element.is_ptr():
            return None
        start, places = pointer.handle.data, offset.handle.data.astype(np.uint64)
        places *= np.uint64(max(1, element.primitive_bitwidth // 8))
        places = np.add(start, places, out=places if start.size == 1 or start.shape == places.shape else None)
        block = pointer.type is not pointer.dtype or offset.type is not offset.dtype
        return self._made(places, pointer.dtype, pointer.handle.dtype, block=block)

    def _comparison(self, ufunc: Any, this: Any, other: Any) -> Any:
        kind = this.dtype
        if type(other) is self._tensor:
            common, right = self._common.get((kind.name, other.dtype.name)), other.handle.data
            block = this.type is not kind or other.type is not other.dtype
        else:  # a number is an int32 or an fp32, which a half is converted to
            name = "int32" if kind.name in _INTEGERS else "fp32"
            common, right = self._common.get((kind.name, name)), self._number(other, name, whole=name == "int32")
            block = this.type is not kind
        if common is None or right is None:
            return None
        return self._made(ufunc(this.handle.data, right), self._boolean, common, block=block)

    def _conjunction(self, ufunc: Any, this: Any, other: Any) -> Any:
        if type(other) is not self._tensor or not this.dtype.name == other.dtype.name == "int1":
            return None
        left, right = this.handle.data, other.handle.data
        if not left.dtype == right.dtype == np.bool_:
            return None
        block = this.type is not this.dtype or other.type is not other.dtype
        return self._made(ufunc(left, right), self._boolean, this.handle.dtype.scalar, block=block)

    def _with_an_axis(self, _: Any, this: Any, index: Any) -> Any:
        """``x[:, None]`` or ``x[None, :]`` of one axis."""
        data = this.handle.data
        if this.type is this.dtype or data.ndim != 1 or type(index) is not tuple or len(index) != 2:
            return None
        new, kept = index if index[0] is None else index[::-1]
        if new is not None or type(kept) is not slice or kept != slice(None):
            return None
        return self._made(data[index], this.dtype, this.handle.dtype.scalar, block=True)

    def _number(self, value: Any, name: str, *, whole: bool = True) -> Any:
        """A number of Python as an array of one of the dtype ``name``; None if it is none or does not fit.

        ``whole``: an int will do for a float as well. A zero has no sign: triton makes it so.
        """
        dtype = _DTYPES.get(name)
        if dtype is None:
            return None
        if type(value) is int and name in _INTEGERS:
            limits = np.iinfo(dtype)
            return np.array([value], dtype) if limits.min <= value <= limits.max else None
        if name not in _FLOATS or not (type(value) is float or (whole and type(value) is int)):
            return None
        if value and not (value != value or abs(value) == np.inf or _LEAST_NORMAL <= abs(value) <= _LARGEST):
            return None
        return np.array([value or 0], dtype)

    def _made(self, data: Any, kind: Any, label: Any, *, block: bool) -> Any:
        """The tensor of ``data``, with elements of ``kind``; ``label``: what its handle calls them."""
        handle = object.__new__(self._handle)
        handle.data, handle.dtype, handle.attr = data, label, {}
        key = kind.name, data.shape if block else None
        fields = self._fields.get(key)
        if fields is None:
            made = self._tensor(handle, self._block_type(kind, list(data.shape)) if block else kind)
            self._fields[key] = dict(vars(made))
            return made
        tensor = object.__new__(self._tensor)
        tensor.__dict__ = {**fields, "handle": handle}
        return tensor
