# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""This project's Triton kernels that add a residual, against fp64 torch: on a GPU, or interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.ops import FUSED_ADD
from normcheck.impls.kernels import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.enabled() else "cpu"
if DEVICE == "cpu":
    interpreter.enable()

from normcheck.impls.kernels import backward as backward_kernels
from normcheck.impls.kernels import forward as forward_kernels
from normcheck.impls.kernels.tiles import Tile
from normcheck.impls.triton import IMPLEMENTATIONS
from tests.impls.test_kernels import DTYPES, EPS, SHAPES, assert_close, requires_gpu
from tests.inner_loop import parametrize

OPS = tuple(op.name for op in FUSED_ADD if not op.rounds_xhat)
GEMMA = "fused_add_rmsnorm_gemma"
BY_OP = {own.op: own for own in IMPLEMENTATIONS if own.op in OPS}
BOTH = [torch.bfloat16, torch.float32]


def tensors(
    M: int, N: int, dtype: torch.dtype, residual_dtype: torch.dtype | None = None, *, gap: int = 0
) -> dict[str, Tensor]:
    """x, residual, dy, dresidual_out (M, N), rows of each with a stride of its own if ``gap``; weight and bias (N,)."""
    generator = torch.Generator().manual_seed(M * 100_003 + N)
    dtypes = {"x": dtype, "residual": residual_dtype or dtype, "dy": dtype, "dresidual_out": residual_dtype or dtype}
    made = {}
    for i, (name, own) in enumerate(dtypes.items()):
        rows = torch.full((M, N + i * gap), float("nan"), dtype=own)
        rows[:, :N] = torch.randn(M, N, generator=generator)
        made[name] = rows.to(DEVICE)[:, :N]
    made["weight"], made["bias"] = torch.randn(2, N, generator=generator).to(DEVICE, dtype)
    return made


def run(op: str, t: dict[str, Tensor], *, weight: bool = True) -> dict[str, Tensor]:
    """Every output of forward and backward; layernorm with a bias, unless there is no weight."""
    if not weight:
        t = {**t, "weight": None, "bias": None}
    own, bias = BY_OP[op], t["bias"] if op == "fused_add_layernorm" else None
    assert own.backward is not None
    given = {"eps": EPS, "residual": t["residual"]}
    saved = own.forward(t["x"], t["weight"], bias, **given)
    return {
        **saved,
        **own.backward(t["dy"], t["x"], t["weight"], bias, saved, **given, dresidual_out=t["dresidual_out"]),
    }


