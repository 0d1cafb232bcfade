"""Answers of benchmarks: each function is one defect of docs/found.md, in plain torch; without that defect it fails."""

from __future__ import annotations

import torch
from exact import BF16, DEVICE, F16, F32, apart, error, gradients, layer, numbers, rms, shows

# --- TritonBench-G ---
BENCH = "TritonBench-G-603e28a"


@shows(BENCH, gpu=True)
def tritonbench_fast_layernorm_counts_lanes_that_are_no_columns() -> None:
    from fast_layernorm import Fast_Layernorm

    x, w, b = 3 + numbers(4, 100), numbers(100, seed=1), numbers(100, seed=2)
    assert error(Fast_Layernorm.apply(x, w, b, 1e-5), layer(x, w, b)) > 0.1


@shows(BENCH, gpu=True)
def tritonbench_fast_layernorm_writes_dx_over_dy() -> None:
    from fast_layernorm import Fast_Layernorm

    x, dy = numbers(4, 128, grad=True), numbers(4, 128, seed=3)
    before = dy.clone()
    Fast_Layernorm.apply(x, numbers(128, seed=1), numbers(128, seed=2), 1e-5).backward(dy)
    assert not torch.equal(dy, before)


@shows(BENCH, gpu=True)
def tritonbench_fast_rms_layernorm_writes_dx_over_dy() -> None:
    from fast_rms_layernorm import Fast_RMS_Layernorm

    x, dy = numbers(4, 128, grad=True), numbers(4, 128, seed=3)
    before = dy.clone()
    Fast_RMS_Layernorm.apply(x, numbers(128, seed=1), 1e-5).backward(dy)
    assert not torch.equal(dy, before)


@shows(BENCH)
def tritonbench_liger_counts_lanes_that_are_no_columns() -> None:
    from layer_norm_liger import LigerLayerNormFunction

    x, w, b = 3 + numbers(4, 100), numbers(100, seed=1), numbers(100, seed=2)
    assert error(LigerLayerNormFunction.apply(x, w, b, 1e-5), layer(x, w, b)) > 0.1


@shows(BENCH, gpu=True)
def tritonbench_liger_statistics_in_half() -> None:
    from layer_norm_liger import LigerLayerNormFunction

    x, w = (100 + numbers(4, 512)).half().requires_grad_(), numbers(512, dtype=F16, seed=1, grad=True)
    b, dy = numbers(512, dtype=F16, seed=2, grad=True), numbers(4, 512, dtype=F16, seed=3)
    _, dw, _ = torch.autograd.grad(LigerLayerNormFunction.apply(x, w, b, 1e-5), (x, w, b), dy)
    assert error(dw, gradients(layer, (x, w, b), dy)[1]) > 8e-3  # rounded to bf16 once or twice: 3e-3


@shows(BENCH, gpu=True)
def tritonbench_liger_rounds_fp16_gradients_to_bf16() -> None:
    from layer_norm_liger import LigerLayerNormFunction

    x, w, b = numbers(4, 128, dtype=F16, grad=True), numbers(128, dtype=F16, seed=1), numbers(128, dtype=F16, seed=2)
    dy = numbers(4, 128, dtype=F16, seed=3)
    (dx,) = torch.autograd.grad(LigerLayerNormFunction.apply(x, w, b, 1e-5), (x,), dy)
    assert torch.equal(dx.float(), dx.bfloat16().float())


@shows(BENCH, gpu=True)
def tritonbench_layer_norm_triton_writes_behind_its_output() -> None:
    from layer_norm_triton import layer_norm

    x, w, b = apart(2, 62, 1, F32), numbers(62, seed=1), numbers(62, seed=2)
    y = layer_norm(x, (62,), w, b, 1e-5)
    assert error(y[1], layer(x, w, b)[1]) > 0.1


@shows(BENCH, gpu=True)
def tritonbench_layer_norm_triton_sums_dw_in_half() -> None:
    from layer_norm_triton import layer_norm

    x, w = numbers(600, 64, dtype=F16, grad=True), numbers(64, dtype=F16, seed=1, grad=True)
    b, dy = numbers(64, dtype=F16, seed=3, grad=True), numbers(600, 64, dtype=F16, seed=2)
    (dw,) = torch.autograd.grad(layer_norm(x, (64,), w, b, 1e-5), (w,), dy)
    exact = gradients(layer, (x, w, b), dy)[1]
    assert error(dw, exact) > 1.2 * error(exact.half(), exact)  # fp32 sums: 1.0 times


@shows(BENCH)
def tritonbench_rmsnorm_fused_writes_behind_its_output() -> None:
    from rmsnorm_fused import TritonLlamaRMSNorm

    x, w = apart(2, 62, 1, F32), numbers(62, seed=1)
    assert error(TritonLlamaRMSNorm(w, 1e-5)(x)[1], rms(x, w)[1]) > 0.1


@shows(BENCH)
def tritonbench_rmsnorm_fused_llama_rounds_through_fp16() -> None:
    from rmsnorm_fused_llama import rmsnorm_forward

    x, w = numbers(4, 64), 1e5 + numbers(64, seed=1)
    assert rmsnorm_forward(x, w, 1e-5).isinf().any()
    y = rmsnorm_forward(x, numbers(64, seed=1), 1e-5)
    assert torch.equal(y, y.half().float())


@shows(BENCH, gpu=True)
def tritonbench_rms_norms_take_no_more_than_65535_rows() -> None:
    """The rows are the second axis of the grid, which has so many at most; one less is right."""
    from rmsnorm_implementation import rmsnorm_wrapper
    from rmsnorm_triton import rmsnorm_triton_wrapper

    for norm in (rmsnorm_wrapper, rmsnorm_triton_wrapper):
        x, w = numbers(1, 65535, 8, dtype=F16), numbers(8, seed=1, dtype=F16)
        assert error(norm(x, w, 1e-5)[0], rms(x[0], w)) < 0.01
        said = ""
        try:
            norm(numbers(1, 65536, 8, dtype=F16), w, 1e-5)
        except RuntimeError as refused:
            said = str(refused)
        assert "invalid argument" in said


@shows("cuda-triton-multiarch-0.1.3", gpu=True)
def multiarch_rounds_each_step_to_bf16() -> None:
    from kernels.rmsnorm import rmsnorm_triton

    x, w = numbers(64, 512, dtype=BF16), numbers(512, dtype=BF16, seed=1)
    exact = rms(x, w)
    assert error(rmsnorm_triton(x, w, 1e-5), exact) > 1.2 * error(exact.to(BF16), exact)


# --- SOL-ExecBench ---
@shows("SOL-ExecBench-8d2237d")
def sol_execbench_has_another_eps() -> None:
    from rmsnorm_kernel import rmsnorm_fwd

    x, w = 1e-3 * numbers(2, 4096), torch.ones(4096, device=DEVICE)
    y = torch.empty_like(x)
    rmsnorm_fwd(x, w, y)
    assert error(y, rms(x, w, 1e-6)) < 1e-5
    assert error(y, rms(x, w, 1e-5)) > 0.5  # the definition: "Epsilon is fixed at 1e-5"
