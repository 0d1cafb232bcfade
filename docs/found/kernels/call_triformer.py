"""triformer: the autograd functions of TritonLayerNorm and TritonRMSNorm; its outputs are always on cuda:0."""

from triformer.layernorm import Fast_Layernorm
from triformer.rms_norm import FastRMSNorm

from normcheck import Implementation


def layernorm(x, weight, bias, *, eps):
    return Fast_Layernorm.apply(x, weight, bias, eps)


def layernorm_forward(x, weight, bias, *, eps):
    return Fast_Layernorm.apply(x.detach(), weight.detach(), bias.detach(), eps)


def rmsnorm(x, weight, bias, *, eps):
    return FastRMSNorm.apply(x, weight, eps)


def rmsnorm_forward(x, weight, bias, *, eps):
    return FastRMSNorm.apply(x.detach(), weight.detach(), eps)


def gpu(device):
    return None if device == "cuda" else "allocates its outputs on cuda:0"


def power_of_two(case):
    return None if case.N & (case.N - 1) == 0 else "only powers of two"


def packed_dy(case):
    return None if case.layout == "contiguous" else "dy as autograd makes it of a sum"


GPU = {"unavailable": gpu, "weight_dtypes": ("io",)}
IMPLEMENTATIONS = (
    Implementation(name="triformer", op="layernorm", biases=(True,), forward=layernorm_forward, **GPU),
    Implementation(
        name="triformer_powers", op="layernorm", biases=(True,), forward=layernorm, supports=power_of_two, **GPU
    ),
    Implementation(
        name="triformer_powers_dy",
        op="layernorm",
        biases=(True,),
        forward=layernorm,
        supports=power_of_two,
        overwrites=("dy",),
        **GPU,
    ),
    Implementation(name="triformer", op="rmsnorm_llama", forward=rmsnorm, **GPU),
    Implementation(name="triformer_packed_dy", op="rmsnorm_llama", forward=rmsnorm, supports=packed_dy, **GPU),
    Implementation(name="triformer_forward", op="rmsnorm_llama", forward=rmsnorm_forward, **GPU),
)
