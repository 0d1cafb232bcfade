"""The judge of gradients: dx in blocks of rows against the fp64 reference, dw and db after all blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS
from normcheck.cases.tensor_names import DGATE, DRESIDUAL, DRESIDUAL_GATE, DSCALE, DSHIFT
from normcheck.oracle import backward_bounds, modulated, reference
from normcheck.oracle.compare import Comparison, Expectation, merge
from normcheck.oracle.forward_bounds import as_stored
from normcheck.oracle.gradient_truth import GradientTruth, Share, gradient_truth
from normcheck.oracle.judge import END_TO_END, GIVEN_REFERENCE, Checked, Judge, Reference, compared
from normcheck.oracle.rounding import Bound


def judge_gradients(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> tuple[Checked, ...]:
    """Check those of dx, dresidual, dresidual_gate, dgate, dscale, dshift, dw and db that ``gradients`` has.

    ``given``: the backward got the statistics of ``saved``, which are then exact on both sides; otherwise the bounds
    include the errors of the kernel's own. ``own_bits``: the kernel computed its own bits (autograd, or a backward that
    does not read the bitmask), so the bounds allow either value of a bit in doubt.
    """
    checked = _judged(judge, gradients, saved, given=given, own_bits=own_bits)
    if _all_fit(checked):
        return checked
    others = (_judged(other, gradients, saved, given=given, own_bits=own_bits) for other in judge.of_backward())
    return next(filter(_all_fit, others), checked)


def _all_fit(checked: tuple[Checked, ...]) -> bool:
    return all(c.comparison.ratio <= 1 for c in checked)


def _judged(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool
) -> tuple[Checked, ...]:
    case = judge.case
    of_rows = {name: gradients[name].reshape(case.M, case.N) for name in ("dx", DRESIDUAL, DGATE) if name in gradients}
    blocks: dict[str, list[tuple[int, Comparison]]] = {name: [] for name in of_rows}
    check = GIVEN_REFERENCE if given else END_TO_END
    share: Share | None = None
    unbounded = False
    for block in judge.blocks():
        t = judge.truth(block)
        right = t.gradients if _is_made_once(judge, saved, given) else _right(judge, saved, block, given, own_bits)
        share = right.share if share is None else share.plus(right.share)
        unbounded |= t.checkable is not None
        if (
            judge.op.modulated and block.stop % max(judge.summed, 1) == 0
        ):  # its last sample has no rows in the next block
            for name, first, comparison in _of_samples(judge, gradients, check, share, block, unbounded):
                blocks.setdefault(name, []).append((first, comparison))
            share, unbounded = None, False
        for name, actual in of_rows.items():
            expected, bound, fmt = right.dx, right.bound, judge.io
            if name == DGATE and right.of_gate is not None:
                expected, bound = right.of_gate
            if name == DRESIDUAL and right.of_residual is not None:
                (expected, bound), fmt = right.of_residual, FORMATS[case.residual_format]
            held = Expectation(name, check, block.start, expected, bound, fmt)
            mixed = judge.gated_sum is not None or (
                judge.sums is not None and judge.sums.of_norm is not judge.sums.of_statistics
            )  # it may overflow
            blocks[name].append((block.start, compared(judge, actual[block], held, t.checkable, finite=not mixed)))
    rows = dict.fromkeys((DSCALE, DSHIFT, DRESIDUAL_GATE), case.batch)
    checked = [Checked(name, check, merge(parts, rows.get(name, case.M))) for name, parts in blocks.items()]
    return (*checked, *(() if share is None else _sums_checks(judge, gradients, check, share, unbounded)))


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
        normed = judge.normed(block)
        mean = None if saved.mean is None else saved.mean[normed].double()
        rows = reference.normalise_with(t.rows, mean, saved.rstd[normed].double())
        statistics = as_stored(t.rows, rows)
    own = judge.formula.of(rows)
    of_case = own.scale, judge.io, judge.summed
    return gradient_truth(
        judge.op,
        judge.rules,
        rows,
        statistics,
        *of_case,
        dy,
        in_doubt,
        judge.added(block.start, block.stop),
        own.bias,
    )


def _of_samples(
    judge: Judge, gradients: Mapping[str, Tensor], check: str, share: Share, block: slice, unbounded: bool
) -> Iterator[tuple[str, int, Comparison]]:
    """The checks of dscale, dshift and dresidual_gate of the samples that end with ``block``: (B, N), sums over rows.

    ``unbounded``: some of their rows has no finite bound.
    """
    samples = modulated.samples_of(judge.case, block.start, block.stop)
    m, fmt, sums, (of_scale, of_shift) = judge.summed, judge.weight, share.sums, share.doubted or (None, None)
    bounds: dict[str, tuple[Tensor, Bound]] = {
        DSCALE: (share.dw, backward_bounds.output_dw(judge.rules, m, share.dw, sums, of_scale, fmt)),
        DSHIFT: (share.db, backward_bounds.output_db(judge.rules, m, share.db, sums, of_shift, fmt)),
    }
    if share.of_gate is not None:
        bounds[DRESIDUAL_GATE] = share.of_gate.value, share.of_gate.bound(judge.rules, m, fmt)
    for name, (expected, bound) in bounds.items():
        if name in gradients:
            actual = gradients[name].reshape(judge.case.batch, judge.case.N)[samples]
            held = Expectation(name, check, samples.start, expected, bound, fmt)
            ok = torch.zeros_like(expected[:, :1], dtype=torch.bool) if unbounded and name != DSHIFT else None
            finite = not unbounded and name != DRESIDUAL_GATE
            yield name, samples.start, compared(judge, actual, held, ok, finite=finite)


def _sums_checks(
    judge: Judge, gradients: Mapping[str, Tensor], check: str, share: Share, unbounded: bool
) -> Iterator[Checked]:
    """The checks of dw and db. ``unbounded``: some row has no finite bound."""
    m, weight, sums, (dw_doubt, db_doubt) = judge.summed, judge.weight, share.sums, share.doubted or (None, None)
    ok = torch.zeros_like(share.dw, dtype=torch.bool) if unbounded else None
    if "dw" in gradients:
        bound = backward_bounds.output_dw(judge.rules, m, share.dw, sums, dw_doubt, weight)
        held = Expectation("dw", check, 0, share.dw, bound, weight)
        yield Checked("dw", check, compared(judge, gradients["dw"].reshape(share.dw.shape), held, ok))
    if "db" in gradients:
        bound = backward_bounds.output_db(judge.rules, m, share.db, sums, db_doubt, weight)
        held = Expectation("db", check, 0, share.db, bound, weight)
        ok = ok if judge.op.grouped else None  # of others db does not depend on x
        yield Checked(
            "db", check, compared(judge, gradients["db"].reshape(share.db.shape), held, ok, finite=not unbounded)
        )
