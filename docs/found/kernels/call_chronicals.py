"""chronicals: FusedRMSNorm, as a module and as the function behind it."""

from chronicals.kernels.triton_kernels import LigerRMSNormFunction

from normcheck import Implementation


def rmsnorm(x, weight, bias, *, eps):
    return LigerRMSNormFunction.apply(x, weight, eps)


IMPLEMENTATIONS = (Implementation(name="chronicals", op="rmsnorm", forward=rmsnorm, biases=(False,)),)
