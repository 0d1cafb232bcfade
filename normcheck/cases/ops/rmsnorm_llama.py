"""RMSNorm as Llama casts it: xhat is rounded to the io dtype before it is multiplied by the weight. No bias."""

from __future__ import annotations

from normcheck.cases.ops.op import Op

OP = Op(
    name="rmsnorm_llama",
    centered=False,
    rounds_xhat=True,
    biases=(False,),
    formula="y = weight * round(x * rstd),  round to the dtype of x,  rstd = 1 / sqrt(mean(x^2) + eps)",
    source="LlamaRMSNorm of Hugging Face transformers; the rounding passes gradients through, dw = sum_M(dy * round)",
)
