# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""This project's Triton kernels that return codes against plain fp64 torch: on a GPU, or interpreted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.impls.kernels import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.enabled() else "cpu"
if DEVICE == "cpu":
    interpreter.enable()

from normcheck.impls.kernels import quantised as kernels
from normcheck.impls.kernels.tiles import Tile
from normcheck.impls.triton import CODED, IMPLEMENTATIONS
from tests.inner_loop import parametrize

BY_NAME = {own.name: own for own in IMPLEMENTATIONS if own.op == "fused_add_rmsnorm_quant"}
E4M3FN, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GIVEN = 0.05
WAYS = [(E4M3FN, None), (INT8, None), (INT8, 0), (E4M3FN, 0), (E4M3FN, 128), (INT8, 64)]
EPS, LEAST = 1e-5, 2.0**-20


def tensors(M: int, N: int, dtype: torch.dtype, residual_dtype: torch.dtype) -> dict[str, Tensor]:
    """x and residual (M, N) with gaps of NaN behind their rows, of different lengths, and weight (N,)."""
    generator = torch.Generator().manual_seed(M * 100_003 + N)
    x = torch.full((M, N + 3), float("nan"), dtype=dtype)
    residual = torch.full((M, N + 8), float("nan"), dtype=residual_dtype)
    x[:, :N], residual[:, :N] = torch.randn(2, M, N, generator=generator)
    weight = torch.randn(N, generator=generator).to(dtype)
    return {"x": x.to(DEVICE)[:, :N], "residual": residual.to(DEVICE)[:, :N], "weight": weight.to(DEVICE)}


