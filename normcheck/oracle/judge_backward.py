"""dx, dw and db against the fp64 reference, block by block; dw and db once all blocks have been summed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.oracle import backward_bounds, casting, reference
from normcheck.oracle.backward_bounds import GradientSums
from normcheck.oracle.compare import Comparison, compare, merge
from normcheck.oracle.forward_bounds import EXACT
from normcheck.oracle.judge import END_TO_END, GIVEN_REFERENCE, Checked, Expectation, Judge, Reference, Truth, compared
from normcheck.oracle.rounding import Bound


def judge_gradients(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> tuple[Checked, ...]:
    """Check dx, dw and db, as far as ``gradients`` has them.

    ``given``: the backward was fed with ``saved``'s statistics, which are then exact on both sides; otherwise the
    bounds include the errors of the kernel's own. ``own_bits``: the kernel made its own bits again (autograd, or a
    backward that does not read the bitmask); then what hangs on a bit in doubt is in doubt.
    """
    op, case = judge.op, judge.case
    dx = gradients["dx"].reshape(case.M, case.N) if "dx" in gradients else None
    dx_found: list[tuple[int, Comparison]] = []
    check = GIVEN_REFERENCE if given else END_TO_END
    totals = _Totals.empty(judge)
    for block in judge.blocks():
        t = judge.truth(block)
        dy = judge.dy[block].double()
        if saved.bits is not None:
            dy = dy * saved.bits[block]
        rows, statistics = t.rows, t.statistics
        if given:
            mean = None if saved.mean is None else saved.mean[block].double()
            rows, statistics = reference.normalise_with(t.rows, mean, saved.rstd[block].double()), EXACT
        backward = reference.backward(op, rows, judge.scale.g, dy)
        doubt = None
        if own_bits and saved.doubt is not None:
            free = judge.dy[block].double() * saved.doubt[block]
            doubt = backward_bounds.doubted(judge.rules, rows, free, judge.scale, statistics, case.M)
        if casting.casts(op, judge.rules, judge.io):
            cast = casting.cast(judge.rules, rows, statistics, judge.io)
            backward, doubt = casting.gradients(judge.rules, rows, cast, backward, dy, statistics, judge.io, case.M)
        bound, sums = backward_bounds.output_dx(judge.rules, rows, backward, dy, statistics, judge.io, doubt)
        totals = totals.plus(backward, sums, doubt, t)
        if dx is not None:
            result = compared(judge, "dx", check, dx[block], backward.dx, bound, judge.io, block.start, t.judged)
            dx_found.append((block.start, result))
    checked = [Checked("dx", check, merge(dx_found, case.M))] if dx is not None else []
    return (*checked, *totals.checks(judge, gradients, check))


@dataclass(frozen=True, slots=True)
class _Totals:
    """dw, db and what their bounds are made of, summed over the blocks so far; ``spoilt``: some row has no bound."""

    dw: Tensor
    db: Tensor
    sums: GradientSums
    doubted: tuple[Tensor, Tensor] | None
    spoilt: bool

    @staticmethod
    def empty(judge: Judge) -> _Totals:
        zero = torch.zeros_like(judge.scale.g)
        return _Totals(zero, zero, GradientSums(zero, zero, zero), None, False)

    def plus(
        self, backward: reference.Backward, sums: GradientSums, doubt: backward_bounds.Doubt | None, t: Truth
    ) -> _Totals:
        mine = self.sums
        doubted = self.doubted
        if doubt is not None:
            doubted = (doubt.dw, doubt.db) if doubted is None else (doubted[0] + doubt.dw, doubted[1] + doubt.db)
        return _Totals(
            self.dw + backward.dw,
            self.db + backward.db,
            GradientSums(
                mine.dy_xhat + sums.dy_xhat,
                mine.dy_shift + sums.dy_shift,
                mine.dy_abs + sums.dy_abs,
            ),
            doubted,
            self.spoilt or t.judged is not None,
        )

    def checks(self, judge: Judge, gradients: Mapping[str, Tensor], check: str) -> list[Checked]:
        m, (dw_doubt, db_doubt) = judge.case.M, self.doubted or (None, None)
        checks = []
        if "dw" in gradients:
            bound = backward_bounds.output_dw(judge.rules, m, self.dw, self.sums, dw_doubt, judge.weight)
            if self.spoilt:
                bound = Bound(torch.full_like(bound.upper, math.inf), None, bound.terms)
            checks.append(Checked("dw", check, self._vector(judge, "dw", check, gradients["dw"], self.dw, bound)))
        if "db" in gradients:
            bound = backward_bounds.output_db(judge.rules, m, self.db, self.sums, db_doubt, judge.weight)
            checks.append(Checked("db", check, self._vector(judge, "db", check, gradients["db"], self.db, bound)))
        return checks

    def _vector(
        self, judge: Judge, name: str, check: str, actual: Tensor, expected: Tensor, bound: Bound
    ) -> Comparison:
        if judge.watch:
            judge.watch(Expectation(name, check, 0, expected, bound, judge.weight))
        if self.spoilt and name == "dw":
            expected = torch.zeros_like(expected)
        finite = not self.spoilt and judge.finite
        floor = judge.floors.get(name, 0.0)
        return compare(actual, expected, bound, judge.weight, floor=floor, finite=finite, zeros=judge.zeros)
