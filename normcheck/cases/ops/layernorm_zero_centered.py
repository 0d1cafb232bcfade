"""LayerNorm whose stored weight is centred at zero: the scale is 1 + weight, formed in the accumulation format."""

from __future__ import annotations

from normcheck.cases.ops.op import Op

OP = Op(
    name="layernorm_zero_centered",
    centered=True,
    weight_offset=1.0,
    formula="y = (x - mean) * rstd * (1 + weight) + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)",
    source="cuDNN frontend, LayerNorm with zero-centred gamma (from backend 9.10); dw is the gradient of weight itself",
)
