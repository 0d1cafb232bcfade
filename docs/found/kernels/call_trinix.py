"""trinix: the autograd functions behind FastLayerNorm and FastRMSNorm."""

from trinix.kernels import TritonLayerNormKernel, TritonRMSNormKernel

from normcheck import Implementation


def layernorm(x, weight, bias, *, eps):
    return TritonLayerNormKernel.apply(x, weight, bias, eps)


def rmsnorm(x, weight, bias, *, eps):
    return TritonRMSNormKernel.apply(x, weight, eps)


def detached(kernel, x, weight, bias, *, eps):
    return kernel(x.detach(), weight.detach(), None if bias is None else bias.detach(), eps=eps)


def forward_only(kernel):
    return lambda x, weight, bias, *, eps: detached(kernel, x, weight, bias, eps=eps)


LONG = ((1, 8192), (2, 16384), (1, 20000))
IMPLEMENTATIONS = (
    Implementation(name="trinix", op="layernorm", biases=(True,), forward=layernorm, weight_dtypes=("io",)),
    Implementation(name="trinix", op="rmsnorm", forward=rmsnorm, weight_dtypes=("io",), biases=(False,)),
    Implementation(name="trinix_long", op="layernorm", biases=(True,), forward=forward_only(layernorm), shapes=LONG),
    Implementation(name="trinix_long", op="rmsnorm", forward=forward_only(rmsnorm), shapes=LONG, biases=(False,)),
    Implementation(
        name="trinix_forward",
        op="layernorm",
        biases=(True,),
        forward=forward_only(layernorm),
        supports=lambda case: "longer than a block" if case.N > 8192 else None,
    ),
)
