"""For training: each function is one defect of docs/found.md, in plain torch; without that defect it fails."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from exact import BF16, DEVICE, F16, F32, bare, error, gradients, layer, numbers, rms, shows


# --- Liger-Kernel ---
@shows("liger-kernel-0.8.0", gpu=True)
def liger_layernorm_statistics_in_half() -> None:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Liger

    x, w = (30 + numbers(4, 512)).half().requires_grad_(), numbers(512, dtype=F16, seed=1, grad=True)
    b = numbers(512, dtype=F16, seed=2, grad=True)
    dy = numbers(4, 512, dtype=F16, seed=3)
    dx, dw, _ = torch.autograd.grad(Liger.apply(x, w, b, 1e-5), (x, w, b), dy)
    exact = gradients(layer, (x, w, b), dy)
    assert error(dw, exact[1]) > 2e-3  # fp32 statistics: 3e-4
    x = torch.full((1, 4), 3.0, device=DEVICE, dtype=F16).requires_grad_()
    w, b = (torch.ones(4, device=DEVICE, dtype=F16, requires_grad=True) for _ in "wb")
    (dx,) = torch.autograd.grad(Liger.apply(x, w, b, 1e-12), (x,), torch.ones_like(x))
    assert dx.isnan().any()  # the exact gradient is 0; rstd is 1e6, which fp16 does not hold


@shows("liger-kernel-0.8.0")
def liger_rmsnorm_wants_a_module_that_nobody_imported() -> None:
    import torch as plain
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger

    if hasattr(plain.distributed, "tensor"):
        print("skip: this torch imports torch.distributed.tensor by itself")
        return
    try:
        Liger.apply(numbers(2, 8), numbers(8), 1e-5, 0.0, "llama", False)
    except AttributeError as raised:
        said = str(raised)
    else:
        said = "it can be called"
    assert "no attribute 'tensor'" in said


# --- flash-linear-attention ---
def _fla_dresidual(rms_norm: Any) -> None:
    x, w = numbers(4, 1024, dtype=F16, grad=True), numbers(1024, dtype=F16, seed=1, grad=True)
    residual = numbers(4, 1024, seed=2, grad=True)
    y, out = rms_norm(x, w, None, residual=residual, eps=1e-5, prenorm=True)
    dy, dout = numbers(4, 1024, dtype=F16, seed=3), numbers(4, 1024, seed=4)
    (dresidual,) = torch.autograd.grad((y, out), (residual,), (dy, dout))
    exact = gradients(lambda a, b, c: (rms(a + c, b), a + c), (x, w, residual), dy, dout)[2]
    assert (out.dtype, dresidual.dtype) == (F32, F32)
    assert torch.equal(dresidual, dresidual.half().float())  # fp32 in which every value is one of fp16
    assert error(dresidual, exact) > 1e-4  # fp32: 1e-7


@shows("fla-core-0.6.0", gpu=True)
def fla_rounds_the_gradient_of_an_fp32_residual() -> None:
    from fla.modules.norm.layernorm import rms_norm

    _fla_dresidual(rms_norm)


@shows("rwkv-fla-0.7.202508221413", gpu=True)
def rwkv_fla_rounds_the_gradient_of_an_fp32_residual() -> None:
    from fla.modules.layernorm import rms_norm

    _fla_dresidual(rms_norm)


# --- flash-attention ---
@shows("flash-attn-2.8.3.post2")
def flash_attn_returns_x_for_the_sum() -> None:
    import triton

    if DEVICE == "cpu":
        # It asks for the GPU as it is imported, to tune its kernels, and enters that of x.
        triton.autotune = lambda *_, **__: lambda kernel: kernel
        torch.cuda.device = lambda _: nullcontext()
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(warp_size=32, max_threads_per_block=1024)
    bare("flash_attn")
    folder = next(p for p in sys.path if "flash-attn-2" in p)
    sys.modules["flash_attn"].__path__ = [f"{folder}/flash_attn"]
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    x, r, w, into = numbers(4, 320), numbers(4, 320, seed=1), numbers(320, seed=2), torch.zeros(4, 320, device=DEVICE)
    y, out = rms_norm_fn(x, w, None, residual=r, eps=1e-5, prenorm=True, residual_out=into)
    assert error(y, rms(x + r, w)) < 1e-6
    assert torch.equal(out, x)
    assert not into.any()
    _, right = rms_norm_fn(x, w, None, residual=r, eps=1e-5, prenorm=True)
    assert error(right, x.double() + r.double()) < 1e-6


# --- FlagGems ---
def _gems() -> Any:
    import os
    import tempfile

    os.environ["HOME"] = tempfile.gettempdir()
    import flag_gems

    return flag_gems


@shows("flag-gems-5.0.2", gpu=True)
def flag_gems_layernorm_statistics_in_half() -> None:
    gems = _gems()
    x, w, b = (30 + numbers(64, 512)).to(BF16), numbers(512, dtype=BF16, seed=1), numbers(512, dtype=BF16, seed=2)
    _, mean, rstd = gems.layer_norm(x, (512,), w, b, 1e-5)
    assert mean.dtype == rstd.dtype == BF16  # beside a comment that says single precision
    dy = numbers(64, 512, dtype=BF16, seed=3)
    _, dw, _ = gems.layer_norm_backward(dy, x, (512,), mean, rstd, w, b, [True, True, True])
    assert error(dw, gradients(layer, (x, w, b), dy)[1]) > 0.01  # fp32 statistics: 2e-3


@shows("flag-gems-5.0.2", gpu=True)
def flag_gems_layernorm_backward_takes_three_dimensions_for_two() -> None:
    gems = _gems()
    x, w, b, dy = numbers(4, 6, 64), numbers(64, seed=1), numbers(64, seed=2), numbers(4, 6, 64, seed=3)
    _, mean, rstd = gems.layer_norm(x, (64,), w, b, 1e-5)
    dx = gems.layer_norm_backward(dy, x, (64,), mean, rstd, w, b, [True, False, False])[0]
    assert error(dx, gradients(layer, (x, w, b), dy)[0]) > 0.01


# --- trinix ---
def _trinix(name: str) -> Any:
    import trinix.kernels

    return getattr(trinix.kernels, name).apply


@shows("trinix-0.1.4")
def trinix_rmsnorm_sums_dw_in_half() -> None:
    x, w = numbers(600, 64, dtype=F16, grad=True), numbers(64, dtype=F16, seed=1, grad=True)
    dy = numbers(600, 64, dtype=F16, seed=2)
    y = _trinix("TritonRMSNormKernel")(x, w, 1e-5)
    (dw,) = torch.autograd.grad(y, (w,), dy)
    exact = gradients(rms, (x, w), dy)[1]
    assert error(dw, exact) > 1.2 * error(exact.half(), exact)  # fp32 sums: 1.0 times


@shows("trinix-0.1.4")
def trinix_layernorm_sums_dw_in_half() -> None:
    x, w = numbers(600, 64, dtype=F16, grad=True), numbers(64, dtype=F16, seed=1, grad=True)
    b, dy = numbers(64, dtype=F16, seed=3, grad=True), numbers(600, 64, dtype=F16, seed=2)
    y = _trinix("TritonLayerNormKernel")(x, w, b, 1e-5)
    (dw,) = torch.autograd.grad(y, (w,), dy)
    exact = gradients(layer, (x, w, b), dy)[1]
    assert error(dw, exact) > 1.2 * error(exact.half(), exact)  # fp32 sums: 1.0 times


@shows("trinix-0.1.4")
def trinix_rmsnorm_ends_at_a_block() -> None:
    x, w = numbers(2, 20000), numbers(20000, seed=1)
    y = _trinix("TritonRMSNormKernel")(x, w, 1e-5)
    assert error(y[:, :8192], rms(x, w)[:, :8192]) > 0.1  # its mean leaves the rest out
    assert error(y[:, 16384:], rms(x, w)[:, 16384:]) > 0.1  # and its stores


@shows("trinix-0.1.4")
def trinix_layernorm_ends_at_a_block() -> None:
    x, w, b = numbers(2, 20000), numbers(20000, seed=1), numbers(20000, seed=2)
    y = _trinix("TritonLayerNormKernel")(x, w, b, 1e-5)
    assert error(y[:, 16384:], layer(x, w, b)[:, 16384:]) > 0.1


# --- torchnorm ---
@shows("torchnorm-0.1.2")
def torchnorm_stores_the_sum_through_bf16() -> None:
    from torchnorm._triton import fused_add_rms_norm

    x, r, w = numbers(4, 64), numbers(4, 64, seed=1), numbers(64, seed=2)
    _, out = fused_add_rms_norm(x, r, w, 1e-5)
    assert out.dtype == F32
    assert torch.equal(out, out.bfloat16().float())  # fp32 in which every value is one of bf16
    assert error(out, x.double() + r.double()) > 1e-3


@shows("torchnorm-0.1.2")
def torchnorm_drops_the_gradient_of_the_sum() -> None:
    from torchnorm._triton import fused_add_rms_norm

    x, r, w = numbers(4, 64, grad=True), numbers(4, 64, seed=1, grad=True), numbers(64, seed=2, grad=True)
    dout = numbers(4, 64, seed=3)
    (dx,) = torch.autograd.grad(fused_add_rms_norm(x, r, w, 1e-5)[1], (x,), dout)  # y is not used: dx is dout
    assert not dx.any()


# --- triformer ---
@shows("triformer-3.0.7", gpu=True)
def triformer_layernorm_counts_lanes_that_are_no_columns() -> None:
    from triformer.layernorm import Fast_Layernorm

    x, w, b = 3 + numbers(4, 100), numbers(100, seed=1), numbers(100, seed=2)
    assert error(Fast_Layernorm.apply(x, w, b, 1e-5), layer(x, w, b)) > 0.1  # 28 lanes of -mean
    x, w, b = 3 + numbers(4, 128), numbers(128, seed=1), numbers(128, seed=2)
    assert error(Fast_Layernorm.apply(x, w, b, 1e-5), layer(x, w, b)) < 1e-5


@shows("triformer-3.0.7", gpu=True)
def triformer_layernorm_writes_dx_over_dy() -> None:
    from triformer.layernorm import Fast_Layernorm

    x, w, b = numbers(4, 128, grad=True), numbers(128, seed=1), numbers(128, seed=2)
    dy = numbers(4, 128, seed=3)
    before = dy.clone()
    Fast_Layernorm.apply(x, w, b, 1e-5).backward(dy)
    assert not torch.equal(dy, before)


@shows("triformer-3.0.7", gpu=True)
def triformer_layernorm_has_no_gradient_of_its_weights() -> None:
    from triformer.layernorm import TritonLayerNorm

    norm = TritonLayerNorm(128).to(DEVICE)
    norm(numbers(4, 128)).square().sum().backward()
    assert norm.weight.requires_grad
    assert norm.weight.grad is None


@shows("triformer-3.0.7", gpu=True)
def triformer_rmsnorm_takes_the_gradient_of_a_sum_for_rows() -> None:
    from triformer.rms_norm import FastRMSNorm

    x, w = numbers(4, 128, grad=True), numbers(128, seed=1)
    (dx,) = torch.autograd.grad(FastRMSNorm.apply(x, w, 1e-5).sum(), (x,))
    ones = torch.ones(4, 128, device=DEVICE)
    (right,) = torch.autograd.grad(FastRMSNorm.apply(x, w, 1e-5), (x,), ones)
    exact = gradients(rms, (x, w), ones)[0]
    assert error(right, exact) < 1e-5
    assert error(dx, exact) > 0.1


@shows("triformer-3.0.7", gpu=True)
def triformer_rmsnorm_has_no_gradient_of_its_weight() -> None:
    from triformer.rms_norm import TritonRMSNorm

    norm = TritonRMSNorm(128).to(DEVICE)
    norm(numbers(4, 128)).square().sum().backward()
    assert norm.scale.requires_grad
    assert norm.scale.grad is None


# --- unsloth ---
def _unsloth(file: str) -> Any:
    from importlib import import_module

    import triton

    def settings(n: int) -> tuple[int, int]:
        return triton.next_power_of_2(n), 4

    path = next(p for p in sys.path if "unsloth-2025" in p)
    bare("unsloth")
    bare("unsloth.kernels")
    bare("unsloth.kernels.utils", calculate_settings=settings, torch_gpu_device=lambda _: nullcontext())
    bare("unsloth_zoo")
    bare("unsloth_zoo.patching_utils", patch_layernorm=None)
    sys.modules["unsloth.kernels"].__path__ = [f"{path}/unsloth/kernels"]
    return import_module(f"unsloth.kernels.{file}")


@shows("unsloth-2025.9.1")
def unsloth_rmsnorm_writes_dx_over_dy() -> None:
    fast = _unsloth("rms_layernorm").fast_rms_layernorm
    x, dy = numbers(4, 128, grad=True), numbers(4, 128, seed=3)
    before = dy.clone()
    fast(SimpleNamespace(weight=numbers(128, seed=1), eps=1e-5), x).backward(dy)
    assert not torch.equal(dy, before)


@shows("unsloth-2025.9.1")
def unsloth_layernorm_writes_dx_over_dy() -> None:
    fast = _unsloth("layernorm").fast_layernorm
    x, dy = numbers(4, 128, grad=True), numbers(4, 128, seed=3)
    weights = SimpleNamespace(weight=numbers(128, seed=1), bias=numbers(128, seed=2), eps=1e-5, elementwise_affine=True)
    before = dy.clone()
    fast(weights, x).backward(dy)
    assert not torch.equal(dy, before)


@shows("unsloth-2025.9.1", gpu=True)
def unsloth_rmsnorm_writes_behind_the_gradient_of_a_sum() -> None:
    fast = _unsloth("rms_layernorm").fast_rms_layernorm
    x, w = numbers(4, 128, grad=True), numbers(128, seed=1)
    (dx,) = torch.autograd.grad(fast(SimpleNamespace(weight=w, eps=1e-5), x).sum(), (x,))
    exact = gradients(rms, (x, w), torch.ones(4, 128, device=DEVICE))[0]
    assert error(dx, exact) > 0.1


@shows("unsloth-2025.9.1", gpu=True)
def unsloth_layernorm_writes_behind_the_gradient_of_a_sum() -> None:
    fast = _unsloth("layernorm").fast_layernorm
    x, w, b = numbers(4, 128, grad=True), numbers(128, seed=1), numbers(128, seed=2)
    weights = SimpleNamespace(weight=w, bias=b, eps=1e-5, elementwise_affine=True)
    (dx,) = torch.autograd.grad(fast(weights, x).sum(), (x,))
    exact = gradients(layer, (x, w, b), torch.ones(4, 128, device=DEVICE))[0]
    assert error(dx, exact) > 0.1


@shows("unsloth-2025.9.1", gpu=True)
def unsloth_gemma_reads_behind_the_gradient_of_a_sum() -> None:
    fast = _unsloth("rms_layernorm").fast_rms_layernorm
    x, w = numbers(4, 128, grad=True), numbers(128, seed=1)
    (dx,) = torch.autograd.grad(fast(SimpleNamespace(weight=w, eps=1e-5), x, gemma=True).sum(), (x,))
    exact = gradients(lambda a, b: rms(a, 1 + b), (x, w), torch.ones(4, 128, device=DEVICE))[0]
    assert error(dx, exact) > 0.1


@shows("unsloth-2025.9.1")
def unsloth_rmsnorm_has_no_gradient_of_its_weight() -> None:
    fast = _unsloth("rms_layernorm").fast_rms_layernorm
    w = numbers(128, seed=1, grad=True)
    fast(SimpleNamespace(weight=w, eps=1e-5), numbers(4, 128, grad=True)).backward(numbers(4, 128, seed=3))
    assert w.grad is None


# --- quack: CuTe DSL ---
def _quack() -> Any:
    import nvidia_cutlass_dsl

    sys.path.insert(0, str(Path(nvidia_cutlass_dsl.__path__[0], "dsl_packages")))  # what its .pth file does
    from quack.rmsnorm import rmsnorm

    return rmsnorm


@shows("quack-kernels-0.6.5", gpu=True)
def quack_loses_the_gradient_of_the_x_that_it_returns() -> None:
    x, w = numbers(4, 256, grad=True), numbers(256, seed=1)
    _, same = _quack()(x, w, prenorm=True)
    assert torch.equal(same, x)
    (dx,) = torch.autograd.grad(same.sum(), (x,))
    assert not dx.any()  # for 1


@shows("quack-kernels-0.6.5", gpu=True)
def quack_needs_more_gradients_than_that_of_the_residual() -> None:
    x, w, residual = numbers(4, 256), numbers(256, seed=1), numbers(4, 256, seed=2, grad=True)
    y, added = _quack()(x, w, residual=residual, prenorm=True)
    try:
        (y.sum() + added.sum()).backward()  # x and w are frozen
    except TypeError as raised:
        said = str(raised)
    else:
        said = "it has one"
    assert "Mismatched type" in said


@shows("quack-kernels-0.6.5", gpu=True)
def quack_compiles_for_no_odd_number_of_columns_in_half_precision() -> None:
    rmsnorm = _quack()
    rmsnorm(numbers(4, 129), numbers(129, seed=1))  # in fp32 it does
    try:
        rmsnorm(numbers(4, 129, dtype=BF16), numbers(129, dtype=BF16, seed=1))
    except Exception as raised:
        said = str(raised)
    else:
        said = "it compiles"
    assert "IR" in said
