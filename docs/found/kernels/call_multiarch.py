"""cuda-triton-multiarch: ``rmsnorm_triton``."""

from kernels.rmsnorm import rmsnorm_triton

from normcheck import Implementation


def rmsnorm(x, weight, bias, *, eps):
    return rmsnorm_triton(x.detach(), weight.detach(), eps)


IMPLEMENTATIONS = (
    Implementation(name="multiarch", op="rmsnorm", forward=rmsnorm, biases=(False,)),
    Implementation(name="multiarch_packed", op="rmsnorm", forward=rmsnorm, biases=(False,), strided=False),
)
