"""What a gated norm computes instead: the convention, or the inputs, for which all that a kernel returned is right.

No formula of its own is needed: the judge says of each of these whether the kernel is within its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import Op
from normcheck.checks.check import Result
from normcheck.oracle.conventions import IN_WORDS, OPEN, candidates, keys, plainest, with_convention
from normcheck.oracle.gated import group_of
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judging import judge_forward, judge_gradients
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import Model
from normcheck.result import Explanation

_OUTPUTS = dict.fromkeys(("rstd", "y", "dx", "dgate", "dw"), 1.0)
_GROUPS = (32, 64, 128, 256, 512)
_MOST = 1 << 18  # elements of the largest case that is judged some twenty times
_OF_GROUPS = "group_"
_OPEN = 100.0  # the sigmoid of it is 1 in fp32


@dataclass(frozen=True)
class Instead:
    """``words``: what the kernel does, if it is right for these ``inputs`` and this ``model``, of a case it was given.

    Each returns what it gets if it changes nothing.
    """

    name: str
    words: str
    model: Callable[[Model], Model] = lambda model: model
    inputs: Callable[[Inputs], Inputs] = lambda inputs: inputs


def _swapped(inputs: Inputs) -> Inputs:
    assert inputs.gate is not None
    return replace(inputs, x=inputs.gate, gate=inputs.x)


def _unweighted(inputs: Inputs) -> Inputs:
    return replace(inputs, weight=None if inputs.weight is None else torch.ones_like(inputs.weight))


def _one_plus(inputs: Inputs) -> Inputs:
    return replace(inputs, weight=None if inputs.weight is None else inputs.weight + 1)


def _opened(inputs: Inputs) -> Inputs:
    assert inputs.gate is not None
    return replace(inputs, gate=torch.full_like(inputs.gate, _OPEN))


def _packed(inputs: Inputs) -> Inputs:
    assert inputs.gate is not None
    gate = inputs.gate
    strides = torch.empty(gate.shape, device="meta").stride()
    return replace(inputs, gate=gate if gate.stride() == strides else gate.as_strided(gate.shape, strides))


def _rolled(inputs: Inputs) -> Inputs:
    assert inputs.gate is not None
    gate = inputs.gate
    return replace(inputs, gate=gate.reshape(-1, gate.shape[-1]).roll(-1, 0).reshape(gate.shape))


OF_INPUTS = (
    Instead("gate_swapped", "x and the gate are swapped", inputs=_swapped),
    Instead("weight_missing", "the weight is never applied", inputs=_unweighted),
    Instead("one_plus", "1 + weight is the factor", inputs=_one_plus),
    Instead("gate_missing", "the gate is never applied", lambda m: replace(m, activation="sigmoid"), _opened),
    Instead("gate_stride_ignored", "the gate's row stride is ignored: its rows are read as packed", inputs=_packed),
    Instead("gate_of_next_row", "each row is gated by the gate of the next row", inputs=_rolled),
)


def instead(op: Op, model: Model) -> Iterator[Instead]:
    """What a kernel of this ``model`` may do instead, the conventions that it does not declare first."""
    for key, values in keys(op).items():
        declared = getattr(model, key)
        for value in values:
            if key != "group" and declared not in (value, OPEN):
                words = f"{IN_WORDS[key][value]}; declared {key}={declared}"
                yield Instead(f"{key}_{value}", words, lambda m, key=key, value=value: replace(m, **{key: value}))  # type: ignore[misc]
    for group in (0, *_GROUPS):
        if model.group not in (group, OPEN):
            told = f"takes the mean over groups of {group} columns" if group else "takes the mean over the whole row"
            words = f"{told}; declared group={model.group}"
            yield Instead(f"{_OF_GROUPS}{group}", words, lambda m, group=group: replace(m, group=group))  # type: ignore[misc]
    yield from OF_INPUTS


def explained(op: Op, failed: Result, others: Iterable[Result]) -> Explanation | None:
    """The one thing that a kernel does instead, if it explains the ``failed`` result and each of the ``others``."""
    every = list(instead(op, _left_open(failed)))
    left, seen = every, 0
    for result in (failed, *others):
        if "y" not in result.seen.outputs or is_special(result.case) or not 0 < result.case.room <= _MOST:
            continue
        left, seen = [each for each in left if _fits(op, result, each)], seen + 1
        if not left:
            return None
    if seen < 2 or (len(left) > 1 and not all(each.name.startswith(_OF_GROUPS) for each in left)):
        return None  # of groups that no case tells apart the widest are meant, the first
    elements = sum(c.comparison.numel for c in failed.wrong)
    return Explanation(name=left[0].name, words=left[0].words, cases=seen, elements=elements, others=len(every) - 1)


def tells(op: Op, result: Result, name: str) -> bool:
    """Whether nothing but what is called ``name`` explains the result alone; other groups may, if they fill its row."""
    if is_special(result.case) or "y" not in result.seen.outputs:
        return False
    alike = (name, _OF_GROUPS) if name.startswith(_OF_GROUPS) else name
    return all(each.name.startswith(alike) or not _fits(op, result, each) for each in instead(op, _left_open(result)))


def _fits(op: Op, result: Result, told: Instead) -> bool:
    """Whether all that was returned is right for what is ``told``, in a convention that the kernel leaves open."""
    case = result.case
    base, inputs = told.model(_left_open(result)), told.inputs(make(case, op, "cpu"))
    return any(
        _is_right(op, case, inputs, with_convention(base, each), result)
        for each in dict.fromkeys(plainest(each, case) for each in candidates(op, base))
    )


def _left_open(result: Result) -> Model:
    """The model of a result, with what the kernel does not declare open again."""
    return with_convention(result.model, tuple((key, OPEN) for key in result.open))


def _is_right(op: Op, case: Case, inputs: Inputs, model: Model, result: Result) -> bool:
    outputs: Mapping[str, torch.Tensor] = {
        name: t.detach().cpu()
        for name, t in result.seen.outputs.items()
        if name != "rstd" or t.numel() == case.M * (case.N // group_of(case, model))
    }
    judge = judge_of(op, case, inputs, replace(model, y_given_stats=False), _OUTPUTS)
    checked, saved = judge_forward(judge, outputs)
    gradients = {name: t.detach().cpu() for name, t in result.seen.gradients.items()}
    checked += judge_gradients(judge, gradients, saved, given=False)
    return all(c.comparison.ratio <= 1 for c in checked)
