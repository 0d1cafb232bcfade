"""RMSNorm as Gemma casts it: the scale is 1 + weight, all of it in fp32, rounded once at the store. No bias."""

from __future__ import annotations

from normcheck.cases.ops.op import Op

OP = Op(
    name="rmsnorm_gemma",
    centered=False,
    weight_offset=1.0,
    biases=(False,),
    formula="y = x * rstd * (1 + weight),  rstd = 1 / sqrt(mean(x^2) + eps)",
    source="GemmaRMSNorm of Hugging Face transformers; dw is the gradient of weight itself",
)
