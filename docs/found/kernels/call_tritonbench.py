"""TritonBench-G: its correct answers, by which kernels that models write are judged."""

from functools import partial
from types import SimpleNamespace

from normcheck import Implementation


def fast_layernorm(x, weight, bias, *, eps):
    from fast_layernorm import fast_layernorm as call

    return call(SimpleNamespace(weight=weight, bias=bias, eps=eps, elementwise_affine=True), x)


def fast_rms(gemma, x, weight, bias, *, eps):
    from fast_rms_layernorm import fast_rms_layernorm

    return fast_rms_layernorm(SimpleNamespace(weight=weight, eps=eps), x, gemma)


def liger(x, weight, bias, *, eps):
    from layer_norm_liger import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def tutorial(x, weight, bias, *, eps):
    from layer_norm_triton import layer_norm

    return layer_norm(x, (x.shape[-1],), weight, bias, eps)


def one_pass(x, weight, bias, *, eps):
    from layer_norm_ops import _layer_norm_fwd

    y, mean, rstd, _ = _layer_norm_fwd(x, weight, bias, eps)
    return {"y": y, "mean": mean, "rstd": rstd}


def one_pass_backward(dy, x, weight, bias, saved, *, eps):
    from layer_norm_ops import _layer_norm_bwd

    dx, dw, db, _ = _layer_norm_bwd(dy, x, weight, bias, eps, saved["mean"], saved["rstd"])
    return {"dx": dx, "dw": dw, "db": db}


def heads(x, weight, bias, *, eps):
    from layernorm_fwd_triton import layernorm_forward

    return layernorm_forward(x.detach()[:, None], weight.detach()[None], eps)[:, 0]


def rms(x, weight, bias, *, eps):
    from rms_norm_triton import rms_norm

    return rms_norm(x.detach(), (x.shape[-1],), weight.detach(), eps)


def fused(x, weight, bias, *, eps):
    from rmsnorm_fused import TritonLlamaRMSNorm

    return TritonLlamaRMSNorm(weight.detach(), eps)(x.detach())


def fused_llama(x, weight, bias, *, eps):
    from rmsnorm_fused_llama import rmsnorm_forward

    return rmsnorm_forward(x.detach(), weight.detach(), eps)


def batched(module, name, x, weight, bias, *, eps):
    return getattr(__import__(module), name)(x.detach()[None], weight.detach(), eps)[0]


def forward_only(function):
    return lambda x, weight, bias, *, eps: function(x.detach(), weight.detach(), bias.detach(), eps=eps)


def short(case):
    return "takes rows of less than 64 KiB" if 65536 // (4 if case.dtype == "fp32" else 2) < case.N else None


def power_of_two(case):
    return short(case) or (None if case.N & (case.N - 1) == 0 else "only powers of two")


def gpu(device):
    return None if device == "cuda" else "allocates on the GPU whatever x is on"


def no_list(device):
    return None if device == "cuda" else "its grid is a list, which Triton's interpreter does not take"


LAYER = {"op": "layernorm", "supports": short, "biases": (True,)}
RMS = {"op": "rmsnorm", "supports": short, "biases": (False,)}
GPU, POWERS, PACKED = {"unavailable": gpu}, {"supports": power_of_two}, {"strided": False}
ONE = {"weight_dtypes": ("io",)}
TUNED = {"shapes": ((1, 320), (7, 100), (64, 1024), (33, 4096))}

IMPLEMENTATIONS = (
    Implementation(name="fast_layernorm", forward=forward_only(fast_layernorm), **LAYER, **GPU, **ONE),
    Implementation(name="fast_layernorm_powers", forward=fast_layernorm, **LAYER | GPU | ONE | POWERS),
    Implementation(name="fast_rms_layernorm", op="rmsnorm_llama", forward=partial(fast_rms, False), **GPU, **ONE),
    Implementation(
        name="fast_rms_layernorm_dy",
        op="rmsnorm_llama",
        forward=partial(fast_rms, False),
        overwrites=("dy",),
        **GPU,
        **ONE,
    ),
    Implementation(name="layer_norm_liger", forward=forward_only(liger), **LAYER, **ONE),
    Implementation(name="layer_norm_liger_powers", forward=forward_only(liger), **LAYER | ONE | POWERS),
    Implementation(name="layer_norm_liger_gradients", forward=liger, **LAYER | ONE | POWERS | GPU),
    Implementation(name="layer_norm_triton", forward=tutorial, unavailable=no_list, **LAYER),
    Implementation(name="layer_norm_triton_packed", forward=tutorial, unavailable=no_list, **LAYER | PACKED | ONE),
    Implementation(
        name="layer_norm_triton_forward", forward=forward_only(tutorial), unavailable=no_list, **LAYER | ONE
    ),
    Implementation(name="layer_norm_ops", forward=one_pass, backward=one_pass_backward, **LAYER | GPU | TUNED),
    Implementation(name="rms_norm_triton", op="rmsnorm_llama", forward=rms, **GPU),
    Implementation(name="rmsnorm_fused", forward=fused, **RMS),
    Implementation(name="rmsnorm_fused_packed", forward=fused, **RMS | PACKED),
    Implementation(name="rmsnorm_fused_llama", forward=fused_llama, **RMS | PACKED),
    Implementation(
        name="rmsnorm_implementation", forward=partial(batched, "rmsnorm_implementation", "rmsnorm_wrapper"), **RMS
    ),
    Implementation(
        name="rmsnorm_triton", forward=partial(batched, "rmsnorm_triton", "rmsnorm_triton_wrapper"), **RMS, **GPU
    ),
)
