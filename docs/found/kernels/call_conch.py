"""conch-triton-kernels: forwards for inference, two of them in place."""

from conch.ops.normalization.gemma_rms_norm import gemma_rms_norm
from conch.ops.normalization.rms_norm import fused_add_rms_norm, rms_norm

from normcheck import Implementation


def llama(x, weight, bias, *, eps):
    return rms_norm(x.detach(), weight.detach(), eps)


def gemma(x, weight, bias, *, eps):
    return gemma_rms_norm(x.detach(), weight.detach(), eps)


def fused_add(x, weight, bias, *, eps, residual):
    return fused_add_rms_norm(x.detach(), residual.detach(), weight.detach(), eps)


IMPLEMENTATIONS = (
    Implementation(name="conch", op="rmsnorm_llama", forward=llama, strided=False),
    Implementation(name="conch", op="rmsnorm_gemma", forward=gemma, overwrites=("x",)),
    Implementation(name="conch_packed", op="rmsnorm_gemma", forward=gemma, overwrites=("x",), strided=False),
    Implementation(
        name="conch",
        op="fused_add_rmsnorm_llama",
        forward=fused_add,
        overwrites=("x", "residual"),
        strided=False,
        weight_dtypes=("io",),
    ),
)
