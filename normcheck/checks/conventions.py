"""The way in which a kernel computes an op that leaves several open: found in what its forward returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import RESIDUAL_OUT, ROOT_FIRST
from normcheck.checks.gradients import InFlight
from normcheck.oracle.conventions import Convention, candidates, plainest, with_convention
from normcheck.oracle.judge import Checked, Judge, Reference, judge_of
from normcheck.oracle.judging import judge_forward
from normcheck.oracle.tolerances import Model

_UNFIT = 2.0
"""The ratio of a convention whose sum is not the kernel's."""

Misfit = tuple[bool, float]
"""Whether most elements of an output do not fit a convention, and the largest ratio. One that few do not fit is
nearer than one by which all are somewhat wrong: a kernel that keeps to it may have one wrong row.
"""

_NO_DETAILS = dict.fromkeys(ROOT_FIRST, 1.0)


@dataclass(frozen=True, slots=True)
class Fitting:
    """A case ``running``, judged as if the kernel kept to one convention; ``conventions``: those that it fits so.

    They are several if the case cannot tell them apart, none if none fits, and None if nothing is left open.
    ``nearest``: the one that it was judged by, if it does not fit it. ``forward``: how what the forward returned was
    judged, and what the reference saves, if that is known by now.
    """

    running: InFlight
    conventions: tuple[Convention, ...] | None
    nearest: Convention = ()
    forward: tuple[tuple[Checked, ...], Reference] | None = None


def predicted(op: Op, case: Case, model: Model, may_be: tuple[Convention, ...] | None) -> Model:
    """The model by which ``fitting`` will judge the case: that of the one convention that is left, else ``model``."""
    asked = candidates(op, model) if may_be is None else may_be
    distinct = {plainest(each, case) for each in asked}
    return with_convention(model, *distinct) if len(distinct) == 1 else model


def fitting(
    running: InFlight, outputs: Mapping[str, Tensor], may_be: tuple[Convention, ...] | None
) -> Iterator[Fitting]:
    """The conventions that what a forward returned fits, each with the judge of it, as far as they ``may_be`` the
    kernel's; None: any.

    If none of these fits, the case is judged as if the kernel had the nearest of them; then ``conventions`` are others.
    """
    every = candidates(running.op, running.model)
    if every == ((),):
        yield Fitting(running, None)
        return
    if len({plainest(each, running.case) for each in every}) == 1:
        yield Fitting(_with(running, every[0]), every)
        return
    asked = every if may_be is None else may_be
    distinct = {plainest(each, running.case) for each in asked}
    if len(distinct) == 1 and running.judge.watch is None:
        only = _with(running, *distinct)  # as in most cases: its reference is made once
        forward = judge_forward(only.judge, outputs)
        if _misfit(only.judge, forward[0])[1] <= 1:
            yield Fitting(only, asked, forward=forward)
            return
    misfits: dict[Convention, Misfit] = {}
    fits = _fitting(running, outputs, asked, misfits)
    tried = set()
    for number, each in enumerate(fits):
        if plainest(each, running.case) not in tried:
            tried.add(plainest(each, running.case))
            yield Fitting(_with(running, each), fits[number:])
    if not fits:
        nearest = min(asked, key=lambda each: misfits[plainest(each, running.case)])
        others = tuple(each for each in every if each not in asked)
        yield Fitting(_with(running, nearest), _fitting(running, outputs, others, misfits), nearest)


def _fitting(
    running: InFlight, outputs: Mapping[str, Tensor], asked: tuple[Convention, ...], misfits: dict[Convention, Misfit]
) -> tuple[Convention, ...]:
    """Those of ``asked`` that the outputs fit. ``misfits``: convention -> how they misfit it; it grows."""
    for each in asked:
        same = plainest(each, running.case)
        if same not in misfits:
            judge = _judge(running, same, details=False)
            for part in (replace(judge, begins=True), judge)[len(judge.blocks()) == 1 :]:
                misfits[same] = _misfit(part, judge_forward(part, outputs)[0])
                if misfits[same][1] > 1:
                    break  # most do not fit the first block, of hundreds in a large case
    return tuple(each for each in asked if misfits[plainest(each, running.case)][1] <= 1)


def _with(running: InFlight, convention: Convention) -> InFlight:
    convention = plainest(convention, running.case)
    model, judge = with_convention(running.model, convention), running.judge
    if judge.rules.model != model:
        judge = _judge(running, convention, details=True)
    return replace(running, model=model, judge=judge)


def _judge(running: InFlight, convention: Convention, *, details: bool) -> Judge:
    old = running.judge
    return judge_of(
        running.op,
        running.case,
        running.pristine,
        with_convention(running.model, convention),
        old.floors if details else _NO_DETAILS,
        zeros=old.zeros and details,
        watch=old.watch if details else None,
        fused=old.fused,
    )


def _misfit(judge: Judge, checked: tuple[Checked, ...]) -> Misfit:
    """How those misfit that depend on the convention; a NaN infinitely.

    So does the sum that a gate is part of: one that does not fit is no kernel's, but says nothing of how near y is.
    """
    found = {c.output: c.comparison for c in checked}
    of_sum = found.pop(RESIDUAL_OUT, None)
    worst = max((one.ratio if one.ratio == one.ratio else float("inf") for one in found.values()), default=0.0)
    mostly = any(one.wrong is not None and 2 * int(one.wrong.sum()) > one.numel for one in found.values())
    if judge.op.gates_residual and of_sum is not None and not of_sum.ratio <= 1:
        worst = max(worst, _UNFIT)
    return mostly, worst
