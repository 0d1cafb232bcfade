"""The kernel of C that makes inputs on a CPU writes the bits of ``inputs.fill``, and so does a GPU.

Whole buffers are compared, with the bands and gaps around the elements.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases import fused_inputs, inputs
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import claims_of
from normcheck.cases.core import drawn
from normcheck.cases.data_kinds import DY_KINDS, NOT_FINITE, ROW_KINDS, ROWS, WEIGHT_KINDS
from normcheck.cases.declared import Declared
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.guard_bands import untouched
from normcheck.cases.inputs import Inputs, _kernel_fits, _unfilled, fill, nan_bits, slab_height
from normcheck.cases.layouts import LAYOUTS
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.gate.plan import PROFILES
from tests.some import some

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
INTEGER = {2: torch.int16, 4: torch.int32}
STEP = 256
"""Elements of a piece of C."""


def case_of(op: str = "layernorm", dtype: str = "fp16", **fields: Any) -> Case:
    own = {"options": OPS[op].clips((-0.5, 1.0)), "bias": OPS[op].takes_bias, "gap": 0}
    if "strided" in fields.get("layout", ""):
        own["gap"] = 3
    return Case(**{"op": op, "dtype": dtype, "M": 20, "N": 37, "seed": 7, **own, **fields})


def fused(case: Case, op: Op | None = None) -> Inputs:
    made = _unfilled(case, "cpu")
    op = op or OPS[case.op]
    fused_inputs.fill(case, op, made.x, made.dy, made.weight, made.bias, slab_height(case), nan_bits(case))
    return made


def plain(case: Case, op: Op | None = None, device: str = "cpu") -> Inputs:
    made = _unfilled(case, device)
    fill(case, op or OPS[case.op], made)
    return made


def differing(case: Case, a: Inputs, b: Inputs) -> list[str]:
    return [f"{name} of {case}" for (name, t), (_, u) in zip(a.named(), b.named(), strict=True) if not untouched(t, u)]


def assert_same(case: Case) -> None:
    assert differing(case, fused(case), plain(case)) == []


@pytest.mark.parametrize("rows", ROW_KINDS)
def test_every_kind_of_rows(rows: str) -> None:
    """Of one piece, and of several; an odd seed changes the sign of a NaN."""
    for m, n, seed in ((20, 7, 7), (2, STEP, 8), (2, STEP + 1, 9), (1, 1025, 7)):
        for dtype in some(DTYPES):
            assert_same(case_of(dtype=dtype, rows=rows, M=m, N=n, seed=seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dy_in_every_layout(layout: str) -> None:
    for dy in some(DY_KINDS):
        for dtype in some(DTYPES):
            assert_same(case_of(dtype=dtype, dy=dy, rows="shifted", layout=layout))
        assert_same(case_of(dy=dy, layout=layout, N=STEP + 1, M=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_a_dy_that_all_rows_share(dtype: str) -> None:
    """It has the bits of a NaN in any other dy: devices do not agree on those of a conversion."""
    for seed in (6, 7):
        case = case_of(dtype=dtype, dy="nan", layout="dy_expanded", M=1, seed=seed)
        assert_same(case)
        integers = bits(plain(case).dy)
        assert (integers == nan_bits(case)).sum() == 1
        assert (nan_bits(case) < 0) == (seed == 7)


@pytest.mark.parametrize("n", [1, 7, 129, 1025])
@pytest.mark.parametrize("m", [0, 1, 2, 20, 65])
def test_sizes(m: int, n: int) -> None:
    """Each with another mixture of kinds."""
    mixtures = zip(cycle(ROW_KINDS), cycle(DY_KINDS), cycle(LAYOUTS), cycle(DTYPES), cycle(WEIGHT_KINDS))
    start = 7 * m + n
    for rows, dy, layout, dtype, weights in some(islice(mixtures, start, start + 5)):
        assert_same(case_of(dtype=dtype, M=m, N=n, rows=rows, dy=dy, layout=layout, weights=weights))


@pytest.mark.parametrize("op", OPS)
def test_weights(op: str) -> None:
    every = [(dtype, "same") for dtype in DTYPES] + [("fp16", "fp32"), ("bf16", "fp32")]
    for weights, (dtype, weight_dtype), bias in some(product(WEIGHT_KINDS, every, OPS[op].biases)):
        assert_same(case_of(op, dtype, M=1, weights=weights, weight_dtype=weight_dtype, bias=bias))
    for weights in WEIGHT_KINDS:
        assert_same(case_of(op, M=1, N=1025, weights=weights, layout="misaligned"))


def test_the_bias_of_a_clamped_op_with_an_offset() -> None:
    """No op is both today; the bias is a limit if 1 + weight is 0."""
    op = replace(OPS["layernorm_relu_bitmask"], zero_centered=True)
    case = case_of(op.name, weights="probe")
    assert differing(case, fused(case, op), plain(case, op)) == []


@pytest.mark.parametrize("kind", [*NOT_FINITE, "largest"])
def test_slabs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slab has a row, or an element, with special values."""
    monkeypatch.setattr(inputs, "SLAB_ELEMENTS", 1)
    for seed, (m, n) in enumerate([(2 * len(ROWS), 7), (2 * len(ROWS) + 1, 30), (len(ROWS) + 2, STEP + 1)]):
        case = case_of(rows=kind, M=m, N=n, dy=kind if kind in DY_KINDS else "normal", seed=seed)
        assert slab_height(case) == len(ROWS)
        assert_same(case)
    assert not plain(case).x.isfinite().all() or kind == "largest"


