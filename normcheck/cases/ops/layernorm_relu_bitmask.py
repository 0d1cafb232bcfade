"""LayerNorm, then a clamped ReLU, with the packed bitmask of the elements that passed; backward through the bitmask."""

from __future__ import annotations

from normcheck.cases.ops.op import Op

OP = Op(
    name="layernorm_relu_bitmask",
    centered=True,
    clamped=True,
    formula="z = layernorm(x);  y = min(max(z, lower_clip), upper_clip);  bit = lower_clip < z < upper_clip",
    source="cuDNN frontend, LayerNorm + ReLU with bitmask (from backend 9.13); backward takes dy where the bit is set",
)
