"""torchnorm: what its modules call on a GPU, where they cast the weights to the dtype of x."""

from torchnorm._triton import fused_add_rms_norm, fused_layer_norm, fused_rms_norm

from normcheck import Implementation


def layernorm(x, weight, bias, *, eps):
    return fused_layer_norm(x, weight, bias, eps)


def rmsnorm(x, weight, bias, *, eps):
    return fused_rms_norm(x, weight, eps)


def fused_add(x, weight, bias, *, eps, residual):
    return fused_add_rms_norm(x, residual, weight, eps)


def fused_add_forward(x, weight, bias, *, eps, residual):
    return fused_add_rms_norm(x.detach(), residual.detach(), weight.detach(), eps)


LOOSE = {"weight_dtypes": ("io",), "deterministic": False}
IMPLEMENTATIONS = (
    Implementation(name="torchnorm", op="layernorm", biases=(True,), forward=layernorm, **LOOSE),
    Implementation(name="torchnorm", op="rmsnorm", forward=rmsnorm, biases=(False,), **LOOSE),
    Implementation(name="torchnorm", op="fused_add_rmsnorm", forward=fused_add, **LOOSE),
    Implementation(name="torchnorm_forward", op="fused_add_rmsnorm", forward=fused_add_forward, **LOOSE),
)
