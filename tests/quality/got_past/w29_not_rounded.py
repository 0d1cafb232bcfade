"""NVIDIA/TensorRT-LLM#14464: a model is calibrated on a norm that stores half precision and a quantisation that reads
it; the fused kernel quantises the fp32 value. It declares what it is to be, and is not.
"""

import torch

from normcheck import Implementation


def forward(x, weight, bias=None, *, eps, scale):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return {"q": (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn)}


IMPLEMENTATIONS = (
    Implementation(
        name="w29", op="rmsnorm_quant", forward=forward, biases=(False,), model={"round_before_quant": "io"}
    ),
)
