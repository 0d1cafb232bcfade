"""flashnn: the forwards behind its RMSNorm and LayerNorm modules."""

from flashnn.triton_kernels.layer_norm import triton_layer_norm_forward
from flashnn.triton_kernels.rms_norm import triton_rmsnorm_forward

from normcheck import Implementation


def rmsnorm(x, weight, bias, *, eps):
    return triton_rmsnorm_forward(x.detach(), weight.detach(), eps)


def layernorm(x, weight, bias, *, eps):
    return triton_layer_norm_forward(x.detach(), weight.detach(), bias.detach(), eps)


PACKED = {"strided": False}
IMPLEMENTATIONS = (
    Implementation(name="flashnn", op="rmsnorm", forward=rmsnorm, biases=(False,)),
    Implementation(name="flashnn", op="layernorm", biases=(True,), forward=layernorm),
    Implementation(name="flashnn_packed", op="rmsnorm", forward=rmsnorm, biases=(False,), **PACKED),
    Implementation(name="flashnn_packed", op="layernorm", biases=(True,), forward=layernorm, **PACKED),
)
