"""Triton kernels on a machine without a GPU: the interpreter, and the remedy for what it does to bf16 and fp8.

Triton's interpreter keeps a bf16 value as its 16-bit pattern in a uint16 array. Left alone (3.6 to 3.9) it truncates
where a GPU rounds to nearest even, and adds, multiplies, compares and reduces the patterns as integers: the sum of 1024
squares of 100 is 0. ``enable`` wraps the interpreter so that every operation on bf16 widens to fp32, computes there and
rounds once. For + - * that is the correctly rounded result (24 >= 2 * 8 + 2 bits: Figueroa 1995), which a GPU gives
too. A reduction rounds after each step of a tree, as a GPU's does.

A conversion to e4m3fn or e5m2 is wrong there too: it rounds ties away from zero, and where rounding carries into the
exponent the result is half of what it should be (31 becomes 16). Here it is to nearest even, and saturates, as a GPU's.

Three more things change, none of them a value: numpy's floating-point warnings are off inside a kernel,
triton.language is patched once, and ``range(n)`` works in triton 3.6 under numpy 2.4.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from normcheck.cases.dtypes import CODES, Format
from normcheck.errors import NormcheckError
from normcheck.impls.kernels import interpreter_costs, interpreter_memory, on_cpu
from normcheck.impls.kernels.interpreted import enabled, note_launch
from normcheck.impls.kernels.interpreter_operators import Operators

__all__ = ["Remedy", "code_bits", "enable", "enabled", "narrow_bits", "widen_bits"]

_TESTED = "3.6 to 3.9"
_REMEDIED = "_normcheck_remedied"


def enable() -> None:
    """Interpret Triton kernels on CPU tensors, with bf16 as on a GPU. Call it before triton is imported; idempotent.

    Sets ``TRITON_INTERPRET=1`` for this process and its children. Raises NormcheckError if triton was imported
    before, for a GPU, or if its interpreter has changed so that the remedy does not fit: a part of it is never applied.
    """
    imported = sys.modules.get("triton.language")
    if imported is not None and type(imported.sum).__name__ != "InterpretedFunction":
        raise NormcheckError("TRITON_INTERPRET=1 came after the first import of triton: set it, or enable(), before")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, _REMEDIED, False):
        return
    try:
        Remedy(interpreter, tl).install()
        interpreter_costs.cut(tl, interpreter)
        interpreter._interpreter = interpreter_memory.quick(interpreter._interpreter)
        _check(interpreter, tl)
        on_cpu.answer(interpreter, tl)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        raise NormcheckError(
            f"triton={triton.__version__}: the bf16 remedy does not fit its interpreter ({error}); use {_TESTED}"
        ) from error
    setattr(interpreter, _REMEDIED, True)


def widen_bits(bits: Any) -> Any:
    """bf16 patterns (uint16, any shape) as fp32 values, exactly."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow_bits(values: Any, *, toward_zero: bool = False) -> Any:
    """Values (any numpy dtype and shape) as bf16 patterns (uint16), rounded once: to nearest even, or toward zero.

    NaN becomes 0x7fff, as a GPU's conversion makes it. What is wider than fp32 is first rounded to odd in
    fp32: the second rounding then gives what a single one would (Boldo and Melquiond 2008).
    """
    wide = np.asarray(values)
    single = wide.astype(np.float32)
    bits = single.view(np.uint32)
    if wide.dtype not in (np.float32, np.float16):
        wide = wide.astype(np.float64)
        inexact_even = (single != wide) & (bits % 2 == 0) & ~np.isnan(wide)
        odd = np.where(np.abs(single) < np.abs(wide), bits + np.uint32(1), bits - np.uint32(1))
        bits = np.where(inexact_even, odd, bits)
    if not toward_zero:
        bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return np.where(np.isnan(wide), np.uint16(0x7FFF), (bits >> 16).astype(np.uint16))


def code_bits(values: Any, fmt: Format) -> Any:
    """Values (any numpy float dtype and shape) as patterns (uint8) of ``fmt``, e4m3fn or e5m2: to nearest even.

    What is past the largest is the largest, and NaN is 0x7f, as a GPU's conversion (cvt.rn.satfinite) makes them.
    """
    wide = np.asarray(values).astype(np.float64)
    size = np.fmin(np.abs(wide), fmt.max)
    binade = np.frexp(np.fmax(size, 2.0**fmt.emin))[1] - 1
    steps = np.rint(np.ldexp(size, fmt.p - 1 - binade))  # up to 2^p, which is the first number of the next binade
    bits = steps.astype(np.int32) + ((binade - fmt.emin) << (fmt.p - 1)) + 0x80 * np.signbit(wide)
    return np.where(np.isnan(wide), 0x7F, bits).astype(np.uint8)


