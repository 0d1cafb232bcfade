# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""The kernels that hold rows in shared memory: on the CPU with torch for Gluon, compiled for a GPU, or on one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.impls.kernels import interpreter

ON_GPU = torch.cuda.is_available() and not interpreter.enabled()
if not ON_GPU:
    interpreter.enable()

from normcheck.impls.kernels import backward, forward, gated, held, modulated
from normcheck.impls.kernels.holds import ROOM, UNASKED, Hold, can_hold, room_on
from normcheck.impls.kernels.launch import launch
from tests.impls import gluon_on_torch
from tests.impls.test_kernels import EPS, assert_close
from tests.inner_loop import parametrize
from tests.some import some

SMALL = Hold(warps=1, stages=2, groups=3)
"""Pieces of 256 columns of 16 bits, three programs at most, of eight rows or more each."""

HOLDS = {
    "one_stage": replace(SMALL, stages=1),
    "two_stages": SMALL,
    "three_stages_all_shared": replace(SMALL, stages=3, shared=8),
    "one_stage_mixed": replace(SMALL, stages=1, shared=1),
    "two_blocks": replace(SMALL, stages=1, blocks=2),
    "four_blocks": replace(SMALL, blocks=4, shared=8),
}
SHAPES = [(1, 256), (3, 16), (7, 592), (20, 784), (30, 512)]
KINDS: dict[str, dict[str, Any]] = {
    "layernorm": {"bias": True, "centered": True, "zero_centered": False},
    "rmsnorm": {"bias": False, "centered": False, "zero_centered": False},
    "zero_centered": {"bias": False, "centered": True, "zero_centered": True},
    "add_layernorm": {"bias": True, "centered": True, "zero_centered": False, "residual": torch.bfloat16},
    "add_rmsnorm": {"bias": False, "centered": False, "zero_centered": False, "residual": torch.float32},
}
KINDS["llama"] = {**KINDS["add_rmsnorm"], "rounds_xhat": True}
KINDS["no_weight"] = {**KINDS["add_rmsnorm"], "weight": False}
KINDS["relu_bitmask"] = {**KINDS["layernorm"], "clips": (-0.75, 1.25)}
"""``residual``: the dtype of one that is added; ``weight``: whether there is one, as there is by default."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what is written in Gluon with torch, and the other kernels as ever."""
    own = gluon_on_torch.launcher(held)

    def either(kernel: Any, *arguments: Any, **constants: Any) -> None:
        (own if kernel in (held.held_forward_kernel, held.held_gradients_kernel) else launch)(
            kernel, *arguments, **constants
        )

    for module in (forward, backward, gated, modulated):
        monkeypatch.setattr(module, "launch", either)


