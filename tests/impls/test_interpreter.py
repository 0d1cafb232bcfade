# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""The interpreter's remedy for bf16 and fp8, bit for bit against torch's own on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from normcheck.impls.kernels import interpreter

if torch.cuda.is_available() and not interpreter.enabled():
    pytest.skip("the interpreter is for machines without a GPU; set TRITON_INTERPRET=1", allow_module_level=True)
interpreter.enable()

import triton
import triton.language as tl

BF16 = torch.bfloat16
PATTERNS = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
SPECIAL = torch.tensor(
    [
        *(0.0, -0.0, 1.0, -1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-23, 3.3895e38, 3.4028e38, -3.4028e38),
        *(float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 4.6e-41, 1e-45, 2.0**-126, 2.0**-133, 2.0**-134),
    ]
)


def bits_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Same patterns; every NaN counts as the same."""
    same = actual.view(torch.int16) == expected.view(torch.int16) if actual.element_size() == 2 else actual == expected
    return bool((same | (actual.isnan() & expected.isnan())).all())


def random_fp32(n: int) -> torch.Tensor:
    """Random fp32 patterns, so every exponent, subnormals, infinities and NaN; then the special values."""
    patterns = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    return torch.cat([patterns.to(torch.int32).view(torch.float32), SPECIAL])


@triton.jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def rtz_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(out + i, v.to(tl.bfloat16, fp_downcast_rounding="rtz"), mask=i < n)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(triton.cdiv(x.numel(), 65536),)](x, out, x.numel(), BLOCK=65536)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_every_bf16_converts_exactly(dtype: torch.dtype) -> None:
    assert bits_equal(cast(PATTERNS, dtype), PATTERNS.to(dtype))


def test_fp32_rounds_to_nearest_even() -> None:
    x = random_fp32(200_000)
    assert bits_equal(cast(x, BF16), x.to(BF16))


def test_ties_and_their_neighbours_round_to_nearest_even() -> None:
    ties = (PATTERNS.view(torch.int16).to(torch.int32) << 16) + 0x8000
    for nudge in (-1, 0, 1):
        x = (ties + nudge).view(torch.float32)
        assert bits_equal(cast(x, BF16), x.to(BF16))


def test_fp16_to_bf16_and_back() -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert bits_equal(cast(every, BF16), every.float().to(BF16))
    assert bits_equal(cast(PATTERNS, torch.float16), PATTERNS.float().to(torch.float16))


def test_fp64_rounds_once() -> None:
    tie = 1 + 2.0**-8  # through fp32 the first would become the tie itself, and then 1
    x = torch.tensor([tie + 2.0**-40, tie, tie - 2.0**-40, -1e300, 1e-300], dtype=torch.float64)
    expected = torch.tensor([1 + 2.0**-7, 1.0, 1.0, float("-inf"), 0.0]).to(BF16)
    assert bits_equal(cast(x, BF16), expected)


def test_integers_convert() -> None:
    x = torch.tensor([0, 1, -1, 257, 258, 259, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert bits_equal(cast(x, BF16), x.to(BF16))
    assert torch.equal(cast(torch.tensor([1.5, -2.0, 300.0]).to(BF16), torch.int32), torch.tensor([1, -2, 300]).int())


def test_an_explicit_rtz_truncates() -> None:
    x = random_fp32(2000)
    out = torch.empty(x.shape, dtype=BF16)
    rtz_kernel[(1,)](x, out, x.numel(), BLOCK=4096)
    expected = (x.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    assert bits_equal(torch.where(x.isnan(), 0, out), torch.where(x.isnan(), 0, expected))
    assert out[x.isnan()].isnan().all()


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_codes_of_8_bits_round_to_nearest_even_and_saturate(codes: torch.dtype, dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(codes).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, far)) for far in (-1e9, 1e9)]
    x = torch.cat([every, ties, *beside, random_fp32(2000)]).to(dtype)
    largest = torch.finfo(codes).max
    found, expected = cast(x, codes), x.float().clamp(-largest, largest).to(codes)
    numbers = ~x.isnan()
    assert torch.equal(found[numbers].view(torch.uint8), expected[numbers].view(torch.uint8))
    assert found[~numbers].float().isnan().all() and not numbers.all()


@triton.jit
def arithmetic_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    here = i < n
    a = tl.load(x + i, mask=here)
    b = tl.load(y + i, mask=here)
    tl.store(out + i, a + b, mask=here)
    tl.store(out + n + i, a - b, mask=here)
    tl.store(out + 2 * n + i, a * b, mask=here)
    tl.store(out + 3 * n + i, a / b, mask=here)
    tl.store(out + 4 * n + i, tl.maximum(a, b), mask=here)
    tl.store(out + 5 * n + i, tl.minimum(a, b), mask=here)
    tl.store(out + 6 * n + i, tl.where(a > b, a, b), mask=here)
    tl.store(out + 7 * n + i, tl.abs(a), mask=here)
    tl.store(out + 8 * n + i, 0.0 - a, mask=here)
    c = a
    c += 0.3
    tl.store(out + 9 * n + i, c, mask=here)
    tl.store(out + 10 * n + i, tl.fma(a, b, c), mask=here)
    tl.store(out + 11 * n + i, tl.exp(a.to(tl.float32)), mask=here)


def test_arithmetic_rounds_once() -> None:
    generator = torch.Generator().manual_seed(1)
    n = 4096 + SPECIAL.numel()
    x = torch.cat([torch.randn(4096, generator=generator), SPECIAL]).to(BF16)
    y = torch.cat([torch.randn(4096, generator=generator), SPECIAL.flip(0)]).to(BF16)
    out = torch.empty((12, n), dtype=BF16)
    arithmetic_kernel[(1,)](x, y, out, n, BLOCK=8192)
    a, b = x.float(), y.float()
    c = x + torch.tensor(0.3, dtype=BF16)
    fma = torch.from_numpy(interpreter.narrow_bits((x.double() * y.double() + c.double()).numpy()).view(np.int16))
    numbers = ~(a.isnan() | b.isnan())  # the maximum of a number and NaN is a GPU's own affair
    expected = {0: x + y, 1: x - y, 2: x * y, 3: (a / b).to(BF16), 7: x.abs(), 9: c, 10: fma.view(BF16)}
    for row, value in expected.items():
        assert bits_equal(out[row], value), row
    for row, value in {4: torch.maximum(x, y), 5: torch.minimum(x, y), 6: torch.where(x > y, x, y)}.items():
        assert torch.equal(out[row][numbers], value[numbers]), row
    assert torch.equal(out[8][numbers], -x[numbers])
    torch.testing.assert_close(out[11], a.exp().to(BF16), rtol=2**-7, atol=0, equal_nan=True)


@triton.jit
def comparison_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n)
    b = tl.load(y + i, mask=i < n)
    code = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a == b).to(tl.int32)
    code += 8 * (a != b).to(tl.int32) + 16 * (a > 0.0).to(tl.int32) + 32 * ((a >= b) & (a > -1.0)).to(tl.int32)
    tl.store(out + i, code, mask=i < n)


def test_comparisons_are_of_values() -> None:
    x = SPECIAL.to(BF16).repeat_interleave(SPECIAL.numel())
    y = SPECIAL.to(BF16).repeat(SPECIAL.numel())
    out = torch.empty(x.shape, dtype=torch.int32)
    comparison_kernel[(1,)](x, y, out, x.numel(), BLOCK=512)
    code = (x < y).int() + 2 * (x <= y).int() + 4 * (x == y).int()
    code += 8 * (x != y).int() + 16 * (x > 0).int() + 32 * ((x >= y) & (x > -1)).int()
    assert torch.equal(out, code)


@triton.jit
def reduction_kernel(x, out, index, SQUARE: tl.constexpr, BLOCK: tl.constexpr):
    v = tl.load(x + tl.arange(0, BLOCK))
    if SQUARE:
        v = v * v
    tl.store(out, tl.sum(v))
    tl.store(out + 1, tl.max(v, axis=0))
    tl.store(out + 2, tl.min(v, axis=0))
    tl.store(index, tl.argmax(v, axis=0))
    tl.store(index + 1, tl.argmin(v, axis=0))
    tl.store(out + 3 + tl.arange(0, BLOCK), tl.cumsum(v, axis=0))


def reduce(x: torch.Tensor, *, square: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    out, index = torch.empty(3 + x.numel(), dtype=x.dtype), torch.empty(2, dtype=torch.int32)
    reduction_kernel[(1,)](x, out, index, SQUARE=square, BLOCK=x.numel())
    return out, index


def test_a_sum_of_squares_is_a_sum_of_squares() -> None:
    out, _ = reduce(torch.full((1024,), 100.0, dtype=BF16), square=True)
    assert out[0] == 1024 * 9984.0  # 0.0 without the remedy; 100 * 100 is 9984 in bf16


def test_reductions_are_of_values() -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(2)).to(BF16)
    out, index = reduce(x)
    assert out[1] == x.max() and out[2] == x.min()
    assert index.tolist() == [x.argmax(), x.argmin()]
    assert abs(out[0] - x.double().sum()) <= 9 * 2**-8 * x.double().abs().sum()
    torch.testing.assert_close(out[3:].float(), x.float().cumsum(0), rtol=2**-7, atol=1e-5)


def test_a_sum_rounds_after_each_step() -> None:
    x = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=BF16)  # 256 + 1 is 256 in bf16; summed in fp32 it would be 260
    assert reduce(x)[0][0] == 258.0


@triton.jit
def rows_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + tl.arange(0, M), tl.sum(v, axis=1))
    tl.store(out + M + tl.arange(0, N), tl.sum(v, axis=0))
    tl.store(out + M + N + tl.arange(0, M)[:, None], tl.sum(v, axis=1, keep_dims=True))


def test_sums_along_an_axis() -> None:
    x = torch.randint(-4, 5, (8, 16), generator=torch.Generator().manual_seed(3)).to(BF16)
    out = torch.empty(8 + 16 + 8, dtype=BF16)
    rows_kernel[(1,)](x, out, M=8, N=16)
    assert torch.equal(out, torch.cat([x.sum(1), x.sum(0), x.sum(1)]))


@triton.jit
def dot_kernel(x, y, out, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def test_a_dot_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(16, 16, generator=generator).to(BF16) for _ in range(2))
    out = torch.empty(16, 16)
    dot_kernel[(1,)](x, y, out, n=16)
    torch.testing.assert_close(out.double(), x.double() @ y.double(), rtol=1e-6, atol=1e-5)


@triton.jit
def atomic_kernel(x, out, old, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(old + i, tl.atomic_add(out + i % 2, tl.load(x + i), mask=i < BLOCK - 1))


def test_atomic_add_reaches_every_address_and_returns_what_was_there() -> None:
    x = torch.tensor([1.5, 2.5, 3.0, -4.0], dtype=BF16)
    out, old = torch.tensor([10.0, 20.0], dtype=BF16), torch.empty(4, dtype=BF16)
    atomic_kernel[(1,)](x, out, old, BLOCK=4)
    assert out.tolist() == [14.5, 22.5]
    assert old[:3].tolist() == [10.0, 20.0, 11.5]


@triton.jit
def loop_kernel(out, n):
    total = 0
    for i in range(n):
        total += i
    tl.store(out, total)


@pytest.mark.parametrize("grid", [(1,), [1], lambda meta: [1, 1]])
def test_a_loop_over_an_argument_and_a_grid_that_is_a_list(grid: Any) -> None:
    out = torch.empty(1, dtype=torch.int32)
    loop_kernel[grid](out, 5)
    assert out.item() == 10


@triton.jit
def padded_kernel(x, out, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n, 8], [8, 1], [BLOCK, 8], padding_option="nan")
    at = tl.arange(0, BLOCK)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + at, source.load([0, 0]))


def test_nan_padding_is_nan() -> None:
    x, out = torch.ones(3, 8, dtype=BF16), torch.empty(4, 8, dtype=BF16)
    padded_kernel[(1,)](x, out, 3, BLOCK=4)
    assert torch.equal(out[:3], x)
    assert out[3].isnan().all()


@triton.jit
def constant_kernel(out, value, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.full((BLOCK,), 0.1, tl.bfloat16))
    tl.store(out + BLOCK + i, tl.zeros((BLOCK,), tl.bfloat16) + value)


def test_constants_round_to_nearest() -> None:
    out = torch.empty(8, dtype=BF16)
    constant_kernel[(1,)](out, 0.3, BLOCK=4)
    assert torch.equal(out, torch.tensor([0.1] * 4 + [0.3] * 4).to(BF16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    x = random_fp32(10_000).to(dtype)
    assert bits_equal(cast(x, torch.float16), x.to(torch.float16))
    v = torch.randn(256, generator=torch.Generator().manual_seed(5)).to(dtype)
    out, index = reduce(v)
    assert out[1] == v.max() and index[0] == v.argmax()
    torch.testing.assert_close(out[0].double(), v.double().sum(), rtol=2e-3, atol=1e-2)


def test_enable_twice_wraps_once() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.binary_op
    interpreter.enable()
    assert InterpreterBuilder.binary_op is before


def child(code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_enable_after_triton_says_so() -> None:
    run = child("import triton\nfrom normcheck.impls.kernels import interpreter\ninterpreter.enable()")
    assert "NormcheckError: TRITON_INTERPRET=1 came after the first import of triton" in run.stderr


@pytest.mark.slow
def test_a_changed_interpreter_is_refused() -> None:
    run = child(
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from triton.runtime.interpreter import InterpreterBuilder as B\n"
        "del B.binary_op\n"
        "from normcheck.impls.kernels import interpreter\ninterpreter.enable()"
    )
    assert "the bf16 remedy does not fit its interpreter" in run.stderr and "binary_op" in run.stderr
