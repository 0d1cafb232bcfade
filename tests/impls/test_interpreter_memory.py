# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""Loads and stores of interpreted kernels in C: what triton's own read and write, in the same order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from normcheck import c_library
from normcheck.impls.kernels import interpreter, interpreter_memory
from tests.some import some

if torch.cuda.is_available() and not interpreter.enabled():
    pytest.skip("the interpreter is for machines without a GPU; set TRITON_INTERPRET=1", allow_module_level=True)
interpreter.enable()

from triton._C.libtriton import interpreter as triton_memory

quick = interpreter_memory.quick(triton_memory)

DTYPES = [np.bool_, np.uint8, np.uint16, np.float16, np.float32, np.int32, np.float64, np.uint64]


def values(dtype: Any, size: int) -> Any:
    return (np.arange(size) % 7 + (np.arange(size) % 3 == 0)).astype(dtype)


def pointers(array: Any, places: Any) -> Any:
    return (array.ctypes.data + places * array.itemsize).astype(np.uint64)


@pytest.fixture(autouse=True)
def compiled():
    if quick is triton_memory:
        pytest.skip("no C compiler: triton's own load and store are used")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(), (1,), (24,), (4, 6)], ids=str)
def test_they_move_what_tritons_do(dtype, shape):
    source, size = values(dtype, 100), int(np.prod(shape))
    places = (np.arange(size) * 37 % 100).reshape(shape)
    mask = (places % 4 != 1).reshape(shape)
    other = values(dtype, size)[::-1].reshape(shape)
    found = quick.load(pointers(source, places), mask, other, np.dtype(dtype))
    wanted = np.where(mask, source[places], other)

    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
    assert found.tobytes() == triton_memory.load(pointers(source, places), mask, other, np.dtype(dtype)).tobytes()

    targets = [np.zeros(100, dtype) for _ in range(2)]
    for memory, target in zip((quick, triton_memory), targets, strict=True):
        memory.store(pointers(target, places), other, mask)
    assert targets[0].tobytes() == targets[1].tobytes() and (size == 1 or targets[0].any())


def test_a_masked_address_is_not_touched_and_an_odd_one_is_read():
    nowhere = np.zeros(4, dtype=np.uint64)
    other = np.arange(4, dtype=np.float32)
    assert quick.load(nowhere, np.zeros(4, bool), other, np.dtype(np.float32)).tolist() == [0, 1, 2, 3]
    quick.store(nowhere, other, np.zeros(4, bool))

    bytes_ = np.frombuffer(b"x" + np.arange(4, dtype=np.float32).tobytes(), dtype=np.uint8)
    odd = (bytes_.ctypes.data + 1 + 4 * np.arange(4)).astype(np.uint64)
    assert quick.load(odd, np.ones(4, bool), other * 0, np.dtype(np.float32)).tolist() == [0, 1, 2, 3]


def test_of_two_stores_to_one_address_the_later_element_stays():
    target = np.zeros(1, dtype=np.float32)
    quick.store(pointers(target, np.zeros(9, np.int64)), np.arange(9, dtype=np.float32), np.ones(9, bool))
    assert target.tolist() == [8]


def test_a_view_is_moved_as_it_looks_and_what_is_loaded_is_the_kernels_own():
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    places = np.broadcast_to(np.arange(4), (3, 4))
    other = np.zeros((3, 4), np.float32)
    found = quick.load(pointers(source, places), np.ones((3, 4), bool), other, np.dtype(np.float32))
    assert found.tolist() == [[0, 1, 2, 3]] * 3
    assert found is not other and not other.any()

    target = np.zeros(12, dtype=np.float32)
    quick.store(pointers(target, np.arange(12).reshape(4, 3)), source.T, np.ones((4, 3), bool))
    assert target.tolist() == source.T.ravel().tolist()


def test_what_c_has_no_way_for_goes_to_triton(monkeypatch):
    asked = []
    memory = SimpleNamespace(load=lambda *a: asked.append("load"), store=lambda *a: asked.append("store"), MORE=3)
    own = interpreter_memory.quick(memory)
    two, one = np.zeros(2, np.uint64), np.zeros(1, bool)
    own.load(two, one, np.zeros(2, np.float32), np.dtype(np.float32))
    own.load(two, np.zeros(2, bool), np.zeros(2, np.float16), np.dtype(np.float32))
    own.store(two, np.zeros(2, np.complex128), np.zeros(2, bool))
    assert asked == ["load", "load", "store"] and own.MORE == 3

    monkeypatch.setattr(c_library, "loaded", lambda *a: None)
    assert interpreter_memory.quick(memory) is memory


@pytest.mark.parametrize("size", [2, 4099], ids=["few", "many"])
def test_conversions_of_halves_are_numpys(size):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)]
    singles = np.concatenate([halves[:-1].astype(np.float32), (halves[1:].astype(np.float64) * 1.0003).astype("f4")])
    beside = np.nextafter(singles, np.float32(0)), np.float32([65519.9, 65520, 1e30, np.nan])
    singles = np.concatenate([singles, *beside])
    with np.errstate(over="ignore"):
        for values, dtype in ((halves, np.float32), (singles, np.float16)):
            for part in some(np.array_split(values, len(values) // size)):
                assert interpreter_memory.converted(part, dtype).tobytes() == part.astype(dtype).tobytes()


def test_a_transposed_array_is_converted_in_its_order():
    values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64).T
    assert (interpreter_memory.converted(values, np.float16) == values.astype(np.float16)).all()
