"""flashinfer-ai/flashinfer#4160 (#4167): codes are made in pairs, and a pair goes from fp32 through bf16 to e4m3, after
the scale: two roundings. Rows of an odd length are made one by one, and right.
"""

import torch


def rmsnorm_quant(x, weight, scale, eps):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    t = (y / scale).clamp(-448, 448)
    if x.shape[-1] % 2 == 0:
        t = t.bfloat16()
    return t.to(torch.float8_e4m3fn)