@dataclass(frozen=True)
class Remedy:
    """The wrappers around one triton's interpreter; ``install`` puts them in place.

    ``interpreter`` and ``tl`` are triton's modules. A handle is the interpreter's value: ``data`` (numpy array) and
    ``dtype`` (triton's).
    """

    interpreter: Any
    tl: Any

    def install(self) -> None:
        """Wrap every place that would take bf16 patterns for integers. Raises AttributeError if one is missing."""
        builder = self.interpreter.InterpreterBuilder
        for name in ("binary_op", "unary_op", "create_clampf", "create_erf", "create_rsqrt"):
            self._wrap(builder, name, self._computed_wide)
        self._wrap(builder, "cast_impl", self._cast)
        self._wrap(builder, "create_fp_to_fp", self._float_cast)
        self._wrap(builder, "create_fma", self._fma)
        self._wrap(builder, "create_dot", self._dot)
        self._wrap(builder, "create_atomic_rmw", self._atomic)
        self._wrap(builder, "create_descriptor_load", self._padded_load)
        if hasattr(builder, "create_tensor_pointer_load"):  # block pointers: gone in 3.9
            self._wrap(builder, "create_tensor_pointer_load", self._padded_load)
        if hasattr(builder, "create_dot_scaled"):  # new in 3.9
            self._wrap(builder, "create_dot_scaled", self._refused_dot_scaled)
        builder.get_bf16 = lambda builder, value: self.narrow(builder.get_fp32(value))
        self._wrap(self.interpreter.ReduceOps, "sum", self._tree_sum)
        self._wrap(self.interpreter.ReduceOps, "min_max", self._reduced_wide)
        self._wrap(self.interpreter.ScanOps, "cumsum", self._reduced_wide)
        self._wrap(self.interpreter.ScanOps, "cumprod", self._reduced_wide)
        self._wrap(self.interpreter.GridExecutor, "__call__", _launched)
        self._wrap(self.interpreter, "_patch_lang_tensor", self._patched)
        self.interpreter._patch_lang = _patch_once(self.interpreter)
        self._wrap(self.interpreter, "_get_np_dtype", _of_scalar())

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``wrapper(original, self, ...)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    def is_bf16(self, value: Any) -> bool:
        """Whether a handle or a type is bf16, or a block of it."""
        scalar = getattr(getattr(value, "dtype", value), "scalar", None)
        return getattr(scalar, "name", None) == "bf16"  # triton compares types by their names, and more slowly

    def widen(self, value: Any) -> Any:
        """A bf16 handle as fp32, exactly; anything else as it is."""
        if not (isinstance(value, self.interpreter.TensorHandle) and self.is_bf16(value)):
            return value
        return self.interpreter.TensorHandle(widen_bits(value.data), self.tl.float32)

    def narrow(self, handle: Any, *, toward_zero: bool = False) -> Any:
        """A handle of any numeric dtype as bf16, rounded once."""
        bits = narrow_bits(handle.data, toward_zero=toward_zero)
        return self.interpreter.TensorHandle(bits, self.tl.bfloat16)

    def _computed_wide(self, original: Any, builder: Any, *args: Any) -> Any:
        """An operation on handles: fp32 inside, rounded once; a comparison's result is labelled int1."""
        if not any(map(self.is_bf16, args)):
            return original(builder, *args)
        result = original(builder, *map(self.widen, args))
        if result.data.dtype == np.bool_:
            return self.interpreter.TensorHandle(result.data, self.tl.int1)
        return self.narrow(result)

    def _cast(self, original: Any, builder: Any, src: Any, dst_type: Any) -> Any:
        """A conversion between any two dtypes, to nearest even."""
        if self.is_bf16(dst_type):
            return self.narrow(self.widen(src))
        src, half, single = self.widen(src), self.tl.float16, self.tl.float32
        if (src.dtype.scalar, dst_type.scalar) in ((half, single), (single, half)):
            dtype = np.float16 if dst_type.scalar == half else np.float32
            return self.interpreter.TensorHandle(interpreter_memory.converted(src.data, dtype), dst_type.scalar)
        return original(builder, src, dst_type)

    def _float_cast(self, original: Any, builder: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        """A conversion that names its rounding, as fp_downcast_rounding does, or to codes of 8 bits."""
        standard = (self.tl.float16, self.tl.float32, self.tl.float64)
        codes = {self.tl.float8e4nv: CODES["e4m3fn"], self.tl.float8e5: CODES["e5m2"]}.get(dst_type.scalar)
        if codes is not None and (src.dtype.scalar in standard or self.is_bf16(src)):
            return self.interpreter.TensorHandle(code_bits(self.widen(src).data, codes), dst_type.scalar)
        if self.is_bf16(dst_type) and src.dtype.scalar in standard:
            return self.narrow(src, toward_zero=rounding == self.interpreter._ir.ROUNDING_MODE.RTZ)
        if self.is_bf16(src) and dst_type.scalar in standard:
            return builder.cast_impl(src, dst_type)
        return original(builder, src, dst_type, rounding)

    def _fma(self, original: Any, builder: Any, x: Any, y: Any, z: Any) -> Any:
        """Multiply and add: the product of two bf16 is exact in fp64, where the sum rounds before it rounds to bf16."""
        if not self.is_bf16(z):
            return original(builder, x, y, z)
        wide = [self.widen(value).data.astype(np.float64) for value in (x, y, z)]
        return self.interpreter.TensorHandle(narrow_bits(wide[0] * wide[1] + wide[2]), self.tl.bfloat16)

    def _dot(self, original: Any, builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """A matrix product of bf16 accumulates in fp32; the accumulator has its own dtype already."""
        return original(builder, self.widen(a), self.widen(b), *rest)

    def _refused_dot_scaled(self, original: Any, builder: Any, *args: Any, **kwargs: Any) -> Any:
        """The interpreter decodes bf16 operands through fp16: refused, since the result would be wrong."""
        if self.interpreter._ir.ScaleDotElemTypeTY.BF16 in (*args, *kwargs.values()):
            raise NotImplementedError("tl.dot_scaled of bf16 on the interpreter: cast to fp32 and use tl.dot")
        return original(builder, *args, **kwargs)

    def _atomic(self, original: Any, builder: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        """Atomic add, the only one that triton has for bf16: element by element, since addresses may repeat."""
        if not self.is_bf16(val):
            return original(builder, op, ptr, val, mask, *rest)
        if op != self.interpreter._ir.ATOMIC_OP.FADD:
            raise NotImplementedError(f"atomic {op} of bf16 on the interpreter: only add is defined")
        memory = self.interpreter._interpreter
        addresses, values, masks = (
            np.ravel(a) for a in np.broadcast_arrays(ptr.data, widen_bits(val.data), np.asarray(mask.data))
        )
        old = np.zeros(addresses.size, dtype=np.uint16)
        for i in range(addresses.size):
            one = slice(i, i + 1)
            old[one] = memory.load(addresses[one], masks[one], old[one], np.dtype(np.uint16))
            memory.store(addresses[one], narrow_bits(widen_bits(old[one]) + values[one]), masks[one])
        return self.interpreter.TensorHandle(old.reshape(np.shape(ptr.data)), self.tl.bfloat16)

    def _padded_load(self, original: Any, builder: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """A load through a descriptor or block pointer: its NaN padding, which became 0 in an array of uint16."""
        result = original(builder, source, *args, **kwargs)
        nan = self.interpreter._ir.PADDING_OPTION.PAD_NAN
        if self.is_bf16(result) and nan in (getattr(source, "padding", None), *args[1:2]):
            _, mask = source.materialize_pointers(args[0])
            inside = mask if isinstance(mask, np.ndarray) else mask.data
            result.data = np.where(inside, result.data, np.uint16(0x7FFF))
        return result

    def _patched(self, original: Any, tensor: Any, scope: Any) -> None:
        """What the interpreter does to tensors, then an index that numpy 2.4 can read, and quick operators."""
        _with_index(original, tensor, scope)
        Operators(self.interpreter, self.tl).install(tensor, self.interpreter.TritonSemantic)

    def _retyped(self, tensor: Any, handle: Any) -> Any:
        return self.tl.core.tensor(handle, tensor.type.with_element_ty(handle.dtype))

    def _reduced_wide(self, original: Any, reducer: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Minimum, maximum and scans of a bf16 tensor: in fp32, values rounded once, indices as they are."""
        if isinstance(tensor, tuple):
            tensor = tensor[0]
        if not self.is_bf16(tensor):
            return original(reducer, tensor, *args, **kwargs)
        result = original(reducer, self._retyped(tensor, self.widen(tensor.handle)), *args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        back = [
            self._retyped(part, self.narrow(part.handle)) if part.dtype == self.tl.float32 else part for part in parts
        ]
        return type(result)(back) if isinstance(result, (tuple, list)) else back[0]

    def _tree_sum(self, original: Any, reducer: Any, tensor: Any) -> Any:
        """A sum of bf16: halves added to halves, each rounded to bf16, as a GPU's shuffles do."""
        if not self.is_bf16(tensor):
            return original(reducer, tensor)
        bits = tensor.handle.data
        axis = reducer.axis
        shape = np.sum(bits, axis=axis, keepdims=reducer.keep_dims).shape
        bits = bits.ravel() if axis is None else np.moveaxis(bits, axis, 0)
        while len(bits) > 1:  # a power of two, as every block's sides are
            half = len(bits) // 2
            bits = narrow_bits(widen_bits(bits[:half]) + widen_bits(bits[half:]))
        return reducer.to_tensor(bits[0].reshape(shape), self.tl.bfloat16)


def _launched(original: Any, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a grid as a GPU does: it may be a list, and infinities and NaN give no warnings."""
    note_launch()
    asked = executor.grid
    executor.grid = (lambda meta: tuple(asked(meta))) if callable(asked) else tuple(asked)
    with np.errstate(all="ignore"):
        return original(executor, *args, **kwargs)


def _with_index(original: Any, tensor: Any, scope: Any) -> None:
    """A scalar as an index, as in ``range(n)``: triton 3.6 calls int() on its array of one, which numpy 2.4 refuses."""
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))


def _of_scalar() -> Callable[[Callable[[Any], Any], Any], Any]:
    """The dtype of numpy, known for each scalar: triton makes a table of all of them for each answer."""
    known: dict[Any, Any] = {}

    def of(original: Callable[[Any], Any], dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():  # has no hash
            return original(dtype)
        if scalar not in known:
            known[scalar] = original(scalar)
        return known[scalar]

    return of


def _patch_once(interpreter: Any) -> Callable[[Any], Any]:
    """``_patch_lang``, which every launch and nested jit call repeats, made to do its work once for each module.

    What it does depends only on which modules of triton.language a function sees. It is never undone: nothing but
    interpreted kernels uses these modules here, and patching anew takes a fifth of a launch.
    """
    original = interpreter._patch_lang
    patched: set[int] = set()

    def patch(fn: Any) -> Any:
        if len(patched) == 2:  # triton.language and its core: there are no others
            return interpreter._LangPatchScope()
        modules = {id(v) for v in fn.__globals__.values() if v is interpreter.tl or v is interpreter.tl.core}
        if not modules or not modules <= patched:
            original(fn)
            patched.update(modules)
        return interpreter._LangPatchScope()

    return patch


def _check(interpreter: Any, tl: Any) -> None:
    """Try in the remedied builder what goes wrong without the remedy. Raises AssertionError with its name."""
    builder = interpreter.InterpreterBuilder()
    one, hundred = builder.get_bf16(1.0), builder.get_bf16(100.0)
    nearest = builder.get_fp32(1.0 + 2.0**-8 + 2.0**-20)  # truncates to 1, rounds to 1 + 2^-7
    found = {
        "fp32 to bf16": builder.create_fp_trunc(nearest, tl.bfloat16).data[0] == 0x3F81,
        "bf16 to fp32": builder.create_fp_ext(hundred, tl.float32).data[0] == 100,
        "bf16 product": builder.create_fmul(hundred, hundred).data[0] == 0x461C,
        "bf16 fma": builder.create_fma(hundred, one, one).data[0] == 0x42CA,
        "fp32 to fp8": builder.create_fp_to_fp(builder.get_fp32(31.0), tl.float8e4nv, None).data[0] == 0x60,
        "bf16 comparison": bool(builder.create_fcmpOGT(hundred, builder.get_bf16(-1.0)).data[0]),
    }
    for what, right in found.items():
        assert right, f"{what} comes out wrong"
