"""SOL-ExecBench: the Triton solutions that it ships as examples."""

import torch

from normcheck import Implementation


def rmsnorm(x, weight, bias, *, eps):
    from rmsnorm_kernel import rmsnorm_fwd

    y = torch.empty_like(x.detach())
    rmsnorm_fwd(x.detach(), weight.detach(), y)
    return y


IMPLEMENTATIONS = (
    Implementation(
        name="rmsnorm_h4096",
        op="rmsnorm",
        forward=rmsnorm,
        dtypes=("bf16",),
        biases=(False,),
        strided=False,
        weight_dtypes=("io",),
        shapes=((1, 4096), (7, 4096), (33, 4096)),
        epsilons=(1e-5,),
    ),
)
