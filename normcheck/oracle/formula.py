"""What y is made of, beside the normalised rows: for a truth, which must not keep the judge that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.cases.op import Op
from normcheck.oracle import casting, forward_bounds, gated, grouped, l2norm, modulated, reference, rotary
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.rounding import Rules


@dataclass(frozen=True)
class Formula:
    """What y is made of, beside the rows: ``scale``, ``stored_bias`` (N,), ``io``, the format of x, and ``options``.

    Both are (G, N) if groups of rows have their own; ``of`` has those of each row.

    A truth that kept its judge would keep itself, and some forty tensors in fp64 with it, until the garbage collector
    looks.
    """

    op: Op
    rules: Rules
    scale: reference.Scale
    stored_bias: Tensor | None
    io: Format
    options: Mapping[str, float]

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias in fp64."""
        return None if self.stored_bias is None else self.stored_bias.double()

    @cached_property
    def bias_abs(self) -> Tensor | None:
        """|bias|."""
        return None if self.bias is None else self.bias.abs()

    def of(self, rows: reference.Rows) -> Formula:
        """This formula with the scale and the bias of each of these rows, (m, N), if they are not the same for all."""
        if rows.stack is None:
            return self
        at, weight, bias = rows.stack.at, self.scale.weight, self.stored_bias
        scale = reference.Scale(weight[at], self.scale.offset) if weight.dim() > 1 else self.scale
        return replace(self, scale=scale, stored_bias=None if bias is None else bias[at])

    def forward(
        self, rows: reference.Rows, given: StatisticsBound, fmt: Format
    ) -> tuple[reference.Forward, forward_bounds.YBound]:
        """y and its bound for a block of rows whose statistics are off by ``given``; y is stored in ``fmt``."""
        if rows.gating is not None:
            return gated.output_y(self.rules, rows, self.scale, given, self.io, fmt)
        if rows.grouping is not None:
            return grouped.output_y(self.op, self.rules, rows, self.scale, self.bias, given, self.io, fmt)
        if rows.modulation is not None:
            return modulated.output_y(self.op, self.rules, rows, given, self.io, fmt)
        if rows.rotation is not None:
            return rotary.output_y(self.op, self.rules, rows, given, self.io)
        own = self.of(rows)
        if casting.casts(self.op, self.rules, self.io):
            return casting.output_y(self.rules, casting.cast(self.rules, rows, given, self.io), own.scale, fmt)
        forward = reference.forward(self.op, rows, own.scale.g, own.bias, self.options)
        rules = l2norm.with_y(self.rules) if self.op.l2 else self.rules
        return forward, forward_bounds.output_y(rules, rows, forward, own.scale, own.bias_abs, given, fmt)
