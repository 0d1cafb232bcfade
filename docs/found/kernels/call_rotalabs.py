"""rotalabs-accel: ``rmsnorm``, a forward."""

from rotalabs_accel.kernels.rmsnorm import rmsnorm as kernel

from normcheck import Implementation


def rmsnorm(x, weight, bias, *, eps):
    return kernel(x.detach(), weight.detach(), eps)


def gpu(device):
    return None if device == "cuda" else "asserts that x is on a GPU"


IMPLEMENTATIONS = (Implementation(name="rotalabs", op="rmsnorm", forward=rmsnorm, biases=(False,), unavailable=gpu),)
