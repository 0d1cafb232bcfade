"""The judge of gradients: dx in blocks of rows against the fp64 reference, dw and db after all blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from normcheck.oracle import backward_bounds, reference
from normcheck.oracle.compare import Comparison, Expectation, merge
from normcheck.oracle.forward_bounds import EXACT
from normcheck.oracle.gradient_truth import GradientTruth, Share, gradient_truth
from normcheck.oracle.judge import END_TO_END, GIVEN_REFERENCE, Checked, Judge, Reference, compared


def judge_gradients(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> tuple[Checked, ...]:
    """Check those of dx, dw and db that ``gradients`` has.

    ``given``: the backward got the statistics of ``saved``, which are then exact on both sides; otherwise the bounds
    include the errors of the kernel's own. ``own_bits``: the kernel computed its own bits (autograd, or a backward that
    does not read the bitmask), so the bounds allow either value of a bit in doubt.
    """
    case = judge.case
    dx = gradients["dx"].reshape(case.M, case.N) if "dx" in gradients else None
    dx_blocks: list[tuple[int, Comparison]] = []
    check = GIVEN_REFERENCE if given else END_TO_END
    share: Share | None = None
    unbounded = False
    for block in judge.blocks():
        t = judge.truth(block)
        right = t.gradients if _is_made_once(judge, saved, given) else _right(judge, saved, block, given, own_bits)
        share = right.share if share is None else share.plus(right.share)
        unbounded |= t.checkable is not None
        if dx is not None:
            held = Expectation("dx", check, block.start, right.dx, right.bound, judge.io)
            dx_blocks.append((block.start, compared(judge, dx[block], held, t.checkable)))
    checked = [Checked("dx", check, merge(dx_blocks, case.M))] if dx is not None else []
    assert share is not None  # there is a block even without rows
    return (*checked, *_sums_checks(judge, gradients, check, share, unbounded))


def _is_made_once(judge: Judge, saved: Reference, given: bool) -> bool:
    """Whether the gradients depend on nothing but the case, which keeps them if it is small."""
    return judge.case.small and not given and saved.bits is None


def _right(judge: Judge, saved: Reference, block: slice, given: bool, own_bits: bool) -> GradientTruth:
    t, dy = judge.truth(block), judge.dy[block].double()
    in_doubt = dy * saved.doubt[block] if own_bits and saved.doubt is not None else None
    if saved.bits is not None:
        dy = dy * saved.bits[block]
    rows, statistics = t.rows, t.statistics
    if given:
        mean = None if saved.mean is None else saved.mean[block].double()
        rows, statistics = reference.normalise_with(t.rows, mean, saved.rstd[block].double()), EXACT
    of_case = judge.scale, judge.io, judge.case.M
    return gradient_truth(judge.op, judge.rules, rows, statistics, *of_case, dy, in_doubt)


def _sums_checks(
    judge: Judge, gradients: Mapping[str, Tensor], check: str, share: Share, unbounded: bool
) -> Iterator[Checked]:
    """The checks of dw and db. ``unbounded``: some row has no finite bound."""
    m, weight, sums, (dw_doubt, db_doubt) = judge.case.M, judge.weight, share.sums, share.doubted or (None, None)
    if "dw" in gradients:
        bound = backward_bounds.output_dw(judge.rules, m, share.dw, sums, dw_doubt, weight)
        held = Expectation("dw", check, 0, share.dw, bound, weight)
        ok = torch.zeros_like(share.dw, dtype=torch.bool) if unbounded else None
        yield Checked("dw", check, compared(judge, gradients["dw"], held, ok))
    if "db" in gradients:
        bound = backward_bounds.output_db(judge.rules, m, share.db, sums, db_doubt, weight)
        held = Expectation("db", check, 0, share.db, bound, weight)
        yield Checked("db", check, compared(judge, gradients["db"], held, finite=not unbounded))
