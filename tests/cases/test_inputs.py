"""The same case line is the same bits, everywhere and in every version: golden/inputs.json keeps their digests.

NORMCHECK_UPDATE_GOLDEN=1 rewrites them; a changed digest means that every case line of every old report has changed
its meaning.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normcheck.cases import inputs
from normcheck.cases.axes import COMMON_COLUMNS, ROUND, fit_of
from normcheck.cases.case import Case
from normcheck.cases.data_kinds import DY_KINDS, NOT_FINITE, RESIDUAL_KINDS, ROW_KINDS, ROWS, WEIGHT_KINDS
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.layouts import (
    CHANNELS_LAST,
    EXPANDED,
    HEADS,
    LAYOUTS,
    OF_ROW_GROUPS,
    RANK4,
    SAMPLES_STRIDED,
    STRIDED,
    TRAILING,
)
from normcheck.cases.ops import OPS
from normcheck.cases.strides import gap_of
from tests.inner_loop import parametrize
from tests.some import some

CLIPS = (("lower_clip", -0.5), ("upper_clip", 1.0))
TENSORS = ("x", "weight", "bias", "dy")
FINITE_DY = [kind for kind in DY_KINDS if kind not in NOT_FINITE]


def case_of(op: str = "layernorm", dtype: str = "fp16", **fields: object) -> Case:
    """23 rows, so that a blend of the kinds of rows starts again."""
    own = {"options": CLIPS if OPS[op].options else (), "bias": OPS[op].takes_bias}
    return Case(**{"op": op, "dtype": dtype, "M": 23, "N": 37, "seed": 7, **own, **fields})  # type: ignore[arg-type]


def golden_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for rows in ROW_KINDS:
            yield case_of(dtype=dtype, rows=rows)
        for dy in DY_KINDS:
            yield case_of(dtype=dtype, rows="shifted", dy=dy)
        for weights in WEIGHT_KINDS:
            for op in OPS:
                if not (
                    OPS[op].l2 or OPS[op].modulated or OPS[op].grouped or OPS[op].rotary
                ):  # x and dy of norms by length are those of any other
                    yield case_of(op, dtype, weights=weights)
        for seed in (0, 999_999_999_999):
            yield case_of(dtype=dtype, seed=seed)
    for weights in WEIGHT_KINDS:
        yield case_of(weights=weights, weight_dtype="fp32")
    for dtype in DTYPES:
        for residual in RESIDUAL_KINDS:
            yield case_of("fused_add_layernorm", dtype, rows="blend", residual=residual)
    yield case_of("fused_add_rmsnorm", "bf16", residual_dtype="fp32")
    yield case_of("rmsnorm_modulate", "bf16", M=20, weights="probe", weight_dtype="fp32", samples="few")


OF_ROWS = tuple(layout for layout in LAYOUTS if layout not in (CHANNELS_LAST, SAMPLES_STRIDED, *OF_ROW_GROUPS))
"""The layouts of x (M, N), with one weight; that of channels: tests/oracle/test_grouped.py, those of groups of rows:
tests/checks/test_weight_layouts.py."""

CASES = {str(case): case for case in golden_cases()}


def made(case: Case, device: str = "cpu") -> Inputs:
    return make(case, OPS[case.op], device)


def digest(tensor: Tensor) -> str:
    integers = torch.int16 if tensor.element_size() == 2 else torch.int32
    values = tensor.reshape(-1, tensor.shape[-1]).contiguous().cpu().view(integers).numpy()
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()


def digests(case: Case, device: str = "cpu") -> dict[str, str]:
    tensors = made(case, device)
    return {name: digest(tensor) for name, tensor in tensors.named()}


def test_golden(recorded: Callable[[str, str], None]) -> None:
    found = {line: {name: value[:32] for name, value in digests(case).items()} for line, case in CASES.items()}
    recorded("inputs.json", json.dumps(found, indent=1, sort_keys=True) + "\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_a_gpu_makes_the_same_bits() -> None:
    tall = [case_of(dtype=dtype, rows=rows, M=257, N=4099) for dtype in DTYPES for rows in ("blend", "normal")]
    for case in (*CASES.values(), *tall):
        assert digests(case, "cuda") == digests(case), str(case)


@pytest.mark.parametrize("rows", [*ROWS, "blend"])
def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    """A tall case is made in slabs of rows."""
    cases = [case_of(rows=rows, M=3 * len(ROWS) + 5, N=5, dy=dy) for dy in FINITE_DY]
    whole = [digests(case) for case in cases]
    for elements in (1, 5 * len(ROWS) * 2):
        monkeypatch.setattr(inputs, "SLAB_ELEMENTS", elements)
        assert [digests(case) for case in cases] == whole


@parametrize("dtype", DTYPES, inner=2)
@pytest.mark.parametrize("op", OPS)
def test_every_value_is_finite(op: str, dtype: str) -> None:
    for rows in some(set(ROW_KINDS) - set(NOT_FINITE)):
        for weights in WEIGHT_KINDS:
            tensors = made(case_of(op, dtype, rows=rows, weights=weights, M=len(ROWS) * 8, seed=3))
            for name, tensor in some(tensors.named()):
                assert tensor.isfinite().all(), f"{name} of rows={rows} weights={weights}"


@pytest.mark.parametrize("rows", ["normal", "offset", "large", "subnormal"])
@pytest.mark.parametrize("kind", FINITE_DY)
def test_dy_has_unit_scale(kind: str, rows: str) -> None:
    """Whatever x is: a gradient kernel is asked about dy, not about overflow."""
    dy = made(case_of(dtype="fp32", rows=rows, dy=kind, M=64, N=257)).dy.double()
    dy *= {"small": 2.0**30, "large": 2.0**-9}.get(kind, 1.0)
    if kind in ("first_row", "last_row"):
        row = 0 if kind == "first_row" else 63
        assert dy.any(1).nonzero().flatten().tolist() == [row]
        assert (dy[row] != 0).all()  # an element lost there is an element seen
        dy = dy[row]
    assert 0.5 < dy.square().mean().sqrt() < 2
    assert dy.abs().max() < 8


def test_normal_is_near_enough_to_normal() -> None:
    x = made(case_of(dtype="fp32", M=100, N=1000)).x.double()
    assert abs(x.mean()) < 0.02
    assert abs(x.var() - 1) < 0.02
    assert x.abs().max() < 3.5


@pytest.mark.parametrize("field", ["seed", "M", "N", "dy", "rows"])
def test_what_one_field_changes(field: str) -> None:
    """The rows that two cases share have the same x, so that a failure keeps its data while it shrinks in M."""
    before = case_of()
    after = replace(before, **{field: {"seed": 8, "M": 24, "N": 38, "dy": "shifted", "rows": "shifted"}[field]})
    same = {name for name in TENSORS if digest(getattr(made(before), name)) == digest(getattr(made(after), name))}
    assert (
        same
        == {
            "seed": set(),
            "M": {"weight", "bias"},
            "N": set(),
            "dy": {"x", "weight", "bias"},
            "rows": {"dy", "weight", "bias"},
        }[field]
    )
    if field == "M":
        assert torch.equal(made(after).x[:23], made(before).x)


@pytest.mark.parametrize("layout", OF_ROWS)
def test_layouts_hold_the_same_values(layout: str) -> None:
    gap = 3 if layout in STRIDED else 0
    case = case_of(rows="blend", layout=layout, gap=gap, M=24)
    tensors = made(case)
    plain = digests(replace(case, layout="contiguous", gap=0))
    own = digests(case)
    assert {name for name in TENSORS if own[name] != plain[name]} == ({"dy"} if layout in EXPANDED else set())
    for name, tensor in (("x", tensors.x), ("dy", tensors.dy)):
        if layout == HEADS:  # tests/cases/test_heads.py looks closer
            assert tensor.shape == (3, 8, 37)
            assert tensor.stride() == ((12 if name == "x" else 8) * 37, 37, 1)
            continue
        if layout in ("rank3", "rank3_strided"):
            own = gap_of(case, name)
            assert tensor.shape == (4, 6, 37)
            assert tensor.stride() == (6 * (37 + own), 37 + own, 1)
            continue
        if layout in (RANK4, TRAILING):
            assert tensor.shape == ((4, 3, 2, 37) if layout == RANK4 else (24, 1, 37))
            assert tensor.is_contiguous()
            continue
        if name == "dy" and layout in EXPANDED:
            assert tensor.stride() == ((0, 1) if layout == "dy_expanded" else (0, 0))
            row = made(replace(case, layout="contiguous")).dy[0] if layout == "dy_expanded" else torch.ones(())
            assert (tensor == row).all()
            continue
        assert (gap_of(case, name) > 0) == (layout in ("strided", f"{name}_strided"))
        assert tensor.stride() == (37 + gap_of(case, name), 1)
        if gap_of(case, name):
            behind = tensor.as_strided((24, gap_of(case, name)), tensor.stride(), tensor.storage_offset() + 37)
            assert behind.isnan().all()
        assert tensor.storage_offset() % 256 == 0  # at this N parameters alone are misaligned


@pytest.mark.parametrize(
    ("looked_at", "other"),
    [("x", "weight"), ("x", "dy"), ("x", "residual"), ("weight", "x"), ("x weight", "residual"), ("x dy", "weight")],
)
def test_a_misaligned_case_shows_a_tensor_whose_address_a_kernel_takes_for_granted(looked_at: str, other: str) -> None:
    """At an N of whole vectors, which such a kernel takes, and at one that fills its block."""
    even = [n for n in COMMON_COLUMNS if n % 8 == 0]
    for columns in (even, [n for n in even if fit_of(n) == ROUND]):
        case = Case(op="fused_add_rmsnorm", dtype="bf16", M=3, N=8, layout="misaligned", bias=False)
        addresses = [{name: t.data_ptr() % 16 for name, t in made(replace(case, N=n)).named()} for n in columns]
        assert any(own[other] and not any(own[name] for name in looked_at.split()) for own in addresses)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_misaligned_tensor_is_one_element_off_or_8_bytes(dtype: str) -> None:
    """Loads of 16 bytes that looked at 8 of them went wrong in the second case alone."""
    case = Case(op="rmsnorm", dtype=dtype, M=3, N=8, layout="misaligned", bias=False)
    off = {made(replace(case, N=n)).x.data_ptr() % 16 for n in COMMON_COLUMNS if n % 8 == 0}
    assert off == {0, 2 if dtype == "bf16" else 4, 8}


@pytest.mark.parametrize("seed", [3, 4])
def test_all_gates_of_a_residual_are_0_in_some_cases(seed: int) -> None:
    """As AdaLN-Zero begins: a kernel that left out the gradient of such a gate passed."""
    case = Case(op="fused_add_rmsnorm_modulate", dtype="fp32", M=6, N=24, weights="probe", samples="few", seed=seed)
    gate = made(replace(case, bias=False)).residual_gate
    assert gate is not None and bool(gate.any()) == (seed % 3 > 0)


SHAPES_WITHOUT_ROWS = {"rank3": (1, 0, 37), "rank3_strided": (1, 0, 37), HEADS: (0, 1, 37)}
SHAPES_WITHOUT_ROWS |= {RANK4: (1, 0, 1, 37), TRAILING: (0, 1, 37)}


@pytest.mark.parametrize("layout", OF_ROWS)
def test_no_rows(layout: str) -> None:
    for rows, dy in itertools.product(ROW_KINDS, DY_KINDS):
        tensors = made(case_of(M=0, layout=layout, gap=3 if layout in STRIDED else 0, rows=rows, dy=dy))
        assert tensors.x.shape == tensors.dy.shape == SHAPES_WITHOUT_ROWS.get(layout, (0, 37))
        assert digest(tensors.weight) == digest(made(case_of()).weight)


def test_the_tensors_are_separate() -> None:
    """A kernel that writes over one of its inputs leaves the others as they are."""
    tensors = made(case_of(rows="constant"))
    pointers = {getattr(tensors, name).untyped_storage().data_ptr() for name in TENSORS}
    assert len(pointers) == len(TENSORS)
    assert tensors.x.stride() == (37, 1)


def test_dtypes_and_absent_bias() -> None:
    tensors = made(case_of("rmsnorm", bias=False, weight_dtype="fp32"))
    assert (tensors.x.dtype, tensors.weight.dtype, tensors.bias) == (torch.float16, torch.float32, None)


def test_probe_columns_tie_with_the_limits() -> None:
    """Where weight is 0 the bias is a limit: the only inputs that tell > from >=."""
    tensors = made(case_of("layernorm_relu_bitmask", weights="probe"))
    assert tensors.bias is not None
    assert set(tensors.bias[tensors.weight == 0].tolist()) == {-0.5, 1.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_one_element_is_not_finite(kind: str, dtype: str) -> None:
    rows, elements = set(), set()
    for seed in range(60):
        tensors = made(case_of(dtype=dtype, rows=kind, seed=seed))
        where = (~tensors.x.isfinite()).nonzero()
        assert len(set(where[:, 0].tolist())) == 1
        assert len(where) in (1, 37)
        rows |= set(where[:, 0].tolist())
        assert tensors.dy.isfinite().all()
        tensors = made(case_of(dtype=dtype, dy=kind, seed=seed))
        ((row, column),) = (~tensors.dy.isfinite()).nonzero().tolist()
        elements.add((row, column))
        assert tensors.x.isfinite().all()
    assert {0, 22} <= rows
    assert len(elements) > 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_and_the_largest_numbers(dtype: str) -> None:
    zeros = made(case_of(dtype=dtype, rows="signed_zero")).x
    assert not zeros.any()
    assert 0 < int(zeros.signbit().sum()) < zeros.numel()
    largest = made(case_of(dtype=dtype, rows="largest")).x
    most = largest.abs() == torch.finfo(largest.dtype).max
    assert most.all(1).sum() == 1
    assert most.any(1).sum() == 1


@pytest.mark.parametrize("layout", OF_ROWS)
def test_guard_bands_hold_what_no_computation_makes(layout: str) -> None:
    """Before and behind every tensor, a row and more of a NaN whose payload is its own."""
    tensors = made(case_of(layout=layout, gap=3 if layout in STRIDED else 0))
    for _, tensor in some(tensors.named()):
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // 2,), (1,), 0).view(torch.int16)
        start = tensor.storage_offset()
        assert start >= 37 + 256
        assert (whole[:start] == 0x7FFA).all()
        assert (whole[-(37 + 256) :] == 0x7FFA).all()
