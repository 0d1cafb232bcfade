"""What Triton's interpreter makes anew in each operation or launch, and need not: remedies that change no value.

A block's type copies its shape into constexpr and writes its own name, and a tensor copies the shape again: here the
fields of types and tensors are made once for each element type and shape. A launch takes its function's signature
apart, spells the type of each argument, and copies the memory of each tensor of the CPU onto itself. What
``interpreter_operators`` has taken over needs none of the first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

__all__ = ["cut"]


def cut(tl: Any, interpreter: Any) -> None:
    """Remedy the classes of ``tl`` (triton.language) and of ``interpreter``, triton's module, once in a process.

    Raises AttributeError if one of them is not there.
    """
    executor, semantic = interpreter.GridExecutor, interpreter.TritonSemantic
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getfullargspec": _signature, "getcallargs": _arguments})
    interpreter._implicit_cvt = _typed_once(interpreter._implicit_cvt, interpreter, tl)
    executor._init_args_hst = _as_they_are(executor._init_args_hst)
    executor._restore_args_dev = _if_copied(executor._restore_args_dev)
    tl.core.block_type.__init__ = _block_type_made_once(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _tensor_fields_made_once(tl.core.tensor.__init__)
    tl.core._unwrap_if_constexpr = _plain_first(tl.core._unwrap_if_constexpr, (int, bool, tl.core.tensor))
    semantic.broadcast_impl_value = _shapes_compared_once(semantic.broadcast_impl_value)


def _block_type_made_once(original: Callable[..., None]) -> Callable[..., None]:
    """``block_type.__init__`` that takes the fields of the first type with this element, by its name, and this shape.

    Types of one shape have the same object for it.
    """
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, type(shape), sizes
        fields = known.get(key)
        if fields is None:
            original(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known[key] = self.__dict__
        else:
            self.__dict__ = fields

    return init


def _shapes_compared_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast_impl_value`` that has nothing to do if both blocks have the same object for a shape."""

    def broadcast(semantic: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right or (left.is_block() and right.is_block() and left.shape is right.shape):
            return lhs, rhs
        return original(semantic, lhs, rhs)

    return broadcast


def _tensor_fields_made_once(original: Callable[..., None]) -> Callable[..., None]:
    """``tensor.__init__`` that copies the fields of the first tensor of this type, but for its handle."""

    def init(self: Any, handle: Any, type: Any) -> None:
        fields = type.__dict__.get("_normcheck_fields")
        if fields is None:
            original(self, handle, type)
            type._normcheck_fields = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(fields)
            self.handle = handle

    return init


def _plain_first(original: Callable[..., Any], plain: tuple[type, ...]) -> Callable[..., Any]:
    """``_unwrap_if_constexpr``, which asks four times what it has before it, of what has one of the ``plain`` types."""
    known = frozenset(plain)

    def unwrapped(o: Any) -> Any:
        return o if type(o) in known else original(o)

    return unwrapped


_signature = functools.cache(inspect.getfullargspec)
"""Of a kernel, which each launch takes apart twice."""


def _arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``inspect.getcallargs`` of a function, whose parameters can all be given by position if it is a kernel."""
    spec = _signature(function)
    given = dict(zip(spec.args, args, strict=False)) | kwargs
    if spec.defaults:
        given = dict(zip(spec.args[-len(spec.defaults) :], spec.defaults, strict=True)) | given
    plain = not (spec.varargs or spec.varkw or spec.kwonlyargs) and len(args) <= len(spec.args)
    if plain and given.keys() == {*spec.args} and kwargs.keys().isdisjoint(spec.args[: len(args)]):
        return given
    return inspect.getcallargs(function, *args, **kwargs)


def _typed_once(original: Callable[[Any], Any], interpreter: Any, tl: Any) -> Callable[[Any], Any]:
    """``_implicit_cvt``, which spells and reads the name of a type for each argument of a launch."""
    pointers: dict[torch.dtype, Any] = {}

    def converted(value: Any) -> Any:
        if type(value) is int and -(2**31) <= value < 2**31:
            data, kind = np.array([value], np.int32), tl.int32
        elif type(value) is torch.Tensor:
            if value.dtype not in pointers:
                pointers[value.dtype] = original(value).type
            data, kind = np.array([value.data_ptr()], np.uint64), pointers[value.dtype]
        else:
            return original(value)
        return tl.tensor(interpreter.TensorHandle(data, kind), kind)

    return converted


def _are_on_host(args: Any) -> bool:
    """Whether there is nothing to copy to the host, or back: numbers, None, and tensors of the CPU."""
    return all(arg.is_cpu if type(arg) is torch.Tensor else type(arg) in _NUMBERS for arg in args)


_NUMBERS = frozenset({int, float, bool, type(None), str})


def _as_they_are(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_init_args_hst``, which makes a tensor of the same memory of each tensor of the CPU."""

    def init(executor: Any, args: Any, kwargs: Any) -> Any:
        if _are_on_host(args) and _are_on_host(kwargs.values()):
            return args, kwargs
        return original(executor, args, kwargs)

    return init


def _if_copied(original: Callable[..., None]) -> Callable[..., None]:
    """``_restore_args_dev``, which copies the memory of each tensor of the CPU onto itself."""

    def restore(executor: Any, args: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        if args is not args_hst:
            original(executor, args, args_hst, kwargs, kwargs_hst)

    return restore
