"""flash-linear-attention, and its fork of RWKV: ``layer_norm``, ``rms_norm`` with a residual or a gate, ``l2_norm``."""

from call_gates import IMPLEMENTATIONS as GATED
from call_lengths import IMPLEMENTATIONS as BY_LENGTH

from normcheck import Implementation

try:
    from fla.modules.norm.layernorm import layer_norm, rms_norm
except ImportError:  # before 0.5
    from fla.modules.layernorm import layer_norm, rms_norm


def layernorm(x, weight, bias, *, eps):
    return layer_norm(x, weight, bias, eps=eps)


def rmsnorm(x, weight, bias, *, eps):
    return rms_norm(x, weight, bias, eps=eps)


def fused_add(x, weight, bias, *, eps, residual):
    return rms_norm(x, weight, bias, residual=residual, eps=eps, prenorm=True)


def short(case):
    wide = case.dtype == "fp32" or getattr(case, "residual_dtype", "") == "fp32"
    return "takes rows of at most 64 KiB" if 65536 // (4 if wide else 2) < case.N else None


SHAPES = ((1, 320), (7, 100), (64, 1024), (33, 4096))
"""A kernel that tunes itself compiles and times a dozen variants for each N."""

ANY = {"supports": short, "shapes": SHAPES, "ranks": (2, 3)}
IMPLEMENTATIONS = (
    Implementation(name="fla", op="layernorm", forward=layernorm, **ANY),
    Implementation(name="fla", op="rmsnorm", forward=rmsnorm, **ANY),
    Implementation(name="fla", op="fused_add_rmsnorm", forward=fused_add, **ANY),
    Implementation(
        name="fla_fp32_residual", op="fused_add_rmsnorm", forward=fused_add, residual_dtypes=("io", "fp32"), **ANY
    ),
    *GATED,
    *(one for one in BY_LENGTH if one.name == "fla_l2"),
)
