"""An op as data: which facts it has, and what follows of them for its inputs, outputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from normcheck.cases.tensor_names import (
    BY_NAME,
    CODES,
    COS,
    GATE,
    GRADIENTS,
    GROUPS,
    HEAD_COUNTS,
    K_WEIGHT,
    Q_WEIGHT,
    RESIDUAL,
    RESIDUAL_GATE,
    RESIDUAL_OUT,
    SCALE,
    SHIFT,
    SIN,
    STATISTICS,
)

RELU6 = (0.0, 6.0)
"""The default limits of a clamped op."""

BLOCKS: Mapping[str, int] = MappingProxyType({"block64": 64, "block128": 128})
"""What shares a scale, if a block of columns does, as a model's ``scale`` -> the columns of a block."""

AXES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {RESIDUAL: (RESIDUAL, "residual_dtype"), RESIDUAL_GATE: (), GATE: (GATE,), SCALE: (SCALE,), SHIFT: ("samples",)}
    | {GROUPS: ("channels", "groups")}
    | {COS: ("head", "kv_heads", "rotary", "angles"), SIN: (), Q_WEIGHT: (), K_WEIGHT: ()}
)
"""Each input of BY_NAME, and GROUPS -> the axes of a case that say something of it."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """A normalisation of the rows of x (M, N).

        v = mean((x - mean)^2) (biased), or mean(x^2) if not ``centered``
        xhat = (x - mean) / sqrt(v + eps), rounded to the dtype of x if ``rounds_xhat``
        z = xhat * gamma + bias, gamma = weight, or 1 + weight if ``zero_centered``
        y = z, or clip(z, lower_clip, upper_clip) if ``clamped``; the bit of y is lower_clip < z < upper_clip

    ``biases``: the values that ``Case.bias`` may have, the usual one first. ``formula`` and ``source`` are for readers.

    If it ``adds_residual``, x above is x + residual, which ``oracle/residual.py`` explains; that sum is an output as
    well, and its cotangent is added to dx, which is the gradient of the residual too.

    If it ``quantises``, its output is not y but q, y / scale rounded to codes of 8 bits, which
    ``oracle/quantised.py`` explains. Such an op has no gradients.

    If it is ``gated``, it also multiplies by an activation of a gate (M, N), which ``oracle/gated.py`` explains: when,
    which one, and in which groups of columns the mean is taken, is a convention.

    If it is ``l2``, it divides by the length of x in place of the root of a mean, which ``oracle/l2norm.py`` explains:
    what eps does is a convention. It has no weight.

    If it is ``modulated``, x is (B, S, N), and each of its B samples has a scale and a shift (N,) of its own, in place
    of weight and bias: y = xhat * (1 + scale) + shift, which ``oracle/modulated.py`` explains. One that adds a residual
    norms residual + residual_gate * x, with a gate (N,) of each sample, which ``oracle/gated_sum.py`` explains.

    If it is ``grouped``, x is (B, C, L), so M = B and N = C * L, and it norms each group of channels of a sample, with
    weight and bias (C,), which ``oracle/grouped.py`` explains: an activation behind it is a convention.

    If it is ``rotary``, a row is a token's heads of q, of k and of v; it norms each head of q and of k, with a weight
    of q and one of k, and rotates pairs of their columns, which ``oracle/rotary.py`` explains: which are a pair, and
    what is rounded, are conventions. Of its gradients dx alone is asked.

    The rounding of xhat, to the dtype of x with a residual as well, passes gradients through unchanged. Raises
    ValueError for an op that rounds xhat and is centred, zero-centred, clamped, biased or quantises, and for one that
    is clamped and adds a residual or quantises, or that is gated, l2, modulated, grouped or rotary and not plain: no
    bound is derived.
    """

    name: str
    centered: bool
    zero_centered: bool = False
    clamped: bool = False
    rounds_xhat: bool = False
    adds_residual: bool = False
    quantises: bool = False
    gated: bool = False
    l2: bool = False
    modulated: bool = False
    grouped: bool = False
    rotary: bool = False
    biases: tuple[bool, ...] = (True, False)
    formula: str
    source: str

    def __post_init__(self) -> None:
        more = (self.centered, self.zero_centered, self.clamped, self.takes_bias, self.quantises)
        if self.rounds_xhat and any(more):
            raise ValueError(
                f"op={self.name}: expected rounds_xhat=True with no centered, zero_centered, clamped, bias, quantises"
            )
        if self.clamped and (self.adds_residual or self.quantises):
            raise ValueError(f"op={self.name}: expected clamped=True with no adds_residual, quantises")
        if self.gated and (any(more) or self.zero_centered or self.rounds_xhat or self.adds_residual):
            raise ValueError(f"op={self.name}: expected gated=True with no other fact of it")
        if self.l2 and (any(more) or self.zero_centered or self.rounds_xhat or self.by_name):
            raise ValueError(f"op={self.name}: expected l2=True with no other fact of it")
        if self.modulated and (any(more[1:]) or self.gated or self.rounds_xhat):
            facts = "centered and adds_residual"
            raise ValueError(f"op={self.name}: expected modulated=True with no other fact of it but {facts}")
        if self.grouped and (self.zero_centered or self.clamped or self.rounds_xhat or self.l2 or self.by_name):
            raise ValueError(f"op={self.name}: expected grouped=True with no other fact of it but centered and a bias")
        plain = not (any(more) or self.zero_centered or self.rounds_xhat or self.l2 or self.grouped or self.modulated)
        if self.rotary and not (plain and not self.gated and not self.adds_residual):
            raise ValueError(f"op={self.name}: expected rotary=True with no other fact of it")

    @property
    def takes_bias(self) -> bool:
        """Whether the op may be called with a bias."""
        return True in self.biases

    def weights_of(self, declared: tuple[bool, ...]) -> tuple[bool, ...]:
        """The values of ``Case.weight``: those ``declared``; False of a norm by length, True of one whose weights have
        names of their own.
        """
        return (False,) if self.l2 else (True,) if self.modulated or self.rotary else declared

    @property
    def of_models(self) -> bool:
        """Whether the op is an RMSNorm as language models write it: no bias, no clip, and a casting of its own."""
        return not (self.centered or self.clamped or self.takes_bias or self.by_name)

    @property
    def of_row_groups(self) -> bool:
        """Whether groups of rows may each have a weight: the op has one, for each column, and gets nothing by name."""
        return not (self.by_name or self.l2 or self.grouped)

    @cached_property
    def by_name(self) -> tuple[str, ...]:
        """The inputs of BY_NAME that the op has."""
        has = {RESIDUAL: self.adds_residual, GATE: self.gated, SCALE: self.quantises or self.modulated}
        has |= {SHIFT: self.modulated, RESIDUAL_GATE: self.gates_residual}
        has |= dict.fromkeys((COS, SIN, Q_WEIGHT, K_WEIGHT), self.rotary)
        return tuple(name for name in BY_NAME if has[name])

    @property
    def gates_residual(self) -> bool:
        """Whether what the op adds to the residual is x times a gate of each sample."""
        return self.modulated and self.adds_residual

    @property
    def counts(self) -> tuple[str, ...]:
        """The numbers that a function of the op gets by name, as it gets tensors."""
        return (GROUPS,) * self.grouped + HEAD_COUNTS * self.rotary

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes of a case that the op has and others have not."""
        return tuple(axis for name in (*self.by_name, GROUPS) for axis in self.axes_of(name))

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Those of ``axes`` that say something of this input; () if the op has no such input, or its ``weights`` do."""
        has = (*self.by_name, *[GROUPS] * self.grouped)
        own = name in has and not (self.modulated and name == SCALE)
        return AXES_OF[name] if own else ()

    @property
    def main_output(self) -> str:
        """The output that every forward must return."""
        return CODES if self.quantises else "y"

    @property
    def weight_offset(self) -> float:
        """The number that is added to the weight."""
        return 1.0 if self.zero_centered or self.modulated else 0.0

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that forward saves for backward."""
        return STATISTICS if self.centered else STATISTICS[1:]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that forward may return, ``main_output`` first."""
        residual = (RESIDUAL_OUT,) if self.adds_residual else ()
        if self.quantises:
            return (CODES, SCALE, *residual)
        return ("y", *residual, *self.statistics, *(("bitmask",) if self.clamped else ()))

    def gradients(self, *, weight: bool, bias: bool) -> tuple[str, ...]:
        """The gradients that a backward returns, if the op is called with a weight, and a bias, or without."""
        if self.quantises:
            return ()
        named = filter(None, (BY_NAME[name] for name in self.by_name))
        if self.modulated or self.rotary:
            return ("dx", *named)
        return ("dx", *named, *GRADIENTS[1:2] * weight, *GRADIENTS[2:] * bias)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the op's own numbers, which forward and backward get by keyword."""
        return ("lower_clip", "upper_clip") if self.clamped else ()

    def clips(self, limits: Sequence[float]) -> tuple[tuple[str, float], ...]:
        """``limits``, lower and upper, as ``Case.options``; () if the op is not clamped."""
        return tuple(zip(self.options, limits, strict=self.clamped))

    def y_dtypes(self, io: str, weight: str) -> tuple[str, ...]:
        """The names of the dtypes that y may have, for x in ``io`` and the weight in ``weight``.

        A rounded xhat times a wider weight has the wider dtype by promotion, and LlamaRMSNorm returns that; the dtype
        of x is right as well, and so of a gated or a modulated op. Any other op stores y in the dtype of x.
        """
        return (io, weight) if (self.rounds_xhat or self.gated or self.modulated) and weight != io else (io,)