def outputs(
    M: int, N: int, how: Hold | None, kind: str, *, x_dtype: torch.dtype, weight_dtype: torch.dtype, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the kernels give, and the same in fp64, with NaN in the gap behind each row of what is read."""
    facts = KINDS[kind]
    generator = torch.Generator(device).manual_seed(M * 1009 + N)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def rows(dtype: torch.dtype, gap: int, offset: float = 0.0) -> Tensor:
        made = torch.full((M, N + gap), float("nan"), dtype=dtype, device=device)[:, :N]
        return made.copy_(random(M, N) + offset)

    x, dy = rows(x_dtype, 32, 0.5), rows(x_dtype, 32)
    weight = random(N).to(weight_dtype) if facts.get("weight", True) else None
    bias = random(N).to(weight_dtype) if facts["bias"] else None
    shared = {"zero_centered": facts["zero_centered"], "rounds_xhat": facts.get("rounds_xhat", False)}
    own, of_backward, summed = {"centered": facts["centered"], "how": how, **shared}, {**shared, "how": how}, x
    if "residual" in facts:
        own["residual"], of_backward["added"] = rows(facts["residual"], 16), rows(facts["residual"], 48)
        summed = (x.double() + own["residual"].double()).to(facts["residual"])
    own["clips"] = facts.get("clips")
    made = forward.forward(x, weight, bias, eps=EPS, **own)
    normed = made.get("residual_out", x)
    saved = {name: made.get(name) for name in ("mean", "rstd", "bitmask")}
    made |= backward.backward(dy, normed, weight, bias, **saved, **of_backward)  # type: ignore[arg-type]
    w64 = 1.0 if weight is None else weight.double() + facts["zero_centered"]
    x64, dy64 = summed.double(), dy.double()
    mean = x64.mean(1, keepdim=True) if facts["centered"] else torch.zeros_like(x64[:, :1])
    rstd = ((x64 - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
    xhat = (x64 - mean) * rstd
    scaled = xhat
    if shared["rounds_xhat"]:  # in fp32, as the kernels do: what lies between two numbers would be rounded to either
        scaled = (normed.float() * made["rstd"][:, None]).to(x_dtype).double()
    z = scaled * w64 + (0.0 if bias is None else bias.double())
    if facts.get("clips"):
        low, high = facts["clips"]
        bits = (made.pop("bitmask")[:, :, None] >> torch.arange(8, device=device)) & 1
        inside = (z > low) & (z < high)
        doubtful = ((z - low).abs() < 1e-4) | ((z - high).abs() < 1e-4)
        assert bool(((bits.flatten(1) != 0) == inside)[~doubtful].all()) and 0.5 < inside.double().mean() < 0.9
        z, dy64 = z.clamp(low, high), torch.where(bits.flatten(1) != 0, dy64, 0.0)
    wdy = dy64 * w64
    c2 = wdy.mean(1, keepdim=True) if facts["centered"] else 0.0
    added = of_backward["added"].double() if "residual" in facts else 0.0
    dx = (wdy - xhat * (xhat * wdy).mean(1, keepdim=True) - c2) * rstd + added
    expected = {
        "residual_out": x64,
        "y": z,
        "mean": mean.flatten(),
        "rstd": rstd.flatten(),
        "dx": dx,
        "dresidual": dx,
        "dw": (dy64 * scaled).sum(0),
        "db": dy64.sum(0),
    }
    return made, expected


HELD = [
    (how, kind, *shape)
    for first, how in enumerate(HOLDS)
    for second, kind in enumerate(KINDS)
    for third, shape in enumerate(SHAPES)
    if (first + second + third) % 5 in (0, 2)
]
"""Two of the five shapes by turns: each way has each shape, and each kind of norm."""


@parametrize(("how", "kind", "M", "N"), HELD, inner=16)
@pytest.mark.usefixtures("on_cpu")
def test_every_output_against_fp64(how: str, kind: str, M: int, N: int) -> None:
    dtypes = (torch.bfloat16, torch.float32) if "layernorm" in kind else (torch.float16, torch.float16)
    made, expected = outputs(M, N, HOLDS[how], kind, x_dtype=dtypes[0], weight_dtype=dtypes[1])
    facts = KINDS[kind]
    also = {
        "mean": facts["centered"],
        "db": facts["bias"],
        **dict.fromkeys(("residual_out", "dresidual"), "residual" in facts),
    }
    also["dw"] = facts.get("weight", True)
    assert made.keys() == {"y", "rstd", "dx", *(name for name, there in also.items() if there)}
    for name in made:
        assert_close(name, made[name], expected[name])


@pytest.mark.slow
@parametrize(("how", "S"), [(how, S) for how in HOLDS for S in (16, 37)], inner=4)
@pytest.mark.parametrize(("centered", "summed"), [(False, False), (True, True)])
@pytest.mark.usefixtures("on_cpu")
def test_rows_of_samples_have_the_weight_of_their_own(how: str, S: int, centered: bool, summed: bool) -> None:
    """And after a residual a gate of their own."""
    made: list[dict[str, Tensor]] = []
    x, dy, residual, added = torch.randn(4, 3 * S, 272).unbind(0)
    scale, shift, gate = torch.randn(3, 3, 288)[:, :, :272].unbind(1)
    of_sum = {"residual": residual, "gate": gate} if summed else {}
    of_gradients = {"source": x, "gate": gate, "added": added} if summed else {}
    for own in (HOLDS[how], None):
        y = modulated.forward(x, scale, shift, eps=EPS, centered=centered, how=own, **of_sum)
        saved = {"rstd": y["rstd"], "mean": y.get("mean"), **of_gradients}
        normed = y.get("residual_out", x)
        made.append(y | modulated.backward(dy, normed, scale, **saved, how=own))  # type: ignore[arg-type]
    for name, expected in some(made[1].items()):
        torch.testing.assert_close(made[0][name], expected, rtol=2e-5, atol=2e-5)


@parametrize(("how", "before"), [(how, before) for how in HOLDS for before in (False, True)], inner=5)
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_gated_rows_are_as_those_of_tiles(how: str, before: bool, sigmoid: bool) -> None:
    x, dy, gate = torch.randn(3, 37, 288)[:, :, :272].unbind(0)
    weight = torch.randn(272) if sigmoid else None
    own = {"before": before, "sigmoid": sigmoid}
    rstd = gated.forward(x, gate, weight, eps=EPS, **own)["rstd"]
    made = [gated.backward(dy, x, gate, weight, rstd=rstd, how=each, **own) for each in (HOLDS[how], None)]
    for name, expected in some(made[1].items()):
        torch.testing.assert_close(made[0][name], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("on_cpu")
def test_rows_of_fp32_have_half_as_many_columns_to_a_piece() -> None:
    how = HOLDS["two_stages"]
    assert how.constants(400, 4)["PIECES"] == 4 and how.constants(400, 2)["PIECES"] == 2
    made, expected = outputs(12, 400, how, "layernorm", x_dtype=torch.float32, weight_dtype=torch.float32)
    for name in made:
        assert_close(name, made[name], expected[name])


@pytest.mark.usefixtures("on_cpu")
def test_faults_in_the_order_of_copies_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above rely on. A kernel that waits for too little reads NaN, or fills a slot twice."""
    facts: dict[str, Any] = {"x_dtype": torch.bfloat16, "weight_dtype": torch.float32}
    copies = gluon_on_torch.Copies
    real = copies.wait_group
    with monkeypatch.context() as patch:
        patch.setattr(copies, "wait_group", lambda self, left: real(self, left + 1))
        with pytest.raises(AssertionError, match="two copies are under way into one slot"):
            outputs(12, 592, SMALL, "layernorm", **facts)
        patch.setattr(copies, "wait_group", lambda self, left: self.groups.clear())
        made, _ = outputs(12, 592, SMALL, "layernorm", **facts)
        assert all(made[name].isnan().any() for name in made)
    monkeypatch.setattr(gluon_on_torch.Shared, "index", lambda self, at: gluon_on_torch.Shared(self.data[0]))
    with pytest.raises(AssertionError, match="two copies are under way into one slot"):
        outputs(12, 592, SMALL, "layernorm", **facts)


@pytest.mark.parametrize("module", [forward, backward])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("weight_itemsize", [0, 2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
@parametrize("third", ["with_gate", "", "with_residual", "with_bits"], inner=1)
def test_what_is_chosen_has_room(module: Any, itemsize: int, weight_itemsize: int, with_bias: bool, third: str) -> None:
    with_gate = third == "with_gate"
    with_residual = with_gate or third == "with_residual"
    matrices = (1 if module is forward else 2 + with_gate) + with_residual
    facts = (weight_itemsize,) if module is backward else (itemsize * (1 + with_residual),)
    named = {"with_bias": with_bias, "with_residual": with_residual, **({third: True} if third else {})}
    widest = 131072 >> with_gate if module is backward else 131072 if itemsize == 2 else 65536
    for N in range(16, 140_000, 16):
        how = module.hold(N, itemsize, *facts, **(named if module is backward else {}))
        assert (how is not None) == (module.HELD_FROM <= N <= widest)
        if how is not None:
            constants = how.looped(N, itemsize)
            columns = 32 * how.warps * constants["VECTOR"]
            row = matrices * constants["PIECES"] * columns * itemsize
            assert constants["PIECES"] * columns * how.blocks >= N and how.stages >= 1
            assert how.stages * row + constants["SHARED"] * columns * weight_itemsize < ROOM
            assert how.blocks == 1 or how.stages * row != UNASKED


def test_rows_must_be_aligned() -> None:
    memory = torch.zeros(4 * 64 + 16, dtype=torch.bfloat16)
    memory = memory[(-memory.data_ptr() // 2) % 8 :]
    assert can_hold(48, memory[:256].view(4, 64)[:, :48])
    assert not can_hold(40, memory[:256].view(4, 64)[:, :40])
    assert not can_hold(48, memory[1:257].view(4, 64)[:, :48])
    assert not can_hold(48, memory[:224].view(4, 56)[:, :48])


@pytest.mark.slow
@pytest.mark.parametrize(("module", "count", "least"), [("compile_held", 20, 1), ("compile_wide", 32, 0)])
def test_triton_compiles_them_for_hopper(module: str, count: int, least: int) -> None:
    """In a process without the interpreter. It needs no GPU. None asks for more shared memory than there is."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.impls.{module}"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert len(lines) >= count and all(least <= int(shared) <= ROOM for *_, shared in lines), ran.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU, and TRITON_INTERPRET not set")
@pytest.mark.parametrize(
    ("M", "N"), [(1, 8208), (133, 12288), (1500, 16384), (700, 24016), (300, 32768), (200, 49152), (200, 65536)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_wide_rows_on_a_gpu(kind: str, M: int, N: int) -> None:
    assert room_on(torch.device("cuda", 0)), "needs a GPU with 227 KB of shared memory for a program"
    for x_dtype, weight_dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        runs = [outputs(M, N, None, kind, x_dtype=x_dtype, weight_dtype=weight_dtype, device="cuda") for _ in range(2)]
        (made, expected), (again, _) = runs
        for name in made:
            assert_close(name, made[name], expected[name])
            assert torch.equal(made[name], again[name]), name
