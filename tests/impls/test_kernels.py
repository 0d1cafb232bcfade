# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""This project's Triton kernels against plain fp64 torch, written here a second time: on a GPU, or interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS as OF_EVERY_OP
from normcheck.cases.ops import TABLE
from normcheck.checks.ask import Ask
from normcheck.checks.check import check
from normcheck.impls.kernels import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.enabled() else "cpu"
if DEVICE == "cpu":
    interpreter.enable()

from normcheck.impls.kernels import backward as backward_kernels
from normcheck.impls.kernels import forward as forward_kernels
from normcheck.impls.kernels.tiles import Tile, group_rows, tile, turns
from normcheck.impls.triton import IMPLEMENTATIONS, unavailable
from tests.inner_loop import parametrize
from tests.some import some

PLAIN = {op.name for op in TABLE if not op.rounds_xhat}  # the others have tests of their own
BY_OP = {own.op: own for own in IMPLEMENTATIONS if own.op in PLAIN}
OPS = tuple(BY_OP)
ZERO_CENTERED = ("layernorm_zero_centered", "rmsnorm_gemma")
SHAPES = [(1, 1), (3, 7), (5, 129), (2, 1000), (17, 33), (150, 20), (2, 20000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
EPS = 1e-5

requires_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, and TRITON_INTERPRET not set")


def options_of(op: str) -> dict[str, float]:
    return {"lower_clip": -0.5, "upper_clip": 1.0} if op == "layernorm_relu_bitmask" else {}


def tensors(M: int, N: int, dtype: torch.dtype, *, fp32_weights: bool = False, gap: int = 0) -> dict[str, Tensor]:
    """x, dy (M, N) with ``gap`` NaN behind each row, weight and bias (N,): the same on every machine."""
    generator = torch.Generator().manual_seed(M * 100_003 + N)
    x, dy = torch.full((2, M, N + gap), float("nan"), dtype=dtype)
    x[:, :N] = torch.randn(M, N, generator=generator) + 0.5
    dy[:, :N] = torch.randn(M, N, generator=generator)
    weight, bias = torch.randn(2, N, generator=generator).to(torch.float32 if fp32_weights else dtype)
    made = {"x": x.to(DEVICE)[:, :N], "dy": dy.to(DEVICE)[:, :N]}
    return {**made, "weight": weight.to(DEVICE), "bias": bias.to(DEVICE)}


def run(op: str, t: dict[str, Tensor], *, bias: bool = True) -> dict[str, Tensor]:
    """Every output of forward and backward."""
    b = t["bias"] if bias else None
    backward = BY_OP[op].backward
    assert backward is not None
    saved = BY_OP[op].forward(t["x"], t["weight"], b, eps=EPS, **options_of(op))
    return {**saved, **backward(t["dy"], t["x"], t["weight"], b, saved, eps=EPS, **options_of(op))}


def expected_of(op: str, t: dict[str, Tensor], saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in fp64 by autograd, the clamp's derivative taken from the saved bits."""
    x, weight, bias = (t[name].double().requires_grad_() for name in ("x", "weight", "bias"))
    mean = torch.zeros_like(x[:, :1]) if op.startswith("rmsnorm") else x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    z = (x - mean) * rstd * (1 + weight if op in ZERO_CENTERED else weight) + bias
    dy = t["dy"].double()
    if "bitmask" in saved:
        dy = dy * unpacked(saved["bitmask"], x.shape[1])
    dx, dw, db = torch.autograd.grad(z, (x, weight, bias), dy)
    y = z.clamp(-0.5, 1.0) if "bitmask" in saved else z
    return {
        "y": y.detach(),
        "z": z.detach(),
        "mean": mean.flatten(),
        "rstd": rstd.flatten(),
        "dx": dx,
        "dw": dw,
        "db": db,
    }


def unpacked(packed: Tensor, N: int) -> Tensor:
    """Bits (M, N), 0 or 1, of packed bytes (M, ceil(N / 8)), least significant bit first."""
    return torch.stack([(packed >> k) & 1 for k in range(8)], dim=-1).flatten(1)[:, :N]


def assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """One rounding to actual's dtype, and for fp32 arithmetic 1e-5 of the output's own scale."""
    error = (actual.double() - expected).abs()
    allowed = 1.01 * HALF_ULP[actual.dtype] * expected.abs() + 1e-5 * expected.abs().amax().clamp(min=1)
    assert actual.shape == expected.shape, name
    assert bool((error <= allowed).all()), f"{name}: error {error.max()}, allowed there {allowed[error == error.max()]}"


@parametrize(("M", "N"), SHAPES, inner=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_output_against_fp64(op: str, dtype: torch.dtype, M: int, N: int) -> None:
    t = tensors(M, N, dtype)
    actual = run(op, t)
    expected = expected_of(op, t, actual)
    for name in actual.keys() - {"bitmask"}:
        assert_close(name, actual[name], expected[name])
    assert {n: actual[n].dtype for n in ("y", "dx", "dw", "db")} == dict.fromkeys(("y", "dx", "dw", "db"), dtype)
    assert ("mean" in actual) == op.startswith("layernorm")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("op", [own.op for own in IMPLEMENTATIONS if OF_EVERY_OP[own.op].rounds_xhat])
def test_xhat_is_rounded_before_its_product_with_the_weight(op: str, dtype: str) -> None:
    """Rounded once, or dw made of what was not rounded, is beyond the bounds of these ops in half precision."""
    facts, own = OF_EVERY_OP[op], next(one for one in IMPLEMENTATIONS if one.op == op)
    case = Case(op=op, dtype=dtype, M=40, N=129, seed=3, layout="strided", gap=3, bias=False)
    assert not check(own, facts, case, DEVICE, Ask()).failed
    once = partial(own.forward.func, **{**own.forward.keywords, "rounds_xhat": False})  # type: ignore[attr-defined]
    wrong = check(replace(own, forward=once), facts, case, DEVICE, Ask())
    assert wrong.failed == (dtype != "fp32")
    few = replace(case, M=2, weight_dtype="same" if dtype == "fp32" else "fp32")  # a dw of many rows hides it
    unrounded = partial(own.backward.func, **{**own.backward.keywords, "rounds_xhat": False})  # type: ignore[union-attr]
    assert not check(own, facts, few, DEVICE, Ask()).failed
    wrong = check(replace(own, backward=unrounded), facts, few, DEVICE, Ask())
    assert {each.output for each in wrong.wrong} == (set() if dtype == "fp32" else {"dw"})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_weights_and_gaps_of_nan(op: str, dtype: torch.dtype) -> None:
    t = tensors(9, 45, dtype, fp32_weights=True, gap=3)
    actual = run(op, t)
    expected = expected_of(op, t, actual)
    for name in actual.keys() - {"bitmask"}:
        assert_close(name, actual[name], expected[name])
    assert actual["dw"].dtype == actual["db"].dtype == torch.float32
    assert actual["y"].is_contiguous() and actual["dx"].is_contiguous()


@pytest.mark.parametrize(("M", "N"), [(3, 7), (2, 1000), (5, 128)])
def test_bits_say_where_z_lies_between_the_limits(M: int, N: int) -> None:
    t = tensors(M, N, torch.float32)
    actual = run("layernorm_relu_bitmask", t)
    z = expected_of("layernorm_relu_bitmask", t, actual)["z"]
    clear = ((z + 0.5).abs() > 1e-5) & ((z - 1.0).abs() > 1e-5)
    bits = unpacked(actual["bitmask"], N)
    assert torch.equal(bits[clear].bool(), ((z > -0.5) & (z < 1.0))[clear])
    assert actual["bitmask"].shape == (M, -(-N // 8))
    assert not unpacked(actual["bitmask"], -(-N // 8) * 8)[:, N:].any()


def test_a_limit_itself_is_outside_and_nan_stays() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight, bias = torch.zeros(16, device=DEVICE), torch.full((16,), -0.5, device=DEVICE)
    bias[8:] = 1.0
    bias[15] = float("nan")
    out = forward_kernels.forward(x, weight, bias, eps=EPS, clips=(-0.5, 1.0))
    assert not out["bitmask"].any()
    assert torch.equal(out["y"][:, :15], bias[:15].expand(4, 15)) and out["y"][:, 15].isnan().all()


@pytest.mark.parametrize("op", OPS)
def test_backward_uses_what_was_saved(op: str) -> None:
    t = tensors(6, 24, torch.float32)
    implementation = BY_OP[op]
    saved = implementation.forward(t["x"], t["weight"], t["bias"], eps=EPS, **options_of(op))
    other = {name: value for name, value in saved.items() if name != "y"}
    other["rstd"] = saved["rstd"] * 2
    if "bitmask" in saved:
        other["bitmask"] = torch.full_like(saved["bitmask"], 0b10101010)
    assert implementation.backward is not None
    got = implementation.backward(t["dy"], t["x"], t["weight"], t["bias"], other, eps=EPS, **options_of(op))
    x, dy, g = t["x"].double(), t["dy"].double(), t["weight"].double() + (op in ZERO_CENTERED)
    mean = saved["mean"].double()[:, None] if "mean" in saved else 0.0
    rstd = other["rstd"].double()[:, None]
    dy = dy * unpacked(other["bitmask"], 24) if "bitmask" in other else dy
    xhat, wdy = (x - mean) * rstd, dy * g
    c2 = 0.0 if op.startswith("rmsnorm") else wdy.mean(1, keepdim=True)
    assert_close("dx", got["dx"], (wdy - xhat * (xhat * wdy).mean(1, keepdim=True) - c2) * rstd)
    assert_close("dw", got["dw"], (dy * xhat).sum(0))
    assert_close("db", got["db"], dy.sum(0))


@pytest.mark.parametrize("op", OPS)
def test_y_is_made_of_the_saved_statistics(op: str) -> None:
    t = tensors(4, 50, torch.float32)
    t["x"] += 3000.0  # statistics that are off in their last bits
    out = run(op, t)
    mean = out["mean"].double()[:, None] if "mean" in out else 0.0
    g = t["weight"].double() + (op in ZERO_CENTERED)
    z = (t["x"].double() - mean) * out["rstd"].double()[:, None] * g + t["bias"].double()
    assert_close("y", out["y"], z.clamp(-0.5, 1.0) if "bitmask" in out else z)


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str) -> None:
    out = run(op, tensors(0, 8, torch.float16))
    assert out["y"].shape == out["dx"].shape == (0, 8)
    assert out["dw"].tolist() == out["db"].tolist() == [0.0] * 8


def test_no_bias() -> None:
    t = tensors(5, 30, torch.bfloat16)
    out = run("rmsnorm", t, bias=False)
    expected = expected_of("rmsnorm", {**t, "bias": torch.zeros_like(t["bias"])}, out)
    assert "db" not in out
    for name in out:
        assert_close(name, out[name], expected[name])


def test_three_dimensions_are_rows() -> None:
    t = tensors(6, 20, torch.float32)
    flat = run("layernorm", t)
    cube = run("layernorm", {**t, "x": t["x"].view(2, 3, 20), "dy": t["dy"].view(2, 3, 20)})
    assert cube["y"].shape == cube["dx"].shape == (2, 3, 20)
    for name in flat:
        assert torch.equal(cube[name].view(flat[name].shape), flat[name]), name


@pytest.mark.parametrize("op", OPS)
def test_two_runs_give_the_same_bits(op: str) -> None:
    t = tensors(300, 40, torch.bfloat16)
    first, second = run(op, t), run(op, t)
    for name in some(first):
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("op", OPS)
def test_rows_of_many_blocks_are_rows_of_one(op: str) -> None:
    """The narrow blocks of a wide row, tried on a narrow one: three blocks and a tail."""
    t = tensors(5, 100, torch.float32)
    x, weight, bias = t["x"], t["weight"], t["bias"]
    facts: dict[str, Any] = {"zero_centered": op in ZERO_CENTERED}
    own: dict[str, Any] = {"centered": op.startswith("layernorm"), "clips": (-0.5, 1.0) if options_of(op) else None}
    whole = forward_kernels.forward(x, weight, bias, eps=EPS, **facts, **own)
    parts = forward_kernels.forward(x, weight, bias, eps=EPS, **facts, **own, max_block=32)
    for name in some(whole):
        assert_close(name, parts[name].float(), whole[name].double())
    facts |= {name: whole.get(name) for name in ("mean", "rstd", "bitmask")}
    one = backward_kernels.backward(t["dy"], x, weight, bias, **facts)
    many = backward_kernels.backward(t["dy"], x, weight, bias, **facts, max_block=32)
    for name in one:
        assert_close(name, many[name], one[name].double())


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_programs_that_loop_over_rows_give_the_same(op: str, bias: bool) -> None:
    """As on a GPU, on rows that end within a tile, a group and a block."""
    t = tensors(23, 100, torch.bfloat16)
    x, weight, b = t["x"], t["weight"], t["bias"] if bias else None
    facts: dict[str, Any] = {"zero_centered": op == "layernorm_zero_centered"}
    own: dict[str, Any] = {"centered": op != "rmsnorm", "clips": (-0.5, 1.0) if options_of(op) else None}
    once = forward_kernels.forward(x, weight, b, eps=EPS, **facts, **own)
    how = Tile(rows=2, block=128, warps=1, stages=2, groups=3)
    looped = forward_kernels.forward(x, weight, b, eps=EPS, **facts, **own, how=how)
    assert once.keys() == looped.keys()
    for name in once.keys() - {"bitmask"}:
        assert_close(name, looped[name], once[name].double())
    if "bitmask" in once:
        assert (unpacked(once["bitmask"], 100) != unpacked(looped["bitmask"], 100)).double().mean() < 0.01
    facts |= {name: once.get(name) for name in ("mean", "rstd", "bitmask")}
    plain = backward_kernels.backward(t["dy"], x, weight, b, **facts)
    tiled = backward_kernels.backward(t["dy"], x, weight, b, **facts, how=how)
    assert plain.keys() == tiled.keys()
    for name in plain:
        assert_close(name, tiled[name], plain[name].double())


def test_a_chosen_tile_is_taken_on_a_gpu_only_and_has_no_more_rows_than_there_are() -> None:
    best = Tile(rows=4, block=1024, warps=2, stages=3, groups=512)
    facts: dict[str, Any] = {"elements": 2048, "max_block": 8192, "chosen": {1024: best}}
    assert tile(100, 1000, on_gpu=True, **facts) == best
    assert tile(1, 1000, on_gpu=True, **facts).rows == 1
    assert tile(100, 1000, on_gpu=False, **facts) == tile(100, 1000, on_gpu=False, elements=2048, max_block=8192)
    assert tile(100, 2000, on_gpu=True, **facts) == tile(100, 2000, on_gpu=True, elements=2048, max_block=8192)


def test_tiles_cover_and_groups_are_whole_tiles() -> None:
    for on_gpu in (False, True):
        for M, N in [(1, 1), (7, 9), (100, 1000), (10**6, 3), (3, 10**6)]:
            t = tile(M, N, on_gpu=on_gpu, elements=2048, max_block=8192)
            assert t.rows & (t.rows - 1) == t.block & (t.block - 1) == 0 and 8 <= t.block <= 8192
            assert t.block >= N or t.block == 8192
            assert group_rows(M, t.rows) % t.rows == 0 and -(-M // group_rows(M, t.rows)) <= 256
            programs, each = turns(M, t.rows, 256), -(-M // t.rows)
            assert 1 <= programs <= 256 and -(-each // programs) * t.rows >= min(M, 8)


def test_unavailable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable(DEVICE) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in str(unavailable("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in str(unavailable("cuda"))


@pytest.mark.gpu
@requires_gpu
@pytest.mark.parametrize(("M", "N"), [(4099, 768), (3, 131072), (65536, 5), (1000, 8192)])
@pytest.mark.parametrize("op", OPS)
def test_large_shapes_on_a_gpu(op: str, M: int, N: int) -> None:
    t = tensors(M, N, torch.bfloat16, fp32_weights=True)
    first, second = run(op, t), run(op, t)
    expected = expected_of(op, t, first)
    for name in first.keys() - {"bitmask"}:
        assert_close(name, first[name], expected[name])
    assert all(torch.equal(first[name], second[name]) for name in first)
