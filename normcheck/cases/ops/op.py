"""What an op is, as data: the roles of its tensors and how it differs from the other normalisations over a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Op:
    """A normalisation of the rows of x (M, N).

        v = mean((x - mean)^2) (biased), or mean(x^2) where not ``centered``
        xhat = (x - mean) / sqrt(v + eps), rounded to the dtype of x where ``rounds_xhat``
        z = xhat * (weight_offset + weight) + bias
        y = z, or clip(z, lower_clip, upper_clip) where ``clamped``; its bit says lower_clip < z < upper_clip

    ``statistics``: what forward saves for backward, each (M,). ``options``: the op's own numbers, passed by name to
    forward and backward. ``biases``: whether it is called with a bias, without, or both, simplest first. ``formula``
    and ``source`` are for readers.

    A rounded xhat passes its gradient through as it is; an op that rounds it has no offset, no clip and no bias.
    """

    name: str
    centered: bool
    weight_offset: float = 0.0
    clamped: bool = False
    rounds_xhat: bool = False
    biases: tuple[bool, ...] = (True,)
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

    def y_dtypes(self, io: str, weight: str) -> tuple[str, ...]:
        """The dtypes that y may have, by name, where x is in ``io`` and the weight in ``weight``.

        A rounded xhat times a wider weight is wider by promotion, and LlamaRMSNorm returns it so; rounded to the dtype
        of x it is right as well. Any other op stores y in the dtype of x.
        """
        return (io, weight) if self.rounds_xhat and weight != io else (io,)


GRADIENTS = ("dx", "dw", "db")