def expected_of(op: str, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in fp64 by autograd, of the sum as it is stored."""
    stored = (t["x"].double() + t["residual"].double()).to(t["residual"].dtype)
    s, weight, bias = (tensor.double().requires_grad_() for tensor in (stored, t["weight"], t["bias"]))
    mean = s.mean(-1, keepdim=True) if op == "fused_add_layernorm" else torch.zeros_like(s[:, :1])
    rstd = ((s - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (s - mean) * rstd * (weight + (op == GEMMA)) + bias * (op == "fused_add_layernorm")
    dx, dw, db = torch.autograd.grad(y, (s, weight, bias), t["dy"].double())
    dx = dx + t["dresidual_out"].double()
    statistics = {"mean": mean.detach().flatten(), "rstd": rstd.detach().flatten()}
    gradients = {"dx": dx, "dresidual": dx, "dw": dw, "db": db}
    return {"residual_out": stored.double(), "y": y.detach(), **statistics, **gradients}


def assert_right(op: str, t: dict[str, Tensor]) -> dict[str, Tensor]:
    actual, expected = run(op, t), expected_of(op, t)
    of_layernorm = {"mean", "db"} if op == "fused_add_layernorm" else set()
    assert actual.keys() == {"y", "residual_out", "rstd", "dx", "dresidual", "dw", *of_layernorm}
    for name, tensor in actual.items():
        assert_close(name, tensor, expected[name])
    assert torch.equal(actual["residual_out"].double(), expected["residual_out"])
    wide = ("residual_out", "dresidual")
    assert {n: actual[n].dtype for n in wide} == dict.fromkeys(wide, t["residual"].dtype)
    return actual


@parametrize(("M", "N"), SHAPES, inner=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_output_against_fp64(op: str, dtype: torch.dtype, M: int, N: int) -> None:
    actual = assert_right(op, tensors(M, N, dtype))
    assert actual["dx"] is actual["dresidual"]


@pytest.mark.parametrize("op", OPS)
def test_a_wider_residual_and_row_strides_that_all_differ(op: str) -> None:
    actual = assert_right(op, tensors(9, 45, torch.float16, torch.float32, gap=3))
    assert actual["dx"].dtype == torch.float16
    assert all(actual[name].is_contiguous() for name in ("y", "residual_out", "dx", "dresidual"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("M", [0, 150])
def test_without_a_weight_it_is_as_with_ones(op: str, M: int) -> None:
    t = tensors(M, 20, torch.bfloat16)
    t |= {"weight": torch.full_like(t["weight"], op != GEMMA), "bias": torch.zeros_like(t["bias"])}
    with_ones, without = run(op, t), run(op, t, weight=False)
    assert with_ones.keys() - without.keys() == {"dw"} | ({"db"} if op == "fused_add_layernorm" else set())
    assert all(torch.equal(without[name], with_ones[name]) for name in without)


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str) -> None:
    out = run(op, tensors(0, 8, torch.float16))
    assert all(out[name].shape == (0, 8) for name in ("y", "residual_out", "dx", "dresidual"))
    assert out["dw"].tolist() == [0.0] * 8


@pytest.mark.parametrize("residual_dtype", BOTH, ids=str)
def test_three_dimensions_are_rows(residual_dtype: torch.dtype) -> None:
    t = tensors(6, 20, torch.bfloat16, residual_dtype)
    cube = {name: tensor.view(2, 3, 20) if tensor.dim() == 2 else tensor for name, tensor in t.items()}
    flat, found = run("fused_add_layernorm", t), run("fused_add_layernorm", cube)
    for name in ("y", "residual_out", "dx", "dresidual"):
        assert found[name].shape == (2, 3, 20)
    assert all(torch.equal(found[name].view(flat[name].shape), flat[name]) for name in flat)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "limits", [{"max_block": 32}, {"how": Tile(rows=2, block=128, warps=1, stages=2, groups=3)}], ids=["blocks", "loop"]
)
def test_other_tiles_give_the_same(op: str, limits: dict[str, Any]) -> None:
    """Rows of many blocks, and programs that loop over rows as on a GPU, on rows that end within a tile and a group."""
    t = tensors(23, 100, torch.float16, torch.float32, gap=1)
    one, bias = {"centered": op == "fused_add_layernorm"}, t["bias"] if op == "fused_add_layernorm" else None
    plain = forward_kernels.forward(t["x"], t["weight"], bias, eps=EPS, residual=t["residual"], **one)
    tiled = forward_kernels.forward(t["x"], t["weight"], bias, eps=EPS, residual=t["residual"], **one, **limits)
    facts = {"mean": plain.get("mean"), "rstd": plain["rstd"], "added": t["dresidual_out"]}
    plain |= backward_kernels.backward(t["dy"], plain["residual_out"], t["weight"], bias, **facts)
    tiled |= backward_kernels.backward(t["dy"], plain["residual_out"], t["weight"], bias, **facts, **limits)
    assert plain.keys() == tiled.keys()
    assert torch.equal(plain["residual_out"], tiled["residual_out"])
    for name in plain:
        assert_close(name, tiled[name], plain[name].double())


@pytest.mark.gpu
@requires_gpu
@pytest.mark.parametrize(("M", "N"), [(4099, 768), (65536, 5), (1000, 8192), (700, 16384), (300, 32768), (3, 131072)])
@pytest.mark.parametrize("residual_dtype", BOTH, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_large_shapes_on_a_gpu(op: str, residual_dtype: torch.dtype, M: int, N: int) -> None:
    t = tensors(M, N, torch.bfloat16, residual_dtype)
    first, second = assert_right(op, t), run(op, t)
    assert all(torch.equal(first[name], second[name]) for name in first)
