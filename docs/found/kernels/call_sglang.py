"""sglang: Triton norms of its kernels, without the import of the server.

The packages above these files are empty here; what they take from the server is whether this is AMD's, and decorators
that register a function or choose another device's.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from normcheck import Implementation

HERE = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])


def bare(name, **names):
    module = ModuleType(name)
    module.__path__ = [str(HERE.joinpath(*name.split(".")[1:]))]
    vars(module).update(names)
    sys.modules[name] = module


def same(function, *_, **__):
    return function


for path in ("", ".srt", ".kernels", ".kernels.ops", ".kernels.ops.layernorm", ".kernels.ops.diffusion",
             ".kernels.ops.diffusion.norm", ".kernels.ops.diffusion.common"):  # fmt: skip
    bare(f"sglang{path}")
bare("sglang.srt.utils", is_hip=lambda: False)
bare("sglang.srt.utils.custom_op", register_custom_op=lambda *_, **__: same)
bare("sglang.kernels.kernel_api_logging", debug_kernel_api=same)
bare("sglang.kernels.ops.diffusion.common.platform", select_impl=same, lazy_fallback=lambda *_: None)

from sglang.kernels.ops.diffusion.norm.rmsnorm_onepass_triton import triton_one_pass_rms_norm  # noqa: E402
from sglang.kernels.ops.layernorm.fused_rmsnorm import fused_rmsnorm  # noqa: E402
from sglang.kernels.ops.layernorm.rmsnorm_fp32 import rmsnorm_fp32  # noqa: E402


def norm_infer(*arguments, **options):
    from sglang.kernels.ops.diffusion.norm import norm_triton  # asks for the GPU as it is imported

    return norm_triton.norm_infer(*arguments, **options)


def infer_layernorm(x, weight, bias, *, eps):
    return norm_infer(x.detach(), weight.detach(), bias.detach(), eps)


def infer_rmsnorm(x, weight, bias, *, eps):
    return norm_infer(x.detach(), weight.detach(), None if bias is None else bias.detach(), eps, is_rms_norm=True)


def fused(x, weight, bias, *, eps):
    return fused_rmsnorm(x.detach(), weight.detach(), eps)


def one_pass(x, weight, bias, *, eps):
    return triton_one_pass_rms_norm(x.detach(), weight.detach(), eps)


def fp32(x, weight, bias, *, eps):
    return rmsnorm_fp32(x.detach(), weight.detach(), eps)


def gemma(x, weight, bias, *, eps):
    from sglang.kernels.ops.layernorm.minimax_m3_rmsnorm import gemma_rmsnorm

    return gemma_rmsnorm(x.detach(), weight.detach(), eps)


def fused_add_gemma(x, weight, bias, *, eps, residual):
    from sglang.kernels.ops.layernorm.minimax_m3_rmsnorm import gemma_fused_add_rmsnorm

    return gemma_fused_add_rmsnorm(x.detach(), residual.detach(), weight.detach(), eps)


def h3_vae(x, weight, bias, *, eps):
    from sglang.kernels.ops.diffusion.norm.h3_vae_fused_norm import h3_vae_rmsnorm

    return h3_vae_rmsnorm(x.detach(), weight.detach(), eps)


def modulated(x, weight, bias, *, eps, scale, shift):
    """With a scale and a shift of each token, which is what the kernel takes, and a weight of ones."""
    from sglang.kernels.ops.diffusion.norm.rmsnorm_scale_shift_triton import rmsnorm_scale_shift_per_token as call

    scale, shift = (t.detach()[:, None].expand(x.shape).contiguous() for t in (scale, shift))
    return call(x.detach(), torch.ones_like(x[0, 0].detach()), scale, shift, eps)


def group_norm_silu(x, weight, bias, *, eps, groups):
    from sglang.kernels.ops.diffusion.norm.group_norm_silu_triton import triton_group_norm_silu

    with torch.no_grad():
        return triton_group_norm_silu(x.detach(), weight.detach(), bias.detach(), groups, eps)


def gpu(device):
    return None if device == "cuda" else "asserts that x is on a GPU"


def short(case):
    return "takes rows of less than 64 KiB" if 65536 // (4 if case.dtype == "fp32" else 2) < case.N else None


def tile(case):
    return "takes rows of at most 4096 columns, and at least one" if case.N > 4096 or not case.M else None


RMS = {"op": "rmsnorm", "biases": (False,)}
IMPLEMENTATIONS = (
    Implementation(name="fused_rmsnorm", forward=fused, **RMS),
    Implementation(name="fused_rmsnorm_packed", forward=fused, strided=False, **RMS),
    Implementation(name="one_pass_rms_norm", forward=one_pass, unavailable=gpu, **RMS),
    Implementation(name="rmsnorm_fp32", forward=fp32, strided=False, dtypes=("bf16", "fp32"), unavailable=gpu, **RMS),
    Implementation(
        name="norm_infer", op="layernorm", biases=(True,), forward=infer_layernorm, supports=short, unavailable=gpu
    ),
    Implementation(name="norm_infer", op="rmsnorm", forward=infer_rmsnorm, supports=short, unavailable=gpu),
    Implementation(name="h3_vae_rmsnorm", forward=h3_vae, supports=tile, unavailable=gpu, **RMS),
    Implementation(name="minimax_m3", op="rmsnorm_gemma", forward=gemma, unavailable=gpu),
    Implementation(name="minimax_m3", op="fused_add_rmsnorm_gemma", forward=fused_add_gemma, unavailable=gpu),
    Implementation(
        name="scale_shift_per_token", op="rmsnorm_modulate", forward=modulated, strided=False, unavailable=gpu
    ),
    Implementation(name="group_norm_silu", op="groupnorm", forward=group_norm_silu, biases=(True,), unavailable=gpu),
)
