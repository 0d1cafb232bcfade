"""The gradients of a block of rows in fp64 and the bound of dx, with the block's share of dw, db and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.op import Op
from normcheck.oracle import backward_bounds, casting, gated, gated_sum, grouped, l2norm, modulated, reference, rotary
from normcheck.oracle.backward_bounds import Added, Block, GradientSums
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.gated_sum import GatedAdded, GateShare
from normcheck.oracle.rounding import Bound, Rules


def summed_over(op: Op, case: Case) -> int:
    """The elements over which dw and db are summed: a column of all rows, of those of a sample, or of a group with a
    weight of its own, or a channel.
    """
    if op.grouped:
        return case.M * case.split.length
    return modulated.rows_of_sample(case) if op.modulated else case.M // case.row_groups


@dataclass(frozen=True, slots=True)
class Share:
    """dw, db and the sums behind their bounds, over the rows of a block, or of several.

    ``of_gate``: dresidual_gate, None of an op that has none.
    """

    dw: Tensor
    db: Tensor
    sums: GradientSums
    doubted: tuple[Tensor, Tensor] | None
    of_gate: GateShare | None = None

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
            self.of_gate if other.of_gate is None or self.of_gate is None else self.of_gate.plus(other.of_gate),
        )


@dataclass(frozen=True, slots=True)
class GradientTruth:
    """``dx`` (m, N) in fp64 and its bound, and the block's share of dw and db.

    ``of_residual``: dresidual and its bound, in the residual's dtype; None if the op adds no residual.
    ``of_gate``: dgate (m, N) and its bound; None if the op is not gated.
    """

    dx: Tensor
    bound: Bound
    share: Share
    of_residual: tuple[Tensor, Bound] | None = None
    of_gate: tuple[Tensor, Bound] | None = None


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
    added: Added | GatedAdded | None = None,
    bias: Tensor | None = None,
) -> GradientTruth:
    """The gradients for the cotangent ``dy`` (block, N) in fp64, already masked by the bits; ``m``: rows of all blocks,
    or of a sample; the elements of a channel.

    ``given``: the errors of the kernel's statistics. ``in_doubt``: dy where the bit is in doubt, else 0; or None.
    ``added``: the cotangent of residual_out, or None. ``bias`` (C,) in fp64, of an op whose gradients depend on it.
    """
    if rows.grouping is not None:
        own = grouped.gradients(op, rules, rows, given, scale, bias, io, m, dy)
        whole, bound, part, of_silu, sums = own
        both = None if of_silu is None else (of_silu.dw, of_silu.db)
        return GradientTruth(whole, bound, Share(part.backward.dw, part.backward.db, sums, both))
    if rows.rotation is not None:
        whole, bound, sums = rotary.gradients(op, rules, rows, given, io, dy)
        return GradientTruth(whole, bound, Share(sums.dy_abs, sums.dy_abs, sums, None))
    if rows.gating is not None:
        (dx, bound), of_gate, part, moved, sums = gated.gradients(op, rules, rows, given, scale, io, m, dy)
        share = Share(part.backward.dw, part.backward.db, sums, (moved.dw, moved.db))
        return GradientTruth(dx, bound, share, of_gate=of_gate)
    if op.l2:
        of_length, bound = l2norm.output_dx(rules, rows, given, dy, io)
        sums = l2norm.no_sums(dy)
        return GradientTruth(of_length, bound, Share(sums.dy_abs, sums.dy_abs, sums, None))
    if rows.modulation is not None:
        return _of_samples(op, rules, rows, given, io, m, dy, added if isinstance(added, GatedAdded) else None)
    assert not isinstance(added, GatedAdded)
    part = Block(rows, reference.backward(op, rows, scale.g, dy), dy, given)
    doubt = None if in_doubt is None else backward_bounds.doubted(rules, rows, in_doubt, scale, given, m)
    off = None if added is None else added.off
    if casting.casts(op, rules, io):
        part, doubt = casting.gradients(rules, part, casting.cast(rules, rows, given, io, off), io, m, off)
    elif off is not None:
        doubt = backward_bounds.between_sums(rows, part.backward, dy, off)
    if scale.alone is not None:
        doubt = backward_bounds.by_lone_weight(rules, part, scale.alone, m, off, doubt)
    bound, sums = backward_bounds.output_dx(rules, part, io if added is None else _UNSTORED, doubt)
    of_doubt = None if doubt is None else (doubt.dw, doubt.db)
    dx, share = part.backward.dx, Share(part.backward.dw, part.backward.db, sums, of_doubt)
    if added is None:
        return GradientTruth(dx, bound, share)
    of_x, of_residual = backward_bounds.plus_residual(rules, bound, rows, part.backward, added)
    dx = dx + added.dresidual_out
    return GradientTruth(dx, of_x, share, (dx, of_residual))


def _of_samples(
    op: Op,
    rules: Rules,
    rows: reference.Rows,
    given: StatisticsBound,
    io: Format,
    m: int,
    dy: Tensor,
    added: GatedAdded | None,
) -> GradientTruth:
    """Those of a modulated op, see ``gradient_truth``."""
    apart = None if added is None else added.added.off
    part, moved = modulated.gradients(op, rules, rows, given, io, m, dy, apart)
    bound, sums = backward_bounds.output_dx(rules, part, io if added is None else _UNSTORED, moved)
    share = Share(part.backward.dw, part.backward.db, sums, (moved.dw, moved.db))
    if added is None:
        return GradientTruth(part.backward.dx, bound, share)
    found = gated_sum.gradients(rules, part, bound, added)
    return GradientTruth(found.dx, found.of_dx, replace(share, of_gate=found.gate), (found.ds, found.of_ds))


_UNSTORED = FORMATS["fp32"]
"""The format of sums, in which nothing is rounded for a store."""
