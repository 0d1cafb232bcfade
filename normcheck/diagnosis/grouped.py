"""What a norm of groups computes instead, see ``instead.py``: most is told by other inputs, or other groups, for which
it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.diagnosis.instead import Instead, of_conventions
from normcheck.oracle.tolerances import Model


def _parameters(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """``change`` of weight and bias, (C,)."""

    def changed(inputs: Inputs) -> Inputs:
        weight, bias = (None if t is None else change(t) for t in (inputs.weight, inputs.bias))
        return replace(inputs, weight=weight, bias=bias)

    return changed


def _unweighted(inputs: Inputs) -> Inputs:
    return replace(inputs, weight=None if inputs.weight is None else torch.ones_like(inputs.weight))


def _one_plus(inputs: Inputs) -> Inputs:
    return replace(inputs, weight=None if inputs.weight is None else inputs.weight + 1)


def _unbiased(inputs: Inputs) -> Inputs:
    return replace(inputs, bias=None)


def _swapped(inputs: Inputs) -> Inputs:
    if inputs.weight is None or inputs.bias is None:
        return inputs
    return replace(inputs, weight=inputs.bias, bias=inputs.weight)


def _one_group(case: Case) -> Case:
    return replace(case, groups="1")


def _of_channels(case: Case) -> Case:
    return replace(case, groups=str(case.split.channels))


def _told(name: str, words: str, *, inputs: Callable[[Inputs], Inputs]) -> Instead:
    return Instead(name, words, inputs=inputs, forward=True)


OF_INPUTS = (
    _told("weight_missing", "the weight is never applied", inputs=_unweighted),
    _told("bias_missing", "the bias is never added", inputs=_unbiased),
    _told("one_plus", "1 + weight is the factor", inputs=_one_plus),
    _told("parameters_swapped", "weight and bias are swapped", inputs=_swapped),
    _told("first_channel", "every channel has the weight and the bias of the first one",
            inputs=_parameters(lambda t: t[:1].expand_as(t))),
    _told("next_channel", "each channel has the weight and the bias of the next one",
            inputs=_parameters(lambda t: t.roll(-1, 0))),
    Instead("groups_ignored", "one group of all channels is normed, whatever groups says", case=_one_group),
    Instead("groups_of_channels", "each channel is normed by itself, whatever groups says", case=_of_channels),
)  # fmt: skip


def instead(op: Op, model: Model) -> Iterator[Instead]:
    """What a kernel of this ``model`` may do instead, the conventions that it does not declare first."""
    yield from of_conventions(op, model)
    yield from OF_INPUTS
