"""The names of what an op gets and returns: statistics, gradients, and the inputs that a function gets by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STATISTICS = ("mean", "rstd")
"""The statistics that a forward may save for a backward, each (M,)."""

GRADIENTS = ("dx", "dw", "db")
"""The gradients that a backward returns, dw only with a weight, db only with a bias."""

OF_PARAMETERS = ("dw", "db")
"""Those of what a layer learns."""

RESIDUAL, RESIDUAL_OUT, DRESIDUAL = "residual", "residual_out", "dresidual"
"""The input that an op adds to x, the sum that it stores, and the gradient of the input."""

GATE, DGATE = "gate", "dgate"
"""The input whose activation a gated op multiplies by, and its gradient."""

CODES, SCALE = "q", "scale"
"""The codes that a quantising op returns in place of y, and what they are multiples of, unless it is given."""

SHIFT, DSCALE, DSHIFT = "shift", "dscale", "dshift"
"""What a modulated op adds, beside the SCALE that it multiplies by and 1, and the gradients of the two."""

RESIDUAL_GATE, DRESIDUAL_GATE = "residual_gate", "dresidual_gate"
"""What each sample multiplies x by before a modulated op adds it to the residual, and its gradient."""

GROUPS = "groups"
"""The number that a grouped op gets by name: how many groups of channels there are, each normed by itself."""

COS, SIN, Q_WEIGHT, K_WEIGHT = "cos", "sin", "q_weight", "k_weight"
"""What a rotary op gets: the cosine and the sine of each token and pair of columns, the weights of the heads of q and
of k."""

HEAD_COUNTS = ("q_heads", "k_heads")
"""The numbers that a rotary op gets by name: how many heads of a row are of q, and how many behind those of k."""

BY_NAME: Mapping[str, str] = MappingProxyType(
    {RESIDUAL: DRESIDUAL, RESIDUAL_GATE: DRESIDUAL_GATE, GATE: DGATE, SCALE: DSCALE, SHIFT: DSHIFT}
    | dict.fromkeys((COS, SIN, Q_WEIGHT, K_WEIGHT), "")
)
"""Every input that a function gets by name -> its gradient, "" if none is asked. The scale of codes has none."""

OF_SAMPLES = (DRESIDUAL_GATE, DSCALE, DSHIFT)
"""The gradients of what each sample has of its own, each (B, N)."""

ROOT_FIRST = (
    RESIDUAL_OUT,
    *STATISTICS,
    "y",
    SCALE,
    CODES,
    "bitmask",
    "dx",
    DRESIDUAL,
    DRESIDUAL_GATE,
    DGATE,
    DSCALE,
    DSHIFT,
    "dw",
    "db",
)
"""Every output in the order in which they are computed: the first wrong one is the root of the others."""
