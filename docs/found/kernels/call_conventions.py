"""Norms of models as libraries publish them, those that are installed: no convention is declared.

Of sglang the packages above its kernels are empty here, as in ``call_sglang.py``: what they take from the server is
which device this is, and decorators that register a function or choose another device's.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch.func import functional_call
from torch.nn.functional import silu

from normcheck import Implementation, UnsupportedCase

IMPLEMENTATIONS = []


def add(name, op, forward, **fields):
    IMPLEMENTATIONS.append(Implementation(name=name, op=op, forward=forward, **fields))


def gpu(device):
    return None if device == "cuda" else "asserts that x is on a GPU"


def heads_of(x, q_heads, k_heads, size):
    """q, k and v, (T, H, D) each, of x (T, N)."""
    heads = x.unflatten(1, (-1, size))
    return heads[:, :q_heads], heads[:, q_heads : q_heads + k_heads], heads[:, q_heads + k_heads :]


def joined(*parts):
    return torch.cat(parts, 1).flatten(1)


# --- torch, on a GPU: on a CPU its statistics have the dtype of x.


def group_norm(x, weight, bias, *, eps, groups):
    return torch.nn.functional.group_norm(x, groups, weight, bias, eps)


def group_norm_silu(x, weight, bias, *, eps, groups):
    return silu(group_norm(x, weight, bias, eps=eps, groups=groups))


ON_GPU = {"unavailable": gpu, "weight_dtypes": ("io",)}
add("torch_native", "groupnorm", group_norm, **ON_GPU)
add("torch_native_silu", "groupnorm", group_norm_silu, **ON_GPU)

if find_spec("timm"):

    def timm_silu(x, weight, bias, *, eps, groups):
        from timm.layers import GroupNormAct

        module = GroupNormAct(len(weight), groups, eps=eps, act_layer=torch.nn.SiLU)
        return functional_call(module, {"weight": weight, "bias": bias}, (x,))

    add("timm_silu", "groupnorm", timm_silu, biases=(True,), **ON_GPU)

if find_spec("liger_kernel"):

    def liger_rope(x, weight, bias, *, eps, q_heads, k_heads, q_weight, k_weight, cos, sin):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction

        size, angles = len(q_weight), [torch.cat((t, t), -1)[None] for t in (cos, sin)]
        q, k, v = heads_of(x, q_heads, k_heads, size)
        normed = [LigerRMSNormFunction.apply(t, w, eps, 0.0, "llama", False) for t, w in ((q, q_weight), (k, k_weight))]
        q, k = LigerRopeFunction.apply(*(t[None].transpose(1, 2) for t in normed), *angles)
        return joined(q.transpose(1, 2)[0], k.transpose(1, 2)[0], v)

    add("liger", "qk_norm_rope", liger_rope, weight_dtypes=("io",))

if find_spec("fla"):

    def fla_rope(interleaved):
        def forward(x, weight, bias, *, eps, q_heads, k_heads, q_weight, k_weight, cos, sin):
            from fla.modules.norm.layernorm import rms_norm
            from fla.modules.rotary import rotary_embedding

            *both, v = heads_of(x, q_heads, k_heads, len(q_weight))
            normed = [
                rms_norm(t.contiguous(), w, None, eps=eps) for t, w in zip(both, (q_weight, k_weight), strict=True)
            ]
            return joined(*(rotary_embedding(t[None], cos, sin, interleaved=interleaved)[0] for t in normed), v)

        return forward

    add("fla_neox", "qk_norm_rope", fla_rope(False))
    add("fla_interleaved", "qk_norm_rope", fla_rope(True))


# --- Eager code of models.


def projected(module, x, scale, shift):
    """What ``module`` makes of x when its projection of the time is shift, scale, and zeros."""
    module.silu = module.linear = torch.nn.Identity()
    return module(x, emb=torch.cat((shift, scale, torch.zeros_like(scale).repeat(1, 4)), 1))[0]


if find_spec("diffusers"):

    def adaln_zero(x, weight, bias, *, eps, scale, shift):
        from diffusers.models.normalization import AdaLayerNormZero

        module = AdaLayerNormZero(1)
        module.norm = torch.nn.LayerNorm(x.shape[-1], elementwise_affine=False, eps=eps)
        return projected(module, x, scale, shift)

    add("diffusers", "layernorm_modulate", adaln_zero, **ON_GPU)

    def flux(x, weight, bias, *, eps, q_heads, k_heads, q_weight, k_weight, cos, sin):
        from diffusers.models.embeddings import apply_rotary_emb

        *both, v = heads_of(x, q_heads, k_heads, len(q_weight))
        angles, size = [t.repeat_interleave(2, -1) for t in (cos, sin)], 2 * cos.shape[1]
        found = []
        for t, w in zip(both, (q_weight, k_weight), strict=True):
            n = functional_call(torch.nn.RMSNorm(len(w), eps=eps, device=x.device), {"weight": w}, (t[None],))
            found += [torch.cat((apply_rotary_emb(n[..., :size], angles, sequence_dim=1), n[..., size:]), -1)[0]]
        return joined(*found, v)

    add("diffusers_flux", "qk_norm_rope", flux, weight_dtypes=("io",))

if find_spec("transformers"):

    def omni(x, weight, bias, *, eps, scale, shift):
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5_OmniAdaLayerNormZero

        module = Qwen2_5_OmniAdaLayerNormZero(1)
        module.norm = torch.nn.LayerNorm(x.shape[-1], elementwise_affine=False, eps=eps)
        return projected(module, x, scale, shift)

    add("transformers_omni", "layernorm_modulate", omni, **ON_GPU)

    def qwen3(x, weight, bias, *, eps, q_heads, k_heads, q_weight, k_weight, cos, sin):
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

        size = 2 * cos.shape[1]
        if size != len(q_weight):
            raise UnsupportedCase("rotates all of a head")
        q, k, v = heads_of(x, q_heads, k_heads, size)
        normed = (
            functional_call(Qwen3RMSNorm(size, eps), {"weight": w}, (t[None],)).transpose(1, 2)
            for t, w in ((q, q_weight), (k, k_weight))
        )
        q, k = apply_rotary_pos_emb(*normed, *(torch.cat((t, t), -1)[None] for t in (cos, sin)))
        return joined(q.transpose(1, 2)[0], k.transpose(1, 2)[0], v)

    add("transformers_qwen3", "qk_norm_rope", qwen3, weight_dtypes=("io",))


# --- sglang's Triton kernels, which have no backward.


def bare(name, **names):
    module = ModuleType(name)
    module.__path__ = [str(HERE.joinpath(*name.split(".")[1:]))]
    vars(module).update(names)
    sys.modules[name] = module


def same(function, *_, **__):
    return function


if SPEC := find_spec("sglang"):
    HERE = Path(next(iter(SPEC.submodule_search_locations)))
    for path in ("", ".srt", ".kernels", ".kernels.ops", ".kernels.ops.attention", ".kernels.ops.diffusion",
                 ".kernels.ops.diffusion.norm", ".kernels.ops.diffusion.modulate",
                 ".kernels.ops.diffusion.common"):  # fmt: skip
        bare(f"sglang{path}")
    bare("sglang.srt.utils", is_gfx1250_supported=lambda: False)
    bare("sglang.srt.utils.custom_op", register_custom_op=lambda *_, **__: same)
    no, yes = (lambda *_: False), (lambda *_: True)
    chosen = {"select_impl": same, "lazy_fallback": no, "is_cuda": yes, "is_hip": no, "is_xpu": no}
    bare("sglang.kernels.ops.diffusion.common.platform", **chosen)

    def sglang_silu(x, weight, bias, *, eps, groups):
        from sglang.kernels.ops.diffusion.norm.group_norm_silu_triton import triton_group_norm_silu

        with torch.no_grad():
            return triton_group_norm_silu(x.detach(), weight.detach(), bias.detach(), groups, eps)

    def sglang_rows(x, weight, bias, *, eps, groups):
        from sglang.kernels.ops.diffusion.norm import group_norm_silu_twopass_triton as module

        with torch.no_grad():
            own = x.detach().transpose(1, 2).contiguous(), weight.detach(), bias.detach(), groups
            if not module.can_use_group_norm_silu_rows(*own):
                raise UnsupportedCase("takes a power of 2 of channels, 2048 at most, and some rows")
            return module.group_norm_silu_rows(*own, eps).transpose(1, 2)

    own = {"unavailable": gpu, "biases": (True,), "weight_dtypes": ("io",)}
    add("sglang_silu", "groupnorm", sglang_silu, **own)
    add("sglang_silu_rows", "groupnorm", sglang_rows, **own)

    def select01(x, scale, shift, eps, *of_sum):
        """One of its two kernels: each token chooses the first of two modulations, and nothing is made of the gate."""
        from sglang.kernels.ops.diffusion.modulate import scale_shift_triton as module

        kernel = module.fuse_layernorm_scale_shift_gate_select01_kernel
        if of_sum:
            kernel = module.fuse_residual_layernorm_scale_shift_gate_select01_kernel
        if not x.numel():
            raise UnsupportedCase("launches no empty grid")
        one = [t.detach().contiguous() for t in (scale, shift, scale)]
        tokens = torch.zeros(x.shape[:2], dtype=torch.int32, device=x.device)
        return kernel(x.detach().contiguous(), *of_sum, None, None, *one, *one, tokens, eps)

    def select01_plain(x, weight, bias, *, eps, scale, shift):
        return select01(x, scale, shift, eps)[0]

    def select01_added(x, weight, bias, *, eps, residual, residual_gate, scale, shift):
        gate = residual_gate.detach()[:, None].expand(x.shape).contiguous()
        y, stored, _gate = select01(x, scale, shift, eps, residual.detach().contiguous(), gate)
        return {"y": y, "residual_out": stored}

    def per_token(x, weight, bias, *, eps, scale, shift):
        from sglang.kernels.ops.diffusion.norm.rmsnorm_scale_shift_triton import rmsnorm_scale_shift_per_token

        if not x.numel():
            raise UnsupportedCase("launches no empty grid")
        both = (t.detach()[:, None].expand(x.shape) for t in (scale, shift))
        return rmsnorm_scale_shift_per_token(x.detach().contiguous(), torch.ones_like(x[0, 0]), *both, eps)

    def short(case):
        return "takes rows of less than 64 KiB" if 65536 // (4 if case.dtype == "fp32" else 2) < case.N else None

    add("sglang_select01", "layernorm_modulate", select01_plain, unavailable=gpu, supports=short)
    add("sglang_select01", "fused_add_layernorm_modulate", select01_added, unavailable=gpu, supports=short)
    add("sglang_per_token", "rmsnorm_modulate", per_token)

    def one_frame(x, weight, bias, *, eps, residual, residual_gate, scale, shift):
        """Its kernel for Intel's GPUs, which takes one sample: each by itself."""
        from sglang.kernels.ops.diffusion.norm import scale_residual_norm_scale_shift_triton as module

        x, residual = x.detach().contiguous(), residual.detach().contiguous()
        y, stored = torch.empty_like(x), torch.empty_like(x)
        for i in range(len(x) if x.numel() else 0):
            own = {"residual": residual[i : i + 1], "gate": residual_gate.detach()[i][None, None].contiguous()}
            own |= {"shift": shift.detach()[i].contiguous(), "scale": scale.detach()[i].contiguous()}
            made = module.fused_scale_residual_norm_scale_shift_triton(
                x=x[i : i + 1], weight=None, bias=None, eps=eps, **own
            )
            y[i], stored[i] = made[0][0], made[1][0]
        return {"y": y, "residual_out": stored}

    add("sglang_frame", "fused_add_layernorm_modulate", one_frame, dtypes=("fp16", "bf16"), supports=short)

    def table(x, weight, bias, *, eps, q_heads, k_heads, q_weight, k_weight, cos, sin):
        from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_

        size = len(q_weight)
        if 2 * cos.shape[1] != size or size & (size - 1):
            raise UnsupportedCase("rotates all of a head, of a power of 2 of columns")
        y = x.detach().clone()
        own = torch.arange(len(x), device=x.device), q_weight, k_weight, torch.cat((cos, sin), 1)
        table_qk_norm_rope_(y, *(t.detach() for t in own), q_heads, k_heads, size, eps)
        return y

    add("sglang_table", "qk_norm_rope", table, dtypes=("bf16",), weight_dtypes=("io",))

IMPLEMENTATIONS = tuple(IMPLEMENTATIONS)
