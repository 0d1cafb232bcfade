"""What a kernel computes instead whose groups of rows have weights of their own, see ``instead.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.layouts import OF_ROW_GROUPS, WEIGHT_STACKED
from normcheck.cases.op import Op
from normcheck.diagnosis.instead import Instead
from normcheck.oracle.tolerances import Model


def _of(*names: str, change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """``change`` of the weights, the biases, or both, (G, N)."""
    return lambda inputs: replace(inputs, **{name: change(t) for name, t in inputs.named() if name in names})


def _first(both: Tensor) -> Tensor:
    return both[:1].expand_as(both)


def _in_other_order(case: Case) -> Case:
    return replace(case, layout=OF_ROW_GROUPS[case.layout == WEIGHT_STACKED])


_EVERY = (
    Instead("first_group", "every row has the weight of group 0", forward=True,
            inputs=_of("weight", "bias", change=_first)),
    Instead("bias_of_first_group", "every row has the bias of group 0", forward=True,
            inputs=_of("bias", change=_first)),
    Instead("next_group", "each group has the weight of the next one", forward=True,
            inputs=_of("weight", "bias", change=lambda both: both.roll(-1, 0))),
    Instead("groups_in_other_order", "rows have the weights of another order: groups one behind the other are taken to "
            "take turns, or the other way round", case=_in_other_order),
)  # fmt: skip


def instead(op: Op, model: Model) -> Iterator[Instead]:
    """What such a kernel may do instead."""
    yield from _EVERY
