"""What a modulated norm computes instead, see ``instead.py``: most is told by other inputs for which it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.diagnosis.instead import Instead, of_conventions
from normcheck.oracle.tolerances import Model


def _both(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """``change`` of scale and shift, (B, N)."""

    def changed(inputs: Inputs) -> Inputs:
        assert inputs.scale is not None and inputs.shift is not None
        return replace(inputs, scale=change(inputs.scale), shift=change(inputs.shift))

    return changed


def _scaled(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """``change`` of scale alone."""

    def changed(inputs: Inputs) -> Inputs:
        assert inputs.scale is not None
        return replace(inputs, scale=change(inputs.scale))

    return changed


def _swapped(inputs: Inputs) -> Inputs:
    return replace(inputs, scale=inputs.shift, shift=inputs.scale)


def _unshifted(inputs: Inputs) -> Inputs:
    return replace(inputs, shift=None if inputs.shift is None else torch.zeros_like(inputs.shift))


def _packed(both: Tensor) -> Tensor:
    strides = torch.empty(both.shape, device="meta").stride()
    return both if both.stride() == strides else both.as_strided(both.shape, strides)


def _in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda both: both.to(dtype).to(both.dtype)


def _told(name: str, words: str, *, inputs: Callable[[Inputs], Inputs]) -> Instead:
    return Instead(name, words, inputs=inputs, forward=True)


OF_INPUTS = (
    _told("modulation_swapped", "scale and shift are swapped", inputs=_swapped),
    _told("one_missing", "scale is the factor, not 1 + scale", inputs=_scaled(lambda scale: scale.double() - 1)),
    _told("one_twice", "2 + scale is the factor: 1 is added twice", inputs=_scaled(lambda scale: scale.double() + 1)),
    _told("scale_missing", "the scale is never applied", inputs=_scaled(torch.zeros_like)),
    _told("shift_missing", "the shift is never applied", inputs=_unshifted),
    _told("first_sample", "every sample has the scale and the shift of the first one",
            inputs=_both(lambda both: both[:1].expand_as(both))),
    _told("next_sample", "each sample has the scale and the shift of the next one",
            inputs=_both(lambda both: both.roll(-1, 0))),
    _told("modulation_stride_ignored", "the row stride of scale and shift is ignored: they are read as packed",
            inputs=_both(_packed)),
    _told("modulation_in_bf16", "scale and shift are rounded to bf16", inputs=_both(_in(torch.bfloat16))),
    _told("modulation_in_fp16", "scale and shift are rounded to fp16", inputs=_both(_in(torch.float16))),
)  # fmt: skip


def _gated(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """``change`` of the gate of what is added to a residual."""

    def changed(inputs: Inputs) -> Inputs:
        assert inputs.residual_gate is not None
        return replace(inputs, residual_gate=change(inputs.residual_gate))

    return changed


OF_GATES = (
    _told("residual_gate_missing", "the gate of x is never applied", inputs=_gated(torch.ones_like)),
    _told("residual_gate_plus_one", "1 + residual_gate multiplies x", inputs=_gated(lambda gate: gate.double() + 1)),
    _told("residual_gate_of_first_sample", "x of every sample has the gate of the first one",
            inputs=_gated(lambda gate: gate[:1].expand_as(gate))),
    _told("residual_gate_of_next_sample", "x of each sample has the gate of the next one",
            inputs=_gated(lambda gate: gate.roll(-1, 0))),
    _told("residual_gate_stride_ignored", "the row stride of the gate of x is ignored: it is read as packed",
            inputs=_gated(_packed)),
    _told("residual_gate_in_bf16", "the gate of x is rounded to bf16", inputs=_gated(_in(torch.bfloat16))),
)  # fmt: skip


def instead(op: Op, model: Model) -> Iterator[Instead]:
    """What a kernel of this ``model`` may do instead, the conventions that it does not declare first."""
    yield from of_conventions(op, model)
    yield from OF_INPUTS
    if op.gates_residual:
        yield from OF_GATES
