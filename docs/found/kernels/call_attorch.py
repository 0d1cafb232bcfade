"""attorch: the autograd functions behind its LayerNorm and RMSNorm, the output in the dtype of the input."""

from attorch.layer_norm_layer import LayerNormAutoGrad
from attorch.rms_norm_layer import RMSNormAutoGrad

from normcheck import Implementation


def layernorm(x, weight, bias, *, eps):
    return LayerNormAutoGrad.apply(x, weight, bias, eps, False)


def rmsnorm(x, weight, bias, *, eps):
    return RMSNormAutoGrad.apply(x, weight, eps)


def short(case):
    return "holds a row in one block" if case.N > 16384 else None


SHAPES = ((1, 320), (7, 100), (33, 768), (64, 1024))
"""A kernel that tunes itself compiles and times its variants for each M and N."""

IMPLEMENTATIONS = (
    Implementation(
        name="attorch", op="layernorm", biases=(True,), forward=layernorm, supports=short, shapes=SHAPES, ranks=(2, 3)
    ),
    Implementation(name="attorch", op="rmsnorm", forward=rmsnorm, supports=short, shapes=SHAPES, biases=(False,)),
)
