"""FlagGems: ``layer_norm``, ``rms_norm`` and the fused kernels, called by name."""

import os
import tempfile
from contextlib import redirect_stdout
from io import StringIO

os.environ["HOME"] = tempfile.gettempdir()  # it keeps its tuned configurations there
os.environ.setdefault("GEMS_VENDOR", "nvidia")

import flag_gems

from normcheck import Implementation


def layernorm(x, weight, bias, *, eps):
    return flag_gems.layer_norm(x, (x.shape[-1],), weight, bias, eps)[0]


def layernorm_backward(dy, x, weight, bias, saved, *, eps):
    _, mean, rstd = flag_gems.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    dx, dw, db = flag_gems.layer_norm_backward(dy, x, (x.shape[-1],), mean, rstd, weight, bias, [True, True, True])
    return {"dx": dx, "dw": dw, "db": db}


def rmsnorm(x, weight, bias, *, eps):
    return flag_gems.rms_norm(x, (x.shape[-1],), weight, eps)


def fused_add(x, weight, bias, *, eps, residual):
    with redirect_stdout(StringIO()):  # it prints in each call
        return flag_gems.fused_add_rms_norm(x.detach(), residual.detach(), [x.shape[-1]], weight.detach(), eps)


ONE = {"weight_dtypes": ("io",)}
IMPLEMENTATIONS = (
    Implementation(
        name="flag_gems",
        op="layernorm",
        biases=(True,),
        forward=layernorm,
        backward=layernorm_backward,
        shapes=((1, 320), (7, 100), (64, 1024), (33, 4096)),
        **ONE,
    ),
    Implementation(
        name="flag_gems_rank3",
        op="layernorm",
        biases=(True,),
        forward=layernorm,
        backward=layernorm_backward,
        ranks=(2, 3),
        dtypes=("fp32",),
        shapes=((6, 320), (64, 1024)),
        **ONE,
    ),
    Implementation(name="flag_gems", op="rmsnorm", forward=rmsnorm, biases=(False,), **ONE),
    Implementation(
        name="flag_gems", op="fused_add_rmsnorm", forward=fused_add, overwrites=("x", "residual"), strided=False, **ONE
    ),
)
