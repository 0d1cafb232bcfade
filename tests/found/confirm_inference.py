"""For inference: each function is one defect of docs/found.md, in plain torch; without that defect it fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from exact import BF16, DEVICE, F16, F32, apart, bare, error, hollow, layer, numbers, rms, shows


# --- conch ---
@shows("conch-triton-kernels-1.3")
def conch_gemma_writes_between_rows() -> None:
    from conch.ops.normalization.gemma_rms_norm import gemma_rms_norm

    wide, w = numbers(4, 16), numbers(12, seed=1)
    before, x = wide.clone(), wide[:, :12]
    exact = rms(x, 1 + w)
    y = gemma_rms_norm(x, w, 1e-5)
    assert not torch.equal(wide[:, 12:], before[:, 12:])  # columns that are not in x
    assert error(y, exact) > 0.1


# --- flashnn, cuda-triton-multiarch, sglang: rows that lie apart ---
@shows("flashnn-0.1.1")
def flashnn_rmsnorm_writes_behind_its_output() -> None:
    from flashnn.triton_kernels.rms_norm import triton_rmsnorm_forward

    x, w = apart(2, 62, 1, F32), numbers(62, seed=1)
    y = triton_rmsnorm_forward(x, w, 1e-5)
    assert y.stride(0) == 62 < x.stride(0) == 63  # but it stores with the stride of x
    assert error(y[1], rms(x, w)[1]) > 0.1


@shows("flashnn-0.1.1", gpu=True)
def flashnn_layernorm_writes_behind_its_output() -> None:
    from flashnn.triton_kernels.layer_norm import triton_layer_norm_forward

    x, w, b = apart(2, 62, 1, F32), numbers(62, seed=1), numbers(62, seed=2)
    y = triton_layer_norm_forward(x, w, b, 1e-5)
    assert error(y[1], layer(x, w, b)[1]) > 0.1


@shows("cuda-triton-multiarch-0.1.3")
def multiarch_writes_behind_its_output() -> None:
    from kernels.rmsnorm import rmsnorm_triton

    x, w = apart(2, 62, 1, F32), numbers(62, seed=1)
    y = rmsnorm_triton(x, w, 1e-5)
    assert error(y[1], rms(x, w)[1]) > 0.1


@shows("cuda-triton-multiarch-0.1.3")
def multiarch_squares_in_half() -> None:
    from kernels.rmsnorm import rmsnorm_triton

    x, w = torch.full((1, 16), 300.0, dtype=F16, device=DEVICE), torch.ones(16, dtype=F16, device=DEVICE)
    y = rmsnorm_triton(x, w, 1e-5)  # 300 * 300 is more than fp16 holds
    assert error(y, rms(x, w)) > 0.9  # 0, for 1


@shows("sglang-0.5.23")
def sglang_fused_rmsnorm_reads_other_rows() -> None:
    import importlib.util

    bare("sglang.srt.utils", is_hip=lambda: False)
    for name in ("sglang", "sglang.srt"):
        sys.modules.setdefault(name, SimpleNamespace(__path__=[]))  # type: ignore[arg-type]
    path = next(p for p in sys.path if p.endswith("sglang-0.5.23"))
    spec = importlib.util.spec_from_file_location("f", f"{path}/sglang/kernels/ops/layernorm/fused_rmsnorm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, w = apart(2, 62, 1, F32), numbers(62, seed=1)
    y = module.fused_rmsnorm(x, w, 1e-5)
    assert error(y[0], rms(x, w)[0]) < 1e-6
    assert error(y[1], rms(x, w)[1]) > 0.1


# --- ply-ai, lmdeploy, chronicals ---
@shows("ply-ai-1.0.5")
def ply_rounds_through_fp16() -> None:
    from ply.rmsnorm import PlyRMSNorm

    norm, x = PlyRMSNorm(64).to(DEVICE), numbers(4, 64)
    with torch.no_grad():
        y = norm(x)
    assert y.dtype == F32
    assert torch.equal(y, y.half().float())  # fp32 in which every value is one of fp16
    norm.weight.data.fill_(1e5)
    assert norm(x).isinf().any()


def _far_apart() -> torch.Tensor:
    """Rows of 64 elements, of which the last begins at element 2^31."""
    x = torch.zeros(65537, 32768, device=DEVICE, dtype=F16)[:, :64]
    x[-1] = numbers(64, dtype=F16)
    return x


def _takes_other_rows(call: Any, w: torch.Tensor) -> None:
    """``call(x)`` is wrong in the last row, or reads where no memory is."""
    x, said = _far_apart(), ""
    try:
        wrong = error(call(x)[-1], rms(x[-1:], w)[0])
    except RuntimeError as raised:
        said, wrong = str(raised), 0.0
    assert wrong > 0.1 or "illegal memory access" in said


@shows("ply-ai-1.0.5", gpu=True)
def ply_counts_elements_in_32_bits() -> None:
    from ply.rmsnorm import PlyRMSNorm

    norm = PlyRMSNorm(64, 1e-5).to(DEVICE, F16)
    with torch.no_grad():
        _takes_other_rows(norm, norm.weight)


@shows("lmdeploy-0.18.0", gpu=True)
def lmdeploy_counts_elements_in_32_bits() -> None:
    hollow("lmdeploy", "pytorch", "pytorch.kernels", "pytorch.kernels.cuda")
    from lmdeploy.pytorch.kernels.cuda.rms_norm import rms_norm

    w = numbers(64, dtype=F16, seed=1)
    _takes_other_rows(lambda x: rms_norm(x, w, 1e-5), w)


@shows("chronicals-0.1.4")
def chronicals_cannot_be_called() -> None:
    from chronicals.kernels.triton_kernels import LigerRMSNormFunction

    try:
        LigerRMSNormFunction.apply(numbers(4, 128), numbers(128, seed=1), 1e-5)
    except Exception as raised:
        said = str(raised)
    else:
        said = "it can be called"
    assert "BLOCK_SIZE" in said


# --- dlblas: rows that lie apart ---
def _dlblas_writes_behind(call: Any) -> None:
    """``call(x, w, residual)`` stores the sum with the row stride of the residual, which its memory does not have."""
    x, residual, w = numbers(2, 62), apart(2, 62, 1, F32), numbers(62, seed=2)
    _, added = call(x, w, residual)
    assert added.stride(0) == 62 < residual.stride(0) == 63
    assert error(added[1], x.double()[1] + residual.double()[1]) > 0.1


@shows("dlblas-0.0.7")
def dlblas_rmsnorm_writes_behind_its_sum() -> None:
    hollow("dlblas", "kernels")
    from dlblas.kernels.rms_norm import rms_norm

    _dlblas_writes_behind(lambda x, w, residual: rms_norm(x, w, 1e-5, residual=residual))


@shows("dlblas-0.0.7")
def dlblas_add_rmsnorm_writes_behind_its_output() -> None:
    hollow("dlblas", "kernels")
    bare("dlblas.utils", SymVar=lambda *_: None, Tensor=lambda *_, **__: None, register_dlblas_op=lambda *_: None)
    from dlblas.kernels.add_rms_norm import call

    x, w = apart(2, 62, 1, F32), numbers(62, seed=1)
    y = call(x, w, 1e-5)
    assert y.stride(0) == 62 < x.stride(0) == 63  # but it stores with the stride of x
    assert error(y[1], rms(x, w)[1]) > 0.1


@shows("dlblas-0.0.7", gpu=True)
def dlblas_layernorm_opt_reads_other_rows() -> None:
    hollow("dlblas", "kernels", "kernels.layer_norm")
    bare("dlblas.utils")
    bare("dlblas.utils.device_utils", infer_device=lambda: "cuda")
    from dlblas.kernels.layer_norm.layernorm_opt import call

    x, w, b = apart(2, 62, 1, BF16), numbers(62, dtype=BF16, seed=1), numbers(62, dtype=BF16, seed=2)
    y = call(x, w, b, 1e-5)  # the rows begin 62 apart for it
    assert error(y[0], layer(x, w, b)[0]) < 0.1 < error(y[1], layer(x, w, b)[1])
