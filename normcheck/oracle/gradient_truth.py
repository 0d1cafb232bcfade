"""The gradients of a block of rows in fp64 and the bound of dx, with the block's share of dw, db and their bounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.cases.ops import Op
from normcheck.oracle import backward_bounds, casting, reference
from normcheck.oracle.backward_bounds import Block, GradientSums
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.rounding import Bound, Rules


@dataclass(frozen=True, slots=True)
class Share:
    """dw, db and the sums behind their bounds, over the rows of a block, or of several."""

    dw: Tensor
    db: Tensor
    sums: GradientSums
    doubted: tuple[Tensor, Tensor] | None

    def plus(self, other: Share) -> Share:
        """These and those of the next block."""
        one, two = self.sums, other.sums
        doubted = self.doubted or other.doubted
        if self.doubted is not None and other.doubted is not None:
            doubted = (self.doubted[0] + other.doubted[0], self.doubted[1] + other.doubted[1])
        return Share(
            self.dw + other.dw,
            self.db + other.db,
            GradientSums(one.dy_xhat + two.dy_xhat, one.dy_shift + two.dy_shift, one.dy_abs + two.dy_abs),
            doubted,
        )


@dataclass(frozen=True, slots=True)
class GradientTruth:
    """``dx`` (m, N) in fp64 and its bound, and the block's share of dw and db."""

    dx: Tensor
    bound: Bound
    share: Share


def gradient_truth(
    op: Op,
    rules: Rules,
    rows: reference.Rows,
    given: StatisticsBound,
    scale: reference.Scale,
    io: Format,
    m: int,
    dy: Tensor,
    in_doubt: Tensor | None = None,
) -> GradientTruth:
    """The gradients for the cotangent ``dy`` (block, N) in fp64, already masked by the bits; ``m``: rows of all blocks.

    ``given``: the errors of the kernel's statistics. ``in_doubt``: dy where the bit is in doubt, else 0; or None.
    """
    part = Block(rows, reference.backward(op, rows, scale.g, dy), dy, given)
    doubt = None if in_doubt is None else backward_bounds.doubted(rules, rows, in_doubt, scale, given, m)
    if casting.casts(op, rules, io):
        part, doubt = casting.gradients(rules, part, casting.cast(rules, rows, given, io), io, m)
    bound, sums = backward_bounds.output_dx(rules, part, io, doubt)
    of_doubt = None if doubt is None else (doubt.dw, doubt.db)
    return GradientTruth(part.backward.dx, bound, Share(part.backward.dw, part.backward.db, sums, of_doubt))
