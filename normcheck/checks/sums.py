"""The sum that a kernel norms, of those that an op with a residual leaves open: found in what its forward returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from normcheck.cases.ops import RESIDUAL_OUT, ROOT_FIRST
from normcheck.checks.gradients import InFlight
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.judging import judge_forward
from normcheck.oracle.residual import SUMS, are_one, candidates

_NO_DETAILS = dict.fromkeys(ROOT_FIRST, 1.0)


@dataclass(frozen=True, slots=True)
class Fitting:
    """A case ``running``, judged as if the kernel norms one sum; ``sums``: those that it fits so.

    They are several if the case cannot tell them apart, none if no sum fits, and None if the kernel declares its sum or
    adds none.
    """

    running: InFlight
    sums: tuple[str, ...] | None


def fitting(running: InFlight, outputs: Mapping[str, Tensor], may_be: tuple[str, ...]) -> Iterator[Fitting]:
    """The sums that what a forward returned fits, each with the judge of it, as far as they ``may_be`` the kernel's.

    If none of these fits, the case is judged as if the kernel normed the nearest of them; then ``sums`` are others.
    """
    how = candidates(running.op, running.case, running.model.sum)
    if running.model.sum != "any" or not how:
        yield Fitting(running, None)
        return
    if are_one(running.case):
        yield Fitting(_with_sum(running, how[0]), SUMS)
        return
    worst = {each: _worst(_judge(running, each, details=False), outputs) for each in may_be}
    fits = tuple(each for each in may_be if worst[each] <= 1)
    for number, each in enumerate(fits):
        yield Fitting(_with_sum(running, each), fits[number:])
    if not fits:
        others = [each for each in how if each not in may_be]
        fits = tuple(each for each in others if _worst(_judge(running, each, details=False), outputs) <= 1)
        yield Fitting(_with_sum(running, min(worst, key=lambda each: worst[each])), fits)


def _with_sum(running: InFlight, how: str) -> InFlight:
    model = replace(running.model, sum=how)
    return replace(running, model=model, judge=_judge(running, how, details=True))


def _judge(running: InFlight, how: str, *, details: bool) -> Judge:
    old = running.judge
    return judge_of(
        running.op,
        running.case,
        running.pristine,
        replace(running.model, sum=how),
        old.floors if details else _NO_DETAILS,
        zeros=old.zeros and details,
        watch=old.watch if details else None,
        fused=old.fused,
    )


def _worst(judge: Judge, outputs: Mapping[str, Tensor]) -> float:
    """The largest ratio of what depends on the sum that is normed; infinite if one is NaN."""
    checked, _ = judge_forward(judge, outputs)
    ratios = [c.comparison.ratio for c in checked if c.output != RESIDUAL_OUT]
    return max((ratio if ratio == ratio else float("inf") for ratio in ratios), default=0.0)
