"""On two GPUs: each function is one kernel that is launched on the current GPU, not on that of its tensors.

Without that defect it fails. In plain torch; ``exact.on_another_gpu`` says how it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from exact import bare, error, hollow, layer, numbers, on_another_gpu, rms, shows

EPS = 1e-5
Call = Callable[[Any, Any], Any]


def launched_on_the_current_gpu(call: Call, exact: Call) -> None:
    """Assert that ``call(x, w)`` has not happened when its caller reads what it returned."""
    if torch.cuda.device_count() < 2:
        print("skip: needs two GPUs")
        return
    before, x, w = (t.to("cuda:1") for t in (numbers(64, 512, seed=1), numbers(64, 512), numbers(512, seed=2)))
    right = exact(x, w)
    assert error(on_another_gpu(lambda x: call(x, w), before, x), right) > 0.1  # a call that is done: 1e-7


def of_layer(call: Any) -> None:
    """The same of ``call(x, w, b, eps)``, a LayerNorm; b is 0."""
    launched_on_the_current_gpu(
        lambda x, w: call(x, w, torch.zeros_like(w), EPS), lambda x, w: layer(x, w, torch.zeros_like(w))
    )


def of_sum(call: Call) -> None:
    """The same of ``call(x, w)``, the RMSNorm of x + x."""
    launched_on_the_current_gpu(call, lambda x, w: rms(2 * x, w))


@shows("liger-kernel-0.8.0", gpu=True)
def liger_layernorm_launches_on_the_current_gpu() -> None:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Liger

    of_layer(Liger.apply)


@shows("liger-kernel-0.8.0", gpu=True)
def liger_fused_add_launches_on_the_current_gpu() -> None:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Liger

    of_sum(lambda x, w: Liger.apply(x, x, w, EPS, 0.0, "gemma", False)[0])


@shows("conch-triton-kernels-1.3", gpu=True)
def conch_gemma_launches_on_the_current_gpu() -> None:
    from conch.ops.normalization.gemma_rms_norm import gemma_rms_norm

    launched_on_the_current_gpu(lambda x, w: gemma_rms_norm(x, w, EPS), lambda x, w: rms(x, 1 + w))


@shows("conch-triton-kernels-1.3", gpu=True)
def conch_rmsnorm_launches_on_the_current_gpu() -> None:
    from conch.ops.normalization.rms_norm import rms_norm

    launched_on_the_current_gpu(lambda x, w: rms_norm(x, w, EPS), rms)


@shows("flashnn-0.1.1", gpu=True)
def flashnn_rmsnorm_launches_on_the_current_gpu() -> None:
    from flashnn.triton_kernels.rms_norm import triton_rmsnorm_forward

    launched_on_the_current_gpu(lambda x, w: triton_rmsnorm_forward(x, w, EPS), rms)


@shows("flashnn-0.1.1", gpu=True)
def flashnn_layernorm_launches_on_the_current_gpu() -> None:
    from flashnn.triton_kernels.layer_norm import triton_layer_norm_forward

    of_layer(triton_layer_norm_forward)


@shows("rotalabs-accel-1.1.1", gpu=True)
def rotalabs_rmsnorm_launches_on_the_current_gpu() -> None:
    from rotalabs_accel.kernels.rmsnorm import rmsnorm

    launched_on_the_current_gpu(lambda x, w: rmsnorm(x, w, EPS), rms)


@shows("omnivoice-triton-0.1.0", gpu=True)
def omnivoice_rmsnorm_launches_on_the_current_gpu() -> None:
    from omnivoice_triton.kernels.rms_norm import triton_rms_norm

    launched_on_the_current_gpu(lambda x, w: triton_rms_norm(x, w, EPS), rms)


@shows("trinix-0.1.4", gpu=True)
def trinix_layernorm_launches_on_the_current_gpu() -> None:
    from trinix.kernels import TritonLayerNormKernel

    of_layer(TritonLayerNormKernel.apply)


@shows("trinix-0.1.4", gpu=True)
def trinix_rmsnorm_launches_on_the_current_gpu() -> None:
    from trinix.kernels import TritonRMSNormKernel

    launched_on_the_current_gpu(lambda x, w: TritonRMSNormKernel.apply(x, w, EPS), rms)


@shows("triformer-3.0.7", gpu=True)
def triformer_rmsnorm_allocates_on_another_gpu() -> None:
    from triformer.rms_norm import FastRMSNorm

    if torch.cuda.device_count() < 2:
        print("skip: needs two GPUs")
        return
    x, w = numbers(4, 512).to("cuda:1"), numbers(512, seed=1).to("cuda:1")
    try:
        with torch.cuda.device(1):
            FastRMSNorm.apply(x, w, EPS)
    except ValueError as raised:  # of y, which is on cuda:0
        said = str(raised)
    else:
        said = "it can be called"
    assert "cannot be accessed from Triton" in said


@shows("torchnorm-0.1.2", gpu=True)
def torchnorm_rmsnorm_launches_on_the_current_gpu() -> None:
    from torchnorm._triton import fused_rms_norm

    launched_on_the_current_gpu(lambda x, w: fused_rms_norm(x, w, EPS), rms)


@shows("torchnorm-0.1.2", gpu=True)
def torchnorm_layernorm_launches_on_the_current_gpu() -> None:
    from torchnorm._triton import fused_layer_norm

    of_layer(fused_layer_norm)


@shows("torchnorm-0.1.2", gpu=True)
def torchnorm_fused_add_launches_on_the_current_gpu() -> None:
    from torchnorm._triton import fused_add_rms_norm

    of_sum(lambda x, w: fused_add_rms_norm(x, x, w, EPS)[0])


@shows("lmdeploy-0.18.0", gpu=True)
def lmdeploy_rmsnorm_launches_on_the_current_gpu() -> None:
    hollow("lmdeploy", "pytorch", "pytorch.kernels", "pytorch.kernels.cuda")
    from lmdeploy.pytorch.kernels.cuda.rms_norm import rms_norm

    launched_on_the_current_gpu(lambda x, w: rms_norm(x, w, EPS), rms)


@shows("dlblas-0.0.7", gpu=True)
def dlblas_rmsnorm_launches_on_the_current_gpu() -> None:
    hollow("dlblas", "kernels")
    from dlblas.kernels.rms_norm import rms_norm

    launched_on_the_current_gpu(lambda x, w: rms_norm(x, w, EPS), rms)


@shows("flashlib-0.4.0", gpu=True)
def flashlib_rmsnorm_launches_on_the_current_gpu() -> None:
    hollow("flashlib", "kernels", "kernels.norm", "kernels.norm.triton")
    from flashlib.kernels.norm.triton.norm import flash_rmsnorm

    launched_on_the_current_gpu(lambda x, w: flash_rmsnorm(x, w, EPS), rms)


@shows("flashlib-0.4.0", gpu=True)
def flashlib_layernorm_launches_on_the_current_gpu() -> None:
    hollow("flashlib", "kernels", "kernels.norm", "kernels.norm.triton")
    from flashlib.kernels.norm.triton.norm import flash_layernorm

    of_layer(flash_layernorm)


@shows("sglang-0.5.23", gpu=True)
def sglang_fused_rmsnorm_launches_on_the_current_gpu() -> None:
    hollow("sglang", "kernels", "kernels.ops", "kernels.ops.layernorm", "srt")
    bare("sglang.srt.utils", is_hip=lambda: False)
    from sglang.kernels.ops.layernorm.fused_rmsnorm import fused_rmsnorm

    launched_on_the_current_gpu(lambda x, w: fused_rmsnorm(x, w, EPS), rms)


@shows("sglang-0.5.23", gpu=True)
def sglang_h3_vae_rmsnorm_launches_on_the_current_gpu() -> None:
    hollow("sglang", "kernels", "kernels.ops", "kernels.ops.diffusion", "kernels.ops.diffusion.norm")
    from sglang.kernels.ops.diffusion.norm.h3_vae_fused_norm import h3_vae_rmsnorm

    launched_on_the_current_gpu(lambda x, w: h3_vae_rmsnorm(x, w, EPS), rms)


@shows("flashinfer-python-0.7.2.post1", gpu=True)
def flashinfer_rms_norm_launches_on_the_current_gpu() -> None:
    hollow("flashinfer", "triton")
    from flashinfer.triton.norm import rms_norm

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        rms_norm(x, w, y, EPS)
        return y

    launched_on_the_current_gpu(call, rms)


@shows("flashinfer-python-0.7.2.post1", gpu=True)
def flashinfer_rms_norm_add_residual_launches_on_the_current_gpu() -> None:
    hollow("flashinfer", "triton")
    from flashinfer.triton.norm import rms_norm_add_residual

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        rms_norm_add_residual(y, x.clone(), w, EPS)
        return y

    of_sum(call)


@shows("conch-triton-kernels-1.3", gpu=True)
def conch_fused_add_launches_on_the_current_gpu() -> None:
    from conch.ops.normalization.rms_norm import fused_add_rms_norm

    of_sum(lambda x, w: fused_add_rms_norm(x.clone(), x.clone(), w, EPS)[0])


@shows("lmdeploy-0.18.0", gpu=True)
def lmdeploy_rmsnorm_of_a_sum_launches_on_the_current_gpu() -> None:
    hollow("lmdeploy", "pytorch", "pytorch.kernels", "pytorch.kernels.cuda")
    from lmdeploy.pytorch.kernels.cuda.rms_norm import rms_norm

    of_sum(lambda x, w: rms_norm(x, w, EPS, residual=x)[0])


@shows("cuda-triton-multiarch-0.1.3", gpu=True)
def multiarch_launches_on_the_current_gpu() -> None:
    from kernels.rmsnorm import rmsnorm_triton

    launched_on_the_current_gpu(lambda x, w: rmsnorm_triton(x, w, EPS), rms)


@shows("ply-ai-1.0.5", gpu=True)
def ply_launches_on_the_current_gpu() -> None:
    from ply.rmsnorm import PlyRMSNorm

    def call(x: torch.Tensor, w: torch.Tensor) -> Any:
        norm = PlyRMSNorm(x.shape[-1], EPS)
        norm.weight = torch.nn.Parameter(w, requires_grad=False)
        return norm(x)

    launched_on_the_current_gpu(call, rms)


@shows("liger-kernel-0.8.5", gpu=True)
def liger_modulated_launches_on_the_current_gpu() -> None:
    from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction as Liger

    zeros = torch.zeros(1, 512, device="cuda")
    launched_on_the_current_gpu(
        lambda x, w: Liger.apply(x, w, zeros.to(x.device), zeros.to(x.device), EPS, 0.0, "llama", False), rms
    )


@shows("attorch-67c2772", gpu=True)
def attorch_launches_on_the_current_gpu() -> None:
    from attorch.layer_norm_layer import LayerNormAutoGrad
    from attorch.rms_norm_layer import RMSNormAutoGrad

    of_layer(lambda x, w, b, eps: LayerNormAutoGrad.apply(x, w, b, eps, False))
    launched_on_the_current_gpu(lambda x, w: RMSNormAutoGrad.apply(x, w, EPS), rms)
