"""The judge of gradients: dx in blocks of rows against the fp64 reference, dw and db after all blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.oracle import backward_bounds, casting, reference
from normcheck.oracle.backward_bounds import Block, GradientSums
from normcheck.oracle.compare import Comparison, Expectation, merge
from normcheck.oracle.forward_bounds import EXACT
from normcheck.oracle.judge import END_TO_END, GIVEN_REFERENCE, Checked, Judge, Reference, compared


def judge_gradients(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> tuple[Checked, ...]:
    """Check those of dx, dw and db that ``gradients`` has.

    ``given``: the backward got the statistics of ``saved``, which are then exact on both sides; otherwise the bounds
    include the errors of the kernel's own. ``own_bits``: the kernel computed its own bits (autograd, or a backward that
    does not read the bitmask), so the bounds allow either value of a bit in doubt.
    """
    op, case = judge.op, judge.case
    dx = gradients["dx"].reshape(case.M, case.N) if "dx" in gradients else None
    dx_blocks: list[tuple[int, Comparison]] = []
    check = GIVEN_REFERENCE if given else END_TO_END
    totals: _Totals | None = None
    for block in judge.blocks():
        t = judge.truth(block)
        dy = judge.dy[block].double()
        if saved.bits is not None:
            dy = dy * saved.bits[block]
        rows, statistics = t.rows, t.statistics
        if given:
            mean = None if saved.mean is None else saved.mean[block].double()
            rows, statistics = reference.normalise_with(t.rows, mean, saved.rstd[block].double()), EXACT
        part = Block(rows, reference.backward(op, rows, judge.scale.g, dy), dy, statistics)
        doubt = None
        if own_bits and saved.doubt is not None:
            dy_in_doubt = judge.dy[block].double() * saved.doubt[block]
            doubt = backward_bounds.doubted(judge.rules, rows, dy_in_doubt, judge.scale, statistics, case.M)
        if casting.casts(op, judge.rules, judge.io):
            cast = casting.cast(judge.rules, rows, statistics, judge.io)
            part, doubt = casting.gradients(judge.rules, part, cast, judge.io, case.M)
        bound, sums = backward_bounds.output_dx(judge.rules, part, judge.io, doubt)
        of_doubt = None if doubt is None else (doubt.dw, doubt.db)
        here = _Totals(part.backward.dw, part.backward.db, sums, of_doubt, t.checkable is not None)
        totals = here if totals is None else totals.plus(here)
        if dx is not None:
            held = Expectation("dx", check, block.start, part.backward.dx, bound, judge.io)
            dx_blocks.append((block.start, compared(judge, dx[block], held, t.checkable)))
    checked = [Checked("dx", check, merge(dx_blocks, case.M))] if dx is not None else []
    assert totals is not None  # there is a block even without rows
    return (*checked, *totals.checks(judge, gradients, check))


@dataclass(frozen=True, slots=True)
class _Totals:
    """dw, db and the sums behind their bounds, over the blocks so far; ``unbounded``: some row has no finite bound."""

    dw: Tensor
    db: Tensor
    sums: GradientSums
    doubted: tuple[Tensor, Tensor] | None
    unbounded: bool

    def plus(self, other: _Totals) -> _Totals:
        """These and those of the next block."""
        one, two = self.sums, other.sums
        doubted = self.doubted or other.doubted
        if self.doubted is not None and other.doubted is not None:
            doubted = (self.doubted[0] + other.doubted[0], self.doubted[1] + other.doubted[1])
        return _Totals(
            self.dw + other.dw,
            self.db + other.db,
            GradientSums(one.dy_xhat + two.dy_xhat, one.dy_shift + two.dy_shift, one.dy_abs + two.dy_abs),
            doubted,
            self.unbounded or other.unbounded,
        )

    def checks(self, judge: Judge, gradients: Mapping[str, Tensor], check: str) -> list[Checked]:
        m, weight, (dw_doubt, db_doubt) = judge.case.M, judge.weight, self.doubted or (None, None)
        checks = []
        if "dw" in gradients:
            bound = backward_bounds.output_dw(judge.rules, m, self.dw, self.sums, dw_doubt, weight)
            held = Expectation("dw", check, 0, self.dw, bound, weight)
            ok = torch.zeros_like(self.dw, dtype=torch.bool) if self.unbounded else None
            checks.append(Checked("dw", check, compared(judge, gradients["dw"], held, ok)))
        if "db" in gradients:
            bound = backward_bounds.output_db(judge.rules, m, self.db, self.sums, db_doubt, weight)
            held = Expectation("db", check, 0, self.db, bound, weight)
            checks.append(Checked("db", check, compared(judge, gradients["db"], held, finite=not self.unbounded)))
        return checks
