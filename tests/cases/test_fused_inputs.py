# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""The kernels that make inputs write the bits of ``inputs.fill``: Triton's on a GPU, or interpreted on a CPU, and that
of C.

Whole buffers are compared, with the bands and gaps around the elements.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.impls.kernels import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.enabled() else "cpu"
if DEVICE == "cpu":
    interpreter.enable()

from normcheck.cases import fused_inputs, inputs
from normcheck.cases.case import LAYOUTS, NO_WEIGHT, Case
from normcheck.cases.claims import claims_of
from normcheck.cases.core import drawn
from normcheck.cases.data_kinds import DY_KINDS, NOT_FINITE, ROW_KINDS, ROWS, WEIGHT_KINDS
from normcheck.cases.declared import Declared
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.guard_bands import untouched
from normcheck.cases.inputs import Inputs, _kernel_fits, _unfilled, fill, nan_bits, slab_height
from normcheck.cases.ops import OPS, Op
from normcheck.gate.plan import PROFILES
from tests.some import some

requires_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, and TRITON_INTERPRET not set")
INTEGER = {2: torch.int16, 4: torch.int32}
STEP = fused_inputs.BLOCK // 2
"""The widest row of which a tile has several."""


@pytest.fixture(autouse=True, params=["triton"] if DEVICE == "cuda" else ["triton", "c"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two kernels fills tensors."""
    monkeypatch.setattr(fused_inputs, "interpreted", DEVICE == "cpu" and request.param == "triton")
    return str(request.param)


of_triton = pytest.mark.parametrize("kernel", ["triton"], indirect=True)


def case_of(op: str = "layernorm", dtype: str = "fp16", **fields: Any) -> Case:
    own = {"options": OPS[op].clips((-0.5, 1.0)), "bias": OPS[op].takes_bias, "gap": 0}
    if "strided" in fields.get("layout", ""):
        own["gap"] = 3
    return Case(**{"op": op, "dtype": dtype, "M": 20, "N": 37, "seed": 7, **own, **fields})


def fused(case: Case, op: Op | None = None) -> Inputs:
    made = _unfilled(case, DEVICE)
    op = op or OPS[case.op]
    fused_inputs.fill(case, op, made.x, made.dy, made.weight, made.bias, slab_height(case), nan_bits(case))
    return made


def plain(case: Case, op: Op | None = None) -> Inputs:
    made = _unfilled(case, DEVICE)
    fill(case, op or OPS[case.op], made)
    return made


def differing(case: Case, a: Inputs, b: Inputs) -> list[str]:
    return [f"{name} of {case}" for (name, t), (_, u) in zip(a.named(), b.named(), strict=True) if not untouched(t, u)]


def assert_same(case: Case) -> None:
    assert differing(case, fused(case), plain(case)) == []


@pytest.mark.parametrize("rows", ROW_KINDS)
def test_every_kind_of_rows(kernel: str, rows: str) -> None:
    """In tiles of several rows, and of a piece of one row; an odd seed changes the sign of a NaN.

    Interpreted, each tile with a dtype by turns.
    """
    turn = list(ROW_KINDS).index(rows)
    for number, (m, n, seed) in enumerate(((20, 7, 7), (2, STEP, 8), (2, STEP + 1, 9), (1, 1025, 7)), turn):
        for dtype in some(DTYPES if kernel == "c" else (DTYPES[number % len(DTYPES)],)):
            assert_same(case_of(dtype=dtype, rows=rows, M=m, N=n, seed=seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dy_in_every_layout(kernel: str, layout: str) -> None:
    """Interpreted, each layout with a dtype and a width by turns."""
    turn = LAYOUTS.index(layout)
    for number, dy in enumerate(DY_KINDS, turn):
        for dtype in DTYPES if kernel == "c" else (DTYPES[number % len(DTYPES)],):
            assert_same(case_of(dtype=dtype, dy=dy, rows="shifted", layout=layout))
        if kernel == "c" or number % 2:
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
def test_sizes(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with another mixture of kinds."""
    if m * n > 20 * 129 and DEVICE == "cpu":
        monkeypatch.setattr(fused_inputs, "BLOCK", 8192)  # the interpreter takes as long for a program of any width
    mixtures = zip(cycle(ROW_KINDS), cycle(DY_KINDS), cycle(LAYOUTS), cycle(DTYPES), cycle(WEIGHT_KINDS))
    start = 7 * m + n
    for rows, dy, layout, dtype, weights in some(islice(mixtures, start, start + 5)):
        assert_same(case_of(dtype=dtype, M=m, N=n, rows=rows, dy=dy, layout=layout, weights=weights))


@pytest.mark.parametrize("weights", WEIGHT_KINDS)
@pytest.mark.parametrize("op", OPS)
def test_weights(kernel: str, op: str, weights: str) -> None:
    """Interpreted, an op with two of the five dtypes by turns."""
    turn = list(OPS).index(op) + list(WEIGHT_KINDS).index(weights)
    every = [(dtype, "same") for dtype in DTYPES] + [("fp16", "fp32"), ("bf16", "fp32")]
    for dtype, weight_dtype in every if kernel == "c" else (every[turn % 5], every[(turn + 3) % 5]):
        for bias in OPS[op].biases:
            assert_same(case_of(op, dtype, M=1, weights=weights, weight_dtype=weight_dtype, bias=bias))
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
def test_a_kernel_that_makes_other_bits_is_not_used(kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, not each tensor in each dtype."""
    fits = _kernel_fits.__wrapped__
    assert fits(dtype, "fp32", DEVICE)
    right = fused_inputs.fill
    tensors = ("x", "dy", "weight", "bias")
    for wrong in tensors if kernel == "c" else tensors[DTYPES.index(dtype) :: len(DTYPES)]:

        def one_bit(*given: Any, wrong: str = wrong) -> None:
            right(*given)
            tensor = dict(zip(("x", "dy", "weight", "bias"), given[2:6], strict=True))[wrong]
            integers = tensor.view(INTEGER[tensor.element_size()])
            integers.view(-1)[-1] ^= 1

        monkeypatch.setattr(fused_inputs, "fill", one_bit)
        assert not fits(dtype, "fp32", DEVICE)


def test_without_a_compiler_the_plain_way_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> None:
        raise fused_inputs.Unavailable("Failed to find C compiler")

    monkeypatch.setattr(fused_inputs, "fill", no_compiler)
    assert not _kernel_fits.__wrapped__("fp16", "fp16", DEVICE)


@of_triton
def test_whatever_the_compiler_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from normcheck.cases import input_kernels

    monkeypatch.setattr(fused_inputs, "_known", {})
    monkeypatch.setattr(input_kernels, "make", None)
    with pytest.raises(fused_inputs.Unavailable, match="NoneType"):
        fused(case_of())


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


def test_cases_of_cores(kernel: str) -> None:
    for case in some(core_cases(36 if kernel == "triton" else 360, elements=4000)):
        assert_same(case)


@pytest.mark.gpu
@requires_gpu
@pytest.mark.slow
def test_a_gpu_makes_the_cases_of_cores_as_a_cpu_does() -> None:
    for case in some(core_cases(400, elements=320_000)):
        assert_same(case)
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


@pytest.mark.parametrize("kernel", ["c"], indirect=True)
@pytest.mark.skipif(DEVICE == "cuda", reason="the kernel of C is tested where there is no GPU")
def test_several_slabs_on_a_cpu() -> None:
    for case in some(LARGE[1:3]):
        assert_same(case)


@pytest.mark.gpu
@requires_gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case.M}x{case.N}")
def test_large_cases(case: Case) -> None:
    assert_same(case)


COMPILED = """
import sys
import threading
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from normcheck.cases.fused_inputs import BLOCK, WARPS
from normcheck.cases.input_kernels import INTEGERS, make

types = {"x_ptr": "*bf16", "dy_ptr": "*bf16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "BLOCK": "constexpr"}
source = ASTSource(fn=make, signature={**types, **dict.fromkeys(INTEGERS, "i64")}, constexprs={"BLOCK": BLOCK})
options = {"num_warps": WARPS, "enable_fp_fusion": sys.argv[1] == "True"}
built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(built.asm["ptx"])
"""


@of_triton
@pytest.mark.slow
def test_no_product_and_sum_become_one_operation() -> None:
    """Compiled for an H100, which needs none here: an fma would round once where the definition rounds twice."""

    def ptx(fusion: bool) -> str:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(inputs.__file__).parents[2])}
        command = [sys.executable, "-c", COMPILED, str(fusion)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    assert "fma.rn.f64" in ptx(True)
    plain = ptx(False)
    assert "fma." not in plain and ".ftz" not in plain
    assert not re.search(r"(add|sub|mul)\.f64", plain)  # without .rn, ptxas itself may make an fma of two


def test_processes_side_by_side_compile_other_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be compiled keeps no other from it."""
    asked: dict[int, list[tuple[str, str]]] = {}

    def fits(dtype: str, weight: str, device: str) -> bool:
        asked[first].append((dtype, weight))
        if dtype == "bf16":
            raise RuntimeError("no memory")
        return weight == dtype

    monkeypatch.setattr(inputs, "_kernel_fits", fits)
    monkeypatch.setattr(inputs, "_compiled", set())
    for first in range(6):
        asked[first] = []
        before = set(threading.enumerate())
        inputs.compile_soon("cuda", first)
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert [own[0] for own in asked.values()] == [*asked[0], asked[0][0]]
    assert {frozenset(own) for own in asked.values()} == {frozenset(asked[0])} and len(asked[0]) == 5
    assert inputs._compiled == {("fp16", "fp16"), ("fp32", "fp32")}
