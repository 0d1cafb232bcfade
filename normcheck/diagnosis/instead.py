"""What a kernel does instead: the convention, or the inputs, for which all that it returned is right.

No formula of its own is needed: the judge says of each of these whether the kernel is within its bounds. ``gated.py``,
``grouped.py``, ``modulated.py`` and ``rotary.py`` have what kernels of their ops may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import ROOT_FIRST, STATISTICS
from normcheck.checks.check import Result
from normcheck.oracle.conventions import OPEN, candidates, keys, plainest, with_convention, words_of
from normcheck.oracle.gated import groups_of
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judging import judge_forward, judge_gradients
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import Model
from normcheck.result import Explanation

OF_GROUPS = "group_"
"""What the names begin with of which the widest is meant, if no case tells several apart."""

_OUTPUTS = dict.fromkeys(ROOT_FIRST, 1.0)
_MOST = 1 << 18  # elements of the largest case that is judged some twenty times


@dataclass(frozen=True)
class Instead:
    """``words``: what the kernel does, if it is right for these ``inputs`` and this ``model``, of a case it was given,
    or of another ``case``.

    Each returns what it gets if it changes nothing. ``forward``: what forward returned tells it, as gradients of other
    inputs are summed in other ways.
    """

    name: str
    words: str
    model: Callable[[Model], Model] = lambda model: model
    inputs: Callable[[Inputs], Inputs] = lambda inputs: inputs
    forward: bool = False
    case: Callable[[Case], Case] = lambda case: case


def of_conventions(op: Op, model: Model) -> Iterator[Instead]:
    """Each value of a key that a kernel of this ``model`` has not, though it declares one; of groups see ``gated``."""
    for key, values in keys(op).items():
        declared = getattr(model, key)
        for value in values:
            if key != "group" and declared not in (value, OPEN):
                words = f"{words_of(op)[key][value]}; declared {key}={declared}"
                yield Instead(f"{key}_{value}", words, lambda m, key=key, value=value: replace(m, **{key: value}))  # type: ignore[misc]


Instances = Callable[[Op, Model], Iterator[Instead]]
"""What a kernel of an op and a model may do instead."""


def explained(instead: Instances, op: Op, failed: Result, others: Iterable[Result]) -> Explanation | None:
    """The one thing that a kernel does instead, if it explains the ``failed`` result and each of the ``others``."""
    of_forward = any(c.output in op.outputs for c in failed.wrong)
    every = [each for each in instead(op, _left_open(failed)) if of_forward or not each.forward]
    left, seen = every, 0
    for result in (failed, *others):
        if "y" not in result.seen.outputs or is_special(result.case) or not 0 < result.case.room <= _MOST:
            continue
        left, seen = [each for each in left if _fits(op, result, each)], seen + 1
        if not left:
            return None
    if seen < 2 or (len(left) > 1 and not all(each.name.startswith(OF_GROUPS) for each in left)):
        return None  # of groups that no case tells apart the widest are meant, the first
    elements = sum(c.comparison.numel for c in failed.wrong)
    return Explanation(name=left[0].name, words=left[0].words, cases=seen, elements=elements, others=len(every) - 1)


def tells(instead: Instances, op: Op, result: Result, name: str) -> bool:
    """Whether nothing but what is called ``name`` explains the result alone; other groups may, if they fill its row."""
    if is_special(result.case) or "y" not in result.seen.outputs:
        return False
    alike = (name, OF_GROUPS) if name.startswith(OF_GROUPS) else name
    return all(each.name.startswith(alike) or not _fits(op, result, each) for each in instead(op, _left_open(result)))


def _fits(op: Op, result: Result, told: Instead) -> bool:
    """Whether all that was returned is right for what is ``told``, in a convention that the kernel leaves open."""
    base, inputs = told.model(_left_open(result)), told.inputs(make(result.case, op, "cpu"))
    case = told.case(result.case)
    return any(
        _is_right(op, case, inputs, with_convention(base, each), result, told.forward)
        for each in dict.fromkeys(plainest(each, case) for each in candidates(op, base))
    )


def _left_open(result: Result) -> Model:
    """The model of a result, with what the kernel does not declare open again."""
    return with_convention(result.model, tuple((key, OPEN) for key in result.open))


def _is_right(op: Op, case: Case, inputs: Inputs, model: Model, result: Result, forward: bool) -> bool:
    outputs: Mapping[str, torch.Tensor] = {
        name: t.detach().cpu()
        for name, t in result.seen.outputs.items()
        if name not in STATISTICS or t.numel() == case.M * groups_of(op, case, model)
    }
    judge = judge_of(op, case, inputs, replace(model, y_given_stats=False), _OUTPUTS)
    checked, saved = judge_forward(judge, outputs)
    gradients = {} if forward else {name: t.detach().cpu() for name, t in result.seen.gradients.items()}
    checked += judge_gradients(judge, gradients, saved, given=False)
    return all(c.comparison.ratio <= 1 for c in checked)
