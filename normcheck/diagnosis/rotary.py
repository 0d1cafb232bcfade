"""What a kernel that norms and rotates heads does instead, see ``instead.py``: other inputs for which it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import COS, K_WEIGHT, Q_WEIGHT, SIN
from normcheck.diagnosis.instead import Instead, of_conventions
from normcheck.oracle.tolerances import Model


def _changed(**of: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[Inputs], Inputs]:
    """Inputs in which each name has what is made ``of`` the inputs by name."""

    def changed(inputs: Inputs) -> Inputs:
        named = dict(inputs.named())
        return replace(inputs, **{name: make(named) for name, make in of.items()})

    return changed


def _angles(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """``change`` of cos and sin, (T, pairs)."""
    return _changed(cos=lambda named: change(named[COS]), sin=lambda named: change(named[SIN]))


def _weights(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    return _changed(q_weight=lambda named: change(named[Q_WEIGHT]), k_weight=lambda named: change(named[K_WEIGHT]))


def _packed(table: Tensor) -> Tensor:
    strides = torch.empty(table.shape, device="meta").stride()
    return table if table.stride() == strides else table.as_strided(table.shape, strides)


def _in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda table: table.to(dtype).to(table.dtype)


def _of(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda named: named[name]


def _told(name: str, words: str, *, inputs: Callable[[Inputs], Inputs]) -> Instead:
    return Instead(name, words, inputs=inputs, forward=True)


OF_INPUTS = (
    _told("weights_crossed", "q has the weight of k, and k that of q",
            inputs=_changed(q_weight=_of(K_WEIGHT), k_weight=_of(Q_WEIGHT))),
    _told("weight_of_q", "k has the weight of q", inputs=_changed(k_weight=_of(Q_WEIGHT))),
    _told("weight_of_k", "q has the weight of k", inputs=_changed(q_weight=_of(K_WEIGHT))),
    _told("weights_missing", "the weights are never applied", inputs=_weights(torch.ones_like)),
    _told("weights_plus_one", "1 + weight multiplies xhat", inputs=_weights(lambda weight: weight.double() + 1)),
    _told("angles_swapped", "cos and sin are swapped", inputs=_changed(cos=_of(SIN), sin=_of(COS))),
    _told("turned_back", "heads are rotated the other way", inputs=_changed(sin=lambda named: -named[SIN])),
    _told("never_turned", "heads are never rotated",
            inputs=_changed(cos=lambda n: torch.ones_like(n[COS]), sin=lambda n: torch.zeros_like(n[SIN]))),
    _told("angles_of_first_token", "every token has the angles of the first one",
            inputs=_angles(lambda table: table[:1].expand_as(table))),
    _told("angles_of_next_token", "each token has the angles of the next one",
            inputs=_angles(lambda table: table.roll(-1, 0))),
    _told("angles_of_previous_token", "each token has the angles of the one before",
            inputs=_angles(lambda table: table.roll(1, 0))),
    _told("angle_stride_ignored", "the row stride of cos and sin is ignored: they are read as packed",
            inputs=_angles(_packed)),
    _told("angles_in_bf16", "cos and sin are rounded to bf16", inputs=_angles(_in(torch.bfloat16))),
    _told("angles_in_fp16", "cos and sin are rounded to fp16", inputs=_angles(_in(torch.float16))),
)  # fmt: skip


def instead(op: Op, model: Model) -> Iterator[Instead]:
    """What a kernel of this ``model`` may do instead, the conventions that it does not declare first."""
    yield from of_conventions(op, model)
    yield from OF_INPUTS
