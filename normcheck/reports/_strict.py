"""Numbers as strict JSON can hold them."""

from __future__ import annotations

import math


def number(value: float | None) -> float | str | None:
    """``value``, or the string "NaN", "Infinity" or "-Infinity"; null is what is not known."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
