"""A kernel as a context calls it, and what a context hands on for judgement.

A context knows how a call is surrounded. It knows neither how a kernel is called nor what is right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs


class NotTried(Exception):
    """The context could not be tried. Its text says why; that is no fault of the kernel."""


class Prevented(NotTried):
    """What the kernel does itself prevents the context: that is a fault if it is held to the context."""


@dataclass(frozen=True, slots=True)
class Called:
    """A forward that was called: its tensors by name, the ``inputs`` that it got, and the plain values ``beside`` them.

    The inputs are leaves of autograd's graph if the gradients are autograd's.
    """

    outputs: Mapping[str, Tensor]
    inputs: Inputs
    beside: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """The kernels that a ``forward`` and its ``backward`` launched on a GPU: their names, cut, as they began.

    ``expected``: whether one of them is what the implementation declares. ``built``: see ``Kernel``.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    expected: bool
    built: int


class Kernel(Protocol):
    """The calls of a kernel on any inputs of one case. They raise Broken, or UnsupportedCase if its library refuses."""

    @property
    def by_autograd(self) -> bool:
        """Whether gradients come from autograd through y: a backward of the kernel's own knows no graph."""
        ...

    @property
    def one_at_a_time(self) -> str:
        """Why two threads cannot call it at once, for a reason that is not the kernel's own; "" if they can."""
        ...

    @property
    def overwrites(self) -> Collection[str]:
        """The inputs that a call may write into."""
        ...

    @property
    def expects(self) -> str:
        """The regular expression that the name of one of its kernels must have; "" for any."""
        ...

    def is_compiled(self) -> bool:
        """Whether torch.compile has compiled something in its process."""
        ...

    def built(self) -> int:
        """How many kernels have been compiled or tuned in its process so far, as far as that is known."""
        ...

    def forward(self, inputs: Inputs, *, wanted: Collection[str] | None = None, waits: bool = True) -> Called:
        """Call forward. ``wanted``: the gradients that autograd is to give, by name; None for all.

        ``waits``: on a GPU, until its work is finished.
        """
        ...

    def backward(self, called: Called, *, retain: bool = False, waits: bool = True) -> dict[str, Tensor]:
        """The gradients by name, none of an op that has none. ``retain``: the graph is needed again."""
        ...

    def compiled(self) -> Kernel:
        """The same kernel, with each of its functions inside torch.compile. Raises NotTried if that is impossible."""
        ...

    def accumulated(self, batches: Collection[Inputs]) -> dict[str, Tensor]:
        """The gradients of weight and bias, by name, that autograd adds up over ``batches``: those of the first."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What a context showed: ``outputs`` by name, of which those ``owed`` must be there.

    ``words``: in what surroundings ("under torch.no_grad()"). ``of``: the numbers of the inputs, 0 or 1, whose results
    in eager mode they should be, or the sum of several. ``exact``: to the bit; if not, inside the bound. ``launched``:
    what ran for it, if somebody looked.
    """

    words: str
    of: tuple[int, ...]
    outputs: Mapping[str, Tensor]
    owed: tuple[str, ...] = ()
    exact: bool = True
    launched: Launched | None = None


def both(kernel: Kernel, inputs: Inputs) -> dict[str, Tensor]:
    """What forward and backward return for ``inputs``, by name."""
    called = kernel.forward(inputs)
    return {**called.outputs, **kernel.backward(called)}


def copied(inputs: Inputs) -> Inputs:
    """Copies of ``inputs``, each in memory of its own, with the strides of the one it copies."""
    return inputs.each(as_it_lies)


def as_it_lies(tensor: Tensor) -> Tensor:
    """A copy with the strides of ``tensor``, of which autograd knows if it does of that."""
    if tensor.is_contiguous() or 0 in tensor.stride():
        return tensor.clone()
    own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return own.copy_(tensor)


def fill(given: Inputs, values: Inputs) -> None:
    """Copy ``values`` to the memory of ``given``."""
    for (_, own), (_, new) in zip(given.named(), values.named(), strict=True):
        own.copy_(new)