def test_large_seeds() -> None:
    for seed in (0, 999_999_999_999, 2**63 - 1, 2**70 + 12345):
        assert_same(case_of(rows="scaled", seed=seed, M=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_makes_other_bits_is_not_used(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = _kernel_fits.__wrapped__
    assert fits(dtype, "fp32")
    right = fused_inputs.fill
    for wrong in ("x", "dy", "weight", "bias"):

        def one_bit(*given: Any, wrong: str = wrong) -> None:
            right(*given)
            tensor = dict(zip(("x", "dy", "weight", "bias"), given[2:6], strict=True))[wrong]
            integers = tensor.view(INTEGER[tensor.element_size()])
            integers.view(-1)[-1] ^= 1

        monkeypatch.setattr(fused_inputs, "fill", one_bit)
        assert not fits(dtype, "fp32")


def test_without_a_compiler_the_plain_way_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> None:
        raise fused_inputs.Unavailable("Failed to find C compiler")

    monkeypatch.setattr(fused_inputs, "fill", no_compiler)
    assert not _kernel_fits.__wrapped__("fp16", "fp16")


def bits(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, as integers."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(INTEGER[tensor.element_size()])


def core_cases(count: int, *, elements: int) -> Iterator[Case]:
    """Cases of random cores of every op and dtype, by turns."""
    order = random.Random(20)
    every = Declared(weights=(False, True), lone_bias=True, residual_dtypes=("io", "fp32"), ranks=(2, 3))
    extent = PROFILES["quick"].extent
    cells = [claims_of(op, every, dtype) for op in OPS.values() for dtype in DTYPES]
    cores = [drawn(claims, extent, order.randrange(1, 10**6)) for claims in cells]
    by_turns = (planned.case for turn in zip(*cores, strict=False) for planned in turn)
    known = (*WEIGHT_KINDS, NO_WEIGHT)  # of others ``make`` makes the weights in the plain way
    return islice((case for case in by_turns if elements >= case.M * case.N and case.weights in known), count)


@pytest.mark.slow
def test_cases_of_cores() -> None:
    for case in some(core_cases(360, elements=4000)):
        assert_same(case)


@pytest.mark.gpu
@requires_gpu
@pytest.mark.slow
def test_a_gpu_makes_the_cases_of_cores_as_a_cpu_does() -> None:
    for case in some(core_cases(400, elements=320_000)):
        on_gpu, on_cpu = (inputs.make(case, OPS[case.op], device).each(bits) for device in ("cuda", "cpu"))
        assert differing(case, on_gpu, on_cpu) == []


LARGE = [
    case_of(dtype="bf16", M=1, N=2**20 + 1, rows="offset", dy="nan"),
    case_of(dtype="fp32", M=2**20 + 1, N=1, rows="blend", dy="correlated"),
    case_of(dtype="fp32", M=2**20 + 1, N=5, rows="nan", dy="inf"),
    case_of(dtype="fp16", M=70_001, N=130, rows="blend", dy="last_row", layout="strided"),
    case_of(dtype="fp16", M=65_537, N=64, rows="mixed", layout="x_strided", gap=32_704),
    case_of(dtype="bf16", M=4097, N=8191, rows="blend", dy="integers", weights="probe"),
    case_of(dtype="fp16", M=65_600, N=32_768, rows="inf", dy="nan", layout="misaligned"),
    case_of(dtype="bf16", M=3, N=2**24 - 1, rows="tail", dy="correlated"),
]
"""Of several slabs, with offsets beyond 2^31 bytes and 2^31 elements."""


@pytest.mark.slow
def test_several_slabs_on_a_cpu() -> None:
    for case in some(LARGE[1:3]):
        assert_same(case)


@pytest.mark.gpu
@requires_gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE[:6], ids=lambda case: f"{case.M}x{case.N}")
def test_a_gpu_makes_large_cases_as_a_cpu_does(case: Case) -> None:
    assert differing(case, plain(case, device="cuda").each(bits), fused(case).each(bits)) == []
