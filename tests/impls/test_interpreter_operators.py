# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""Quick operators give what triton's own give: the same bits, dtypes and types, or no result either."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from normcheck.impls.kernels import interpreter

if torch.cuda.is_available() and not interpreter.enabled():
    pytest.skip("the interpreter is for machines without a GPU; set TRITON_INTERPRET=1", allow_module_level=True)
interpreter.enable()

import triton
import triton.language as tl
from triton.runtime import interpreter as of_triton

_DTYPES = {
    tl.float16: np.float16, tl.bfloat16: np.uint16, tl.float32: np.float32, tl.float64: np.float64, tl.int1: np.bool_,
    tl.int8: np.int8, tl.uint8: np.uint8, tl.int32: np.int32, tl.uint32: np.uint32, tl.int64: np.int64,
}  # fmt: skip
_SHAPES = ((), (8,), (4, 1), (4, 8))
_NUMBERS = (0, -0.0, 1, -3, True, 2**31, 2**40, 0.1, 1e-320, 1e300, float("inf"), float("nan"))


@triton.jit
def patched_kernel(x):
    tl.load(x)


@pytest.fixture(scope="module", autouse=True)
def patched():
    """triton.language as a kernel sees it, which the first launch makes so."""
    patched_kernel[(1,)](torch.zeros(1))
    assert hasattr(tl.tensor.__add__, "__wrapped__")
    with np.errstate(all="ignore"):
        yield


def operand(dtype, shape):
    size = shape or (1,)
    values = np.linspace(-3, 70, int(np.prod(size))).reshape(size).astype(_DTYPES[dtype])
    if dtype in (tl.float16, tl.float32) and len(shape) == 2:
        values.flat[:4] = np.array([np.nan, np.inf, -0.0, 65504])[: values.size]
    return tl.tensor(of_triton.TensorHandle(values, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def pointer(shape):
    kind = tl.pointer_type(tl.float16)
    size = shape or (1,)
    addresses = (np.arange(int(np.prod(size)), dtype=np.uint64) * np.uint64(6) + np.uint64(2**40)).reshape(size)
    return tl.tensor(of_triton.TensorHandle(addresses, kind), tl.block_type(kind, list(shape)) if shape else kind)


TENSORS = [operand(dtype, shape) for dtype in _DTYPES for shape in _SHAPES] + [pointer(s) for s in ((), (8,), (4, 1))]


def told(call):
    """What is seen of a result; None if there is none."""
    try:
        tensor = call()
    except Exception:
        return None
    if not isinstance(tensor, tl.tensor):
        return tensor
    handle, shape = tensor.handle, [size.value for size in tensor.shape]
    data = np.asarray(handle.data)
    if data.dtype.kind == "f":  # any NaN is as good as another
        data = np.nan_to_num(data, nan=7.0, posinf=np.inf, neginf=-np.inf)
    types = handle.dtype.name, tensor.type, tensor.dtype
    return data.tobytes(), data.dtype, data.shape, types, shape, tensor.numel.value


OPERATORS = ["add", "sub", "mul", "radd", "rsub", "rmul", "lt", "le", "eq", "gt", "ge", "ne", "and"]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_triton_gives(name):
    quick = getattr(tl.tensor, f"__{name}__")
    results, taken = 0, 0
    pairs = [*itertools.product(TENSORS, [*TENSORS, *_NUMBERS])]
    for this, other in pairs[OPERATORS.index(name) % 3 :: 3]:  # a third, another for each of three like each other
        right = told(lambda this=this, other=other: quick.__wrapped__(this, other))
        assert told(lambda this=this, other=other: quick(this, other)) == right, (
            this.type,
            getattr(other, "type", other),
        )
        results += right is not None
        taken += quick.of(this, other) is not None if right is not None else 0
    assert results > 150 and taken > 3, (results, taken)


@pytest.mark.parametrize("index", [(slice(None), None), (None, slice(None)), None, (None, None, slice(None))])
def test_an_axis_is_added_as_triton_adds_it(index):
    quick = tl.tensor.__getitem__
    for this in TENSORS:
        assert told(lambda this=this: quick(this, index)) == told(lambda this=this: quick.__wrapped__(this, index))


def test_a_conversion_gives_what_triton_gives():
    for this, dtype in itertools.product(TENSORS, _DTYPES):
        assert told(lambda: this.to(dtype)) == told(lambda: tl.tensor.to.__wrapped__(this, dtype)), (this.type, dtype)  # noqa: B023


def test_a_full_block_is_the_one_that_triton_makes():
    full = of_triton.interpreter_semantic.full
    for value, dtype in itertools.product(_NUMBERS, _DTYPES):
        slow = type(of_triton.interpreter_semantic).full.__wrapped__
        right = told(lambda: slow(of_triton.interpreter_semantic, [4, 8], value, dtype))  # noqa: B023
        assert told(lambda: full([4, 8], value, dtype)) == right, (value, dtype)  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("other", [None, 0.0, 1.5, float("nan")])
def test_a_load_reads_what_triton_reads(dtype, other):
    memory = torch.arange(1, 33).to(dtype)
    kind = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int64: tl.int64}
    element = tl.pointer_type(kind.get(dtype, tl.int1))
    semantic, step = of_triton.interpreter_semantic, memory.element_size()
    addresses = np.uint64(memory.data_ptr()) + np.arange(32, dtype=np.uint64).reshape(4, 8) * np.uint64(step)
    places = tl.tensor(of_triton.TensorHandle(addresses, element), tl.block_type(element, [4, 8]))
    slow = type(semantic).load.__wrapped__
    for shape in ((4, 8), (1, 8), ()):
        mask = operand(tl.int32, shape) > 10
        instead = None if other is None else semantic.to_tensor(other)
        args = (places, mask, instead, (), "", "", "evict_last", False)
        right = told(lambda args=args: slow(semantic, *args))
        assert right is not None and told(lambda args=args: semantic.load(*args)) == right, shape
