# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""What the interpreter no longer makes anew: types, tensors and checks are those that triton makes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from normcheck.impls.kernels import interpreter

if torch.cuda.is_available() and not interpreter.enabled():
    pytest.skip("the interpreter is for machines without a GPU; set TRITON_INTERPRET=1", allow_module_level=True)
interpreter.enable()

import triton
import triton.language as tl


@triton.jit
def sum_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def product_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) * tl.load(y + i))


@triton.jit
def difference_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) - tl.load(y + i))


@triton.jit
def quotient_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) / tl.load(y + i))


@triton.jit
def mixed_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i[:, None] * SIZE + i[None, :], a[:, None] * b[None, :] + 0.5)


LARGEST = torch.iinfo(torch.int32).max


def test_a_type_is_the_one_that_triton_makes_and_types_of_one_shape_share_it():
    first, again = tl.block_type(tl.float16, [4, 8]), tl.block_type(tl.float16, [4, 8])
    other = tl.block_type(tl.float32, [4, 8])

    assert (first.name, first.numel, first.element_ty) == ("<['4', '8'], fp16>", 32, tl.float16)
    assert first == again and first != other and other.element_ty == tl.float32
    assert first.shape is again.shape is other.shape
    assert tl.block_type(tl.float16, [8, 4]) != first
    pointers = tl.block_type(tl.pointer_type(tl.float16), [4, 8])
    assert pointers.element_ty.is_ptr() and pointers != first
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.float16, [])


def test_a_tensor_has_its_own_handle_and_the_fields_of_its_type():
    kind = tl.block_type(tl.int32, [4, 8])
    one, two = tl.core.tensor("one", kind), tl.core.tensor("two", kind)

    assert (one.handle, two.handle) == ("one", "two")
    assert [size.value for size in two.shape] == [4, 8] and two.numel.value == 32
    assert two.dtype == tl.int32 and two.type == kind
    assert len(tl.core.tensor("three", tl.int32).shape) == 0


@pytest.mark.parametrize(
    ("kernel", "x", "y", "right"),
    [
        (sum_kernel, [LARGEST - 7, -5], [7, 5], [LARGEST, 0]),
        (difference_kernel, [-LARGEST, 3], [1, 3], [-LARGEST - 1, 0]),
        (product_kernel, [LARGEST, -LARGEST], [1, 1], [LARGEST, -LARGEST]),
    ],
)
def test_integers_at_the_end_of_their_range_are_right(kernel, x, y, right):
    out = torch.zeros(2, dtype=torch.int32)
    kernel[(1,)](torch.tensor(x, dtype=torch.int32), torch.tensor(y, dtype=torch.int32), out, SIZE=2)
    assert out.tolist() == right


def test_an_overflow_is_checked_if_a_kernel_is_debugged_as_before(monkeypatch):
    from triton.runtime import interpreter as of_triton

    x = torch.tensor([LARGEST, 0], dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    sum_kernel[(1,)](x, x, out, SIZE=2)
    assert out.tolist() == [-2, 0]

    debugged = dataclasses.replace(of_triton.interpreter_builder.options, debug=True)
    monkeypatch.setattr(of_triton.interpreter_builder, "options", debugged)
    with pytest.raises(Exception, match="overflow"):
        sum_kernel[(1,)](x, x, out, SIZE=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_quotient_of_halves_is_computed_in_fp32_as_triton_has_it(dtype):
    x, y = torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([3.0, 7.0]).to(dtype)
    out = torch.zeros(2)
    quotient_kernel[(1,)](x, y, out, SIZE=2)
    assert torch.equal(out, x.float() / y.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_column_times_a_row_is_broadcast_and_a_number_added(dtype):
    x, y = torch.arange(4).to(dtype), torch.arange(4, 8).to(dtype)
    out = torch.zeros(4, 4, dtype=dtype)
    mixed_kernel[(1,)](x, y, out, SIZE=4)
    assert torch.equal(out, x[:, None] * y[None, :] + 0.5)
