"""freesolo-chalk: its RMSNorm kernels in both castings."""

from chalk.ops.rmsnorm import _build_kernels

from normcheck import Implementation

GEMMA, LLAMA = _build_kernels(True), _build_kernels(False)


def gemma(x, weight, bias, *, eps):
    return GEMMA(x, weight, eps)


def llama(x, weight, bias, *, eps):
    return LLAMA(x, weight, eps)


IMPLEMENTATIONS = (
    Implementation(name="chalk", op="rmsnorm_gemma", forward=gemma),
    Implementation(name="chalk", op="rmsnorm_llama", forward=llama),
)
