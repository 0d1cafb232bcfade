"""The reason of each term of a bound: output and term -> its formula and its source, in words.

forward_bounds.py, backward_bounds.py and casting.py compute the terms.
"""

from __future__ import annotations

from collections.abc import Mapping

_STORE = "the one rounding of the store: half an ulp of {fmt} at |expected| + E"
_ETA = "what may be flushed to zero of subnormals: eta"
_BITS = "what hangs on a bit within E of a limit, or a tie with it, which a correct kernel may set either way"
_CAST = "xhat and dy * g may be rounded to {fmt} on the way, at half an ulp each"

_SILU = "|dy| * the error of silu's slope, half that of the norm besides, and the product's rounding; count.slope"

REASONS: Mapping[tuple[str, str], str] = {
    ("mean", "sum"): "gam(H(N) + mean) * mean |x| + (H(N) + 3) eta",
    ("rstd", "variance"): "the variance's error as an interval through 1/sqrt(v + eps); Chan, Golub, LeVeque 1983",
    ("rstd", "rsqrt"): "rstd * 2 rsqrt_ulp u: 1/sqrt itself, as CUDA documents rsqrtf and div.full",
    ("rstd", "underflow"): _ETA,
    ("y", "store"): _STORE,
    ("y", "rstd"): "|xhat g| * al: al bounds the relative error of rstd",
    ("y", "mean"): "|g| * d: d = rstd * error of the mean shifts every xhat",
    (
        "y",
        "ops",
    ): "|xhat g| * k u for k = count.y (y_zero_centered, y_without_weight), the add of the bias, the reference's 2^-51",
    ("y", "weight alone"): "|xhat| * count.factor u |weight|, if xhat is added to its product with weight",
    ("y", "underflow"): _ETA,
    ("y", "xhat near the middle of two"): "|g| * the spacing of {fmt}: within its error xhat may round to either side",
    ("y", "product"): "|round(xhat) g| * u: the one product, rounded in fp32 before the store, and eta",
    ("dx", "store"): _STORE,
    (
        "dx",
        "mean(xhat dy g)",
    ): "rstd |xhat| * the error of mean(xhat dy g), gam(H(N) + c1) * mean |xhat dy g|",
    ("dx", "mean(dy g)"): "rstd * the error of mean(dy g), gam(H(N) + c2) * mean |dy g|",
    ("dx", "ops"): "rstd * (|dy g| + |xhat c1| + |c2|) * count.dx_elementwise u: the element's own roundings",
    ("dx", "statistics"): "what the errors al of rstd and d of the mean do to dx, and raw sums where declared",
    ("dx", "underflow"): _ETA,
    ("dx", "bits in doubt"): _BITS,
    ("dx", "weight alone"): "what count.factor u |dy weight| does to dx, if dy is added to its product with weight",
    ("dx", "roundings to the io dtype"): _CAST,
    (
        "dx",
        "sum with dresidual_out",
    ): "gam(dresidual) * (|dresidual_out| + the parts of dx), and a rounding of the norm's own dx to the io dtype",
    ("q", "codes in doubt"): "the codes that y within its bound may become, by this scale",
    ("q", "a quarter of a step"): "so that a code that is right has a ratio below 1, and the next one a ratio above it",
    ("scale", "max |v|"): "the interval of the largest |v|, by the bound of y, with count.scale roundings",
    ("residual_out", "flushed"): "twice a subnormal summand, and a subnormal sum, which may be read or stored as 0",
    ("y", "norm"): "that of a norm whose weight is weight * a(gate), with count.gated products more, before the store",
    (
        "y",
        "activation",
    ): "|xhat weight| * the error of a(gate), or what that of x * a(gate) does to xhat: count.exp, sigmoid",
    ("dx", "norm"): "that of a norm's dx, for the cotangent dy * a(gate), or times a(gate)",
    ("dx", "activation"): "what the error of a(gate) does to each dy * weight, or to what the norm's own dx is times",
    ("dgate", "store"): _STORE,
    (
        "dgate",
        "norm",
    ): "|dy slope| * the error of xhat * weight, or |x slope| * that of the norm's own dx; count.dgate u",
    ("dgate", "activation"): "what the slope is times * the error of the slope: count.exp, sigmoid, slope",
    (
        "rstd",
        "sum of squares",
    ): "the error of the sum, gam(H(N) + rms) of it, and count.eps u of eps, as an interval through the root",
    ("dx", "sum(y dy)"): "rstd |y| * the error of sum(y dy), gam(H(N) + c1) * sum |y dy|",
    ("dx", "y as it was stored"): "what half an ulp of each y does to rstd (dy - y sum(y dy)): a backward may read it",
    ("dx", "as long as eps"): "the sum as a whole, of a row that may be divided by eps or by its length",
    ("y", "factor"): "|xhat| * u |scale|, if xhat is added to its product with scale, or the doubt of round(1 + scale)",
    (
        "y",
        "xhat and product near the middle of two",
    ): "what xhat or its product with 1 + scale within their errors may round to besides, in {fmt}",
    ("y", "sum"): "u |y|, at most the product: the sum with shift in fp32, before the store; the reference's 2^-51",
    ("dx", "factor and roundings"): "what count.factor u |dy scale|, and dy * (1 + scale) rounded to {fmt}, do to dx",
    ("dscale", "store"): _STORE,
    ("dscale", "sum over M"): "gam(H(S) + dw) * sum |dy xhat| over the S rows of a sample",
    ("dscale", "statistics"): "sum |dy| * what the errors of rstd and of the mean, and underflow, do to each xhat",
    ("dscale", "underflow"): _ETA,
    ("dscale", "factor and roundings"): _CAST,
    ("dshift", "store"): _STORE,
    ("dshift", "sum over M"): "gam(H(S) + db) * sum |dy| over the S rows of a sample",
    ("dshift", "underflow"): _ETA,
    ("y", "n"): "|n_a cos| and |n_b sin| with the error of n in place of n, or what n within that may round to",
    ("y", "rotation"): "gam(count.rotation) * (|n_a cos| + |n_b sin|): each product and the sum, or their roundings",
    (
        "dx",
        "rotation",
    ): "what that rotation of dy, and roundings of it to {fmt}, do to rstd (g w - xhat mean(xhat g w))",
    ("y", "silu of the norm"): "|slope of silu| * the error of the norm, and a quarter of its square: |silu''| <= 1/2",
    ("y", "silu"): "the error of silu itself, at any number within that of the norm: count.exp, sigmoid, activation",
    ("dx", "silu"): _SILU,
    ("dw", "silu"): _SILU,
    ("db", "silu"): _SILU,
    ("dw", "store"): _STORE,
    ("dw", "sum over M"): "gam(H(M) + dw) * sum |dy xhat|",
    ("dw", "statistics"): "sum |dy| * what the errors of rstd and of the mean, and underflow, do to each xhat",
    ("dw", "underflow"): _ETA,
    ("dw", "bits in doubt"): _BITS,
    ("dw", "roundings to the io dtype"): _CAST,
    ("db", "store"): _STORE,
    ("db", "sum over M"): "gam(H(M) + db) * sum |dy|",
    ("db", "bits in doubt"): _BITS,
    ("db", "underflow"): _ETA,
}
"""``{fmt}`` stands for the output's format. The terms of dresidual are those of dx."""
