"""What a gated norm computes instead, see ``instead.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.diagnosis.instead import OF_GROUPS, Instead, of_conventions
from normcheck.oracle.conventions import OPEN
from normcheck.oracle.tolerances import Model

_GROUPS = (32, 64, 128, 256, 512)
_OPEN = 100.0  # the sigmoid of it is 1 in fp32


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
    yield from of_conventions(op, model)
    for group in (0, *_GROUPS):
        if model.group not in (group, OPEN):
            told = f"takes the mean over groups of {group} columns" if group else "takes the mean over the whole row"
            words = f"{told}; declared group={model.group}"
            yield Instead(f"{OF_GROUPS}{group}", words, lambda m, group=group: replace(m, group=group))  # type: ignore[misc]
    yield from OF_INPUTS
