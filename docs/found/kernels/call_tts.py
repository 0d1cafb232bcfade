"""qwen3-tts-triton and omnivoice-triton: the forwards behind their modules, which are the same files."""

from importlib import import_module
from importlib.util import find_spec

from normcheck import Implementation

PACKAGE = "qwen3_tts_triton" if find_spec("qwen3_tts_triton") else "omnivoice_triton"


def llama(x, weight, bias, *, eps):
    return import_module(f"{PACKAGE}.kernels.rms_norm").triton_rms_norm(x.detach(), weight.detach(), eps)


def fused_add(x, weight, bias, *, eps, residual):
    call = import_module(f"{PACKAGE}.kernels.fused_norm_residual").triton_fused_add_rms_norm
    return call(x.detach(), residual.detach(), weight.detach(), eps)


IMPLEMENTATIONS = (
    Implementation(name=PACKAGE, op="rmsnorm_llama", forward=llama),
    Implementation(name=PACKAGE, op="fused_add_rmsnorm_llama", forward=fused_add, weight_dtypes=("io",)),
)
