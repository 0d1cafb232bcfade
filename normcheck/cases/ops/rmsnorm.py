"""RMSNorm over the last dimension: y, rstd; dx, dw and, with a bias, db."""

from __future__ import annotations

from normcheck.cases.ops.op import Op

OP = Op(
    name="rmsnorm",
    centered=False,
    biases=(False, True),
    formula="y = x * rstd * weight (+ bias),  rstd = 1 / sqrt(mean(x^2) + eps)",
    source="Zhang, Sennrich 2019, arXiv 1910.07467; eps inside the root, nothing subtracted",
)
