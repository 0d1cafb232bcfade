"""Liger-Kernel: its autograd functions with the arguments that its modules pass."""

from functools import partial
from importlib.util import find_spec

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.group_norm import LigerGroupNormFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction

from normcheck import Implementation


def layernorm(x, weight, bias, *, eps):
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def rmsnorm(offset, casting, x, weight, bias, *, eps):
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)


def fused_add(casting, x, weight, bias, *, eps, residual):
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, casting, False)


def groupnorm(x, weight, bias, *, eps, groups):
    return LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], groups, eps)


def groupnorm_forward(x, weight, bias, *, eps, groups):
    return groupnorm(x.detach(), weight.detach(), bias.detach(), eps=eps, groups=groups)


def modulated(x, weight, bias, *, eps, scale, shift):
    from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction

    return LigerModulatedRMSNormFunction.apply(x, None, scale, shift, eps, 0.0, "llama", False)


def short(case):
    return "takes at most 65536 columns" if case.N > 65536 else None


ANY = {"supports": short, "biases": (False,), "ranks": (2, 3)}
IMPLEMENTATIONS = (
    Implementation(name="liger", op="layernorm", biases=(True,), forward=layernorm, supports=short, ranks=(2, 3)),
    Implementation(name="liger", op="rmsnorm", forward=partial(rmsnorm, 0.0, "gemma"), **ANY),
    Implementation(name="liger", op="rmsnorm_llama", forward=partial(rmsnorm, 0.0, "llama"), **ANY),
    Implementation(name="liger", op="rmsnorm_gemma", forward=partial(rmsnorm, 1.0, "gemma"), **ANY),
    Implementation(
        name="liger",
        op="fused_add_rmsnorm",
        forward=partial(fused_add, "gemma"),
        supports=short,
        model={"sum": "rounded"},
    ),
    Implementation(
        name="liger",
        op="fused_add_rmsnorm_llama",
        forward=partial(fused_add, "llama"),
        supports=short,
        model={"sum": "rounded"},
    ),
    Implementation(name="liger", op="groupnorm", forward=groupnorm, biases=(True,)),
    Implementation(name="liger_forward", op="groupnorm", forward=groupnorm_forward, biases=(True,)),
    *(
        [Implementation(name="liger", op="rmsnorm_modulate", forward=modulated, supports=short, deterministic=False)]
        if find_spec("liger_kernel.ops.modulated_rms_norm")
        else ()
    ),
)
