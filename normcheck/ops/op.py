"""What an op is, as data: the roles of its tensors and how it differs from the other normalisations over a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Op:
    """A normalisation of the rows of x (M, N).

        v = mean((x - mean)^2) (biased), or mean(x^2) where not ``centered``
        z = (x - mean) / sqrt(v + eps) * (weight_offset + weight) + bias
        y = z, or clip(z, lower_clip, upper_clip) where ``clamped``; its bit says lower_clip < z < upper_clip

    ``statistics``: what forward saves for backward, each (M,). ``options``: the op's own numbers, passed by name to
    forward and backward. ``bias_optional``: whether it is also called without a bias. ``formula`` and ``source`` are
    for readers.
    """

    name: str
    centered: bool
    weight_offset: float = 0.0
    clamped: bool = False
    bias_optional: bool = False
    formula: str
    source: str

    @property
    def statistics(self) -> tuple[str, ...]:
        """What forward saves for backward."""
        return ("mean", "rstd") if self.centered else ("rstd",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What forward may return, y first."""
        return ("y", *self.statistics, *(("bitmask",) if self.clamped else ()))

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the op's own numbers."""
        return ("lower_clip", "upper_clip") if self.clamped else ()


GRADIENTS = ("dx", "dw", "db")