def assert_right(t: dict[str, Tensor], found: dict[str, Tensor], limit: float = math.inf, given: float = GIVEN) -> None:
    """The sum to the bit, each scale to 1e-6, and each code one that the quotient within 1e-6 may have."""
    s = t["x"].double() if "residual" not in t else found["residual_out"].double()
    if "residual" in t:
        assert torch.equal(found["residual_out"], (t["x"].float() + t["residual"].float()).to(t["residual"].dtype))
    y = s * (s.square().mean(-1, keepdim=True) + EPS).rsqrt() * t.get("weight", torch.ones(1)).double().to(s.device)
    q = found["q"]
    largest, scale = kernels.LARGEST[q.dtype], torch.full((1, 1), given, device=y.device)
    if "scale" in found:
        scale = found["scale"]
        assert scale.dtype == torch.float32 and len(scale) == len(y)
        width = y.shape[1] if scale.shape[1] == 1 else 128 if q.dtype == E4M3FN else 64
        assert scale.shape[1] == -(-y.shape[1] // width)
        blocks = [part.abs().amax(1).clamp(max=limit) / largest for part in y.split(width, 1)]
        torch.testing.assert_close(scale.double(), torch.stack(blocks, 1).clamp(min=LEAST), rtol=1e-6, atol=0)
        scale = scale.repeat_interleave(width, 1)[:, : y.shape[1]]
    quotient = (y / scale.double()).float()
    low, high = (code(quotient * (1 + off), q.dtype) for off in (-1e-6, 1e-6))
    ends = torch.minimum(low, high), torch.maximum(low, high)
    assert bool(((q.float() >= ends[0]) & (q.float() <= ends[1])).all())
    assert float((ends[0] < ends[1]).float().mean()) < 0.02  # nearly all are decided


def code(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The code of t, as a number in fp32."""
    t = t.clamp(-kernels.LARGEST[dtype], kernels.LARGEST[dtype])
    return (t.round() if dtype == INT8 else t).to(dtype).float()


def run(t: dict[str, Tensor], dtype: torch.dtype, columns: int | None, **options: Any) -> dict[str, Tensor]:
    given = {"scale": torch.tensor([GIVEN], device=DEVICE)} if columns is None else {"least": LEAST}
    rest = {"residual": t["residual"]} if "residual" in t else {}
    return kernels.forward(
        t["x"], t.get("weight"), eps=EPS, dtype=dtype, columns=columns, **given, **rest, **options
    )  # fmt: skip


@parametrize(("M", "N"), [(1, 1), (3, 7), (5, 129), (2, 1000), (150, 20), (2, 20000)], inner=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("codes", "columns"), WAYS)
def test_every_output_against_fp64(codes: torch.dtype, columns: int | None, dtype: torch.dtype, M: int, N: int) -> None:
    t = tensors(M, N, dtype, dtype)
    assert_right(t, run(t, codes, columns))
    plain = {"x": t["x"]}
    assert_right(plain, run(plain, codes, columns))


@pytest.mark.parametrize(("codes", "columns"), WAYS)
def test_pieces_of_wide_rows_and_rows_in_a_loop(codes: torch.dtype, columns: int | None) -> None:
    t = tensors(7, 300, torch.bfloat16, torch.float32)
    assert_right(t, run(t, codes, columns, max_block=128))
    for block in (512, 128):  # one block a row, and three
        looped = Tile(rows=2, block=block, warps=4, stages=2, groups=1)
        assert_right(t, run(t, codes, columns, how=looped))


@pytest.mark.parametrize(("codes", "columns"), WAYS[2:])
@pytest.mark.parametrize("max_block", [128, 1024])
def test_a_limit_and_rows_of_zeros(codes: torch.dtype, columns: int, max_block: int) -> None:
    t = tensors(4, 300, torch.bfloat16, torch.bfloat16)
    for matrix in (t["x"], t["residual"]):
        matrix[2] = 0
    found = run(t, codes, columns, scale_ub=1.75, max_block=max_block)
    assert_right(t, found, limit=1.75)
    assert (found["scale"][2] == LEAST).all() and not found["q"][2].float().any()
    assert (found["q"][0].float().abs() == kernels.LARGEST[codes]).sum() > 1  # those past the limit are saturated


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("with_residual", [True, False])
def test_rows_whose_products_with_the_weight_leave_fp32(block: int, with_residual: bool) -> None:
    """x * w overflows, or is subnormal, though y has codes: the scale of a row is as if it came from y itself."""
    x = torch.randn(6, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = (x * torch.tensor([1e-37, 1e-30, 1.0, 1e18, 0.0, 1e-38])[:, None]).bfloat16().to(DEVICE)
    weight = torch.tensor([1e-4, 1e3, 1e25, 1.0]).repeat(25).bfloat16().to(DEVICE)
    residual = torch.zeros_like(x) if with_residual else None
    one, other = (
        kernels.forward(x, weight, eps=EPS, dtype=INT8, columns=0, residual=residual, how=how)
        for how in (
            Tile(rows=2, block=block, warps=4, stages=2, groups=2),
            Tile(rows=2, block=128, warps=4),
        )
    )
    assert other["scale"][0] > 0
    torch.testing.assert_close(one["scale"], other["scale"], rtol=1e-6, atol=0)
    differ = (one["q"].int() - other["q"].int()).abs()
    assert int(differ.max()) <= 1 and float(differ.float().mean()) < 0.01


@pytest.mark.parametrize(("codes", "largest"), [(E4M3FN, 448.0), (INT8, 127.0)])
def test_ties_go_to_even_and_the_reciprocal_is_what_is_multiplied_by(codes: torch.dtype, largest: float) -> None:
    """xhat of a row of +-1 is +-1 with eps 0, so y is the weight."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every.abs() <= largest)].sort().values
    weight = torch.cat([every, (every[1:] + every[:-1]) / 2]).to(DEVICE)
    x = torch.ones(2, len(weight), device=DEVICE)
    x[1] = -1
    for scale in (1.0, 3.0, 0.7, 2.0**-120):
        given = torch.tensor([scale], device=DEVICE)
        q = kernels.forward(x, weight, eps=0.0, dtype=codes, scale=given)["q"]
        assert torch.equal(q.float(), code(x * weight * (1.0 / given), codes))


@pytest.mark.parametrize("name", CODED)
def test_an_implementation_has_the_shapes_of_its_inputs(name: str) -> None:
    own = BY_NAME[name]
    x, residual = torch.randn(2, 2, 3, 200, device=DEVICE, dtype=torch.float16)
    given = {"scale": torch.tensor([GIVEN], device=DEVICE)} if own.model["scale"] == "given" else {}
    found = own.forward(x, None, None, eps=EPS, residual=residual, **given)
    assert found["q"].shape == found["residual_out"].shape == x.shape
    scales = {"given": None, "token": (6, 1), "block128": (6, 2)}[own.model["scale"]]
    assert (tuple(found["scale"].shape) if "scale" in found else None) == scales
    rows = {k: v.flatten(0, 1) if v.dim() == 3 else v for k, v in found.items()}
    assert_right({"x": x.flatten(0, 1), "residual": residual.flatten(0, 1)}, rows)


@pytest.mark.parametrize(("codes", "columns"), WAYS)
def test_no_rows(codes: torch.dtype, columns: int | None) -> None:
    t = tensors(0, 200, torch.float16, torch.float16)
    found = run(t, codes, columns)
    assert found["q"].shape == found["residual_out"].shape == (0, 200)
    assert columns is None or found["scale"].shape == (0, -(-200 // columns) if columns else 1)
