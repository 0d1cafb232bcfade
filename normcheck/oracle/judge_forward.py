"""The judge of what a forward returns, y and what it stores beside y; ``judge_backward.py`` has that of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import format_of
from normcheck.cases.tensor_names import RESIDUAL_OUT, STATISTICS
from normcheck.oracle import bitmask, forward_bounds, reference, residual, rounding
from normcheck.oracle.compare import Comparison, Expectation, merge
from normcheck.oracle.judge import END_TO_END, GIVEN_OWN, Checked, Judge, Reference, Truth, compared
from normcheck.oracle.rounding import Bound


def judge_forward(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[tuple[Checked, ...], Reference]:
    """Check y and those of residual_out, the statistics and the bitmask that ``outputs`` has; return also the tensors
    for a backward.

    The checks are in the order in which a kernel computes the outputs, so the first wrong one is the cause of others.
    """
    op, case = judge.op, judge.case
    comparisons: dict[tuple[str, str], list[tuple[int, Comparison]]] = {}
    saved: dict[str, list[Tensor]] = {"mean": [], "rstd": [], "bits": [], "ties": [], "doubt": []}
    y = outputs["y"].reshape(case.M, case.N)
    fmt = format_of(y.dtype)
    normed = case.M * judge.groups  # a statistic for each of other groups is none of these
    own = {n: outputs[n].reshape(-1, 1) for n in op.statistics if n in outputs and outputs[n].numel() == normed}
    got_bits = bits_of(outputs["bitmask"], case) if "bitmask" in outputs else None
    for block in judge.blocks():
        t, first = judge.stored(block, fmt), block.start
        results = [*sum_checks(judge, outputs, block), *_statistics_checks(judge, t, own, judge.normed(block), saved)]
        if len(own) == len(op.statistics) and judge.rules.model.y_given_stats:
            results.append(("y", GIVEN_OWN, _y_given_stats(judge, t, y[block], own, block)))
        whole = Expectation("y", END_TO_END, first, t.forward.y, t.y.y, fmt)
        results.append(("y", END_TO_END, compared(judge, y[block], whole, t.checkable)))
        if op.clamped:
            doubt = doubtful_bits(judge, t)
            saved["bits"].append(reference.bits(t.forward.z, judge.options))
            saved["ties"].append(bitmask.ties(t.forward.z, judge.options))
            saved["doubt"].append(doubt | saved["ties"][-1])
            if got_bits is not None:
                results.append(("bitmask", END_TO_END, _bit_comparison(judge, t, got_bits[block], doubt, first)))
        for output, check, comparison in results:
            comparisons.setdefault((output, check), []).append((first, comparison))
    checked = tuple(
        Checked(output, check, merge(parts, case.M * (judge.groups if output in STATISTICS else 1)))
        for (output, check), parts in comparisons.items()
    )
    whole_of = {name: torch.cat(parts) if parts else None for name, parts in saved.items()}
    rstd = whole_of["rstd"]
    assert rstd is not None
    return checked, Reference(whole_of["mean"], rstd, whole_of["bits"], whole_of["ties"], whole_of["doubt"])


def sum_checks(judge: Judge, outputs: Mapping[str, Tensor], block: slice) -> list[tuple[str, str, Comparison]]:
    """The check of residual_out for a block, if the op has that and it was returned."""
    sums = judge.sums
    if not judge.op.adds_residual or RESIDUAL_OUT not in outputs:
        return []
    if judge.gated_sum is not None:
        expected, bound = judge.gated_sum.bound(block)
    else:
        assert sums is not None
        expected, bound = sums.stored[block].double(), residual.stored_bound(judge.rules, sums, block)
    finite = torch.isfinite(expected)
    held = Expectation(RESIDUAL_OUT, END_TO_END, block.start, expected, bound, FORMATS[judge.case.residual_format])
    actual = outputs[RESIDUAL_OUT].reshape(judge.case.M, judge.case.N)[block]
    return [(RESIDUAL_OUT, END_TO_END, compared(judge, actual, held, None if bool(finite.all()) else finite))]


def _statistics_checks(
    judge: Judge, t: Truth, own: Mapping[str, Tensor], block: slice, saved: Mapping[str, list[Tensor]]
) -> list[tuple[str, str, Comparison]]:
    results = []
    for name, expected, bound in (("mean", t.rows.mean, t.statistics.mean), ("rstd", t.rows.rstd, t.statistics.rstd)):
        if expected is None or bound is None:
            continue
        saved[name].append(expected.float())
        if name in own:
            held = Expectation(name, END_TO_END, block.start, expected, bound, FORMATS["fp32"])
            results.append((name, END_TO_END, compared(judge, own[name][block], held, t.checkable)))
    return results


def _y_given_stats(judge: Judge, t: Truth, y: Tensor, own: Mapping[str, Tensor], block: slice) -> Comparison:
    """Compare y with the formula on the kernel's saved statistics: a bound that does not depend on N."""
    normed = judge.normed(block)
    mean = own["mean"][normed].double() if "mean" in own else None
    rows = reference.normalise_with(t.rows, mean, own["rstd"][normed].double())
    fmt = format_of(y.dtype)
    forward, bound = judge.formula.forward(rows, forward_bounds.saved_statistics(judge.rules, rows), fmt)
    ok, own_sum = t.checkable, rows.rstd if mean is None else rows.rstd + mean
    if not math.isfinite(float(own_sum.sum())):  # their own check finds statistics that are not finite
        finite = torch.isfinite(own_sum)
        ok = finite if ok is None else finite & ok
    return compared(judge, y, Expectation("y", GIVEN_OWN, block.start, forward.y, bound.y, fmt), ok)


def bits_of(returned: Tensor, case: Case) -> Tensor:
    """The bitmask as bool (M, N), from either form that a kernel may return: bool, or packed in uint8."""
    if returned.dtype == torch.bool:
        return returned.reshape(case.M, case.N)
    return bitmask.unpack(returned.reshape(case.M, bitmask.packed_columns(case.N)), case.N)


def doubtful_bits(judge: Judge, t: Truth) -> Tensor:
    """Bool (m, N): the bits that are in doubt.

    NaN is not between the limits, so a z that is NaN by a NaN or an infinity in x has the bit 0. If z is NaN in fp64
    only, such as 0 * inf with eps 0, its bit is in doubt.
    """
    how = judge.rules.model.bitmask_compare
    doubt = bitmask.doubtful(t.forward.z, t.y.before_store, judge.options, judge.io, how)
    if t.checkable is None:
        return doubt
    nan_by_x = ~torch.isfinite(t.rows.x_abs.sum(1, keepdim=True)) & torch.isnan(t.forward.z)
    return (doubt | ~t.checkable) & ~nan_by_x


def _bit_comparison(judge: Judge, t: Truth, got: Tensor, doubt: Tensor, first: int) -> Comparison:
    """Compare bits: a wrong one has error 1 and bound 0; one in doubt has no bound, and counts as uncheckable."""
    bound = Bound(torch.full_like(t.forward.z, rounding.NO_ROOM).masked_fill_(doubt, math.inf), None, dict)
    expected = reference.bits(t.forward.z, judge.options).double()
    held = Expectation("bitmask", END_TO_END, first, expected, bound, FORMATS["fp32"])
    result = compared(judge, got.double(), held, finite=False)
    worst = result.worst and replace(result.worst, ulps=result.worst.error)
    return replace(result, max_ulp=result.max_abs, worst=worst)  # an ulp of a bit is the bit itself
