"""LayerNorm over the last dimension: y, mean, rstd; dx, dw, db."""

from __future__ import annotations

from normcheck.cases.ops.op import Op

OP = Op(
    name="layernorm",
    centered=True,
    formula="y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)",
    source="Ba, Kiros, Hinton 2016, arXiv 1607.06450; biased variance as in torch.nn.LayerNorm",
)
