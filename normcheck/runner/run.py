"""One run of a kernel: its calls in given surroundings, and their stray writes.

A kernel runs in this process (``LocalRun``) or in one of its own (``isolation.remote_run``), behind one interface.
A caller asks for a call first and collects its result later, so that another process works while this one judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import GRADIENT_OF, Inputs
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import OF_PARAMETERS
from normcheck.contexts.perform import Performed
from normcheck.impls.implementation import Implementation
from normcheck.runner import call, graph
from normcheck.runner.arena import Arena, Region, Stray, Surroundings
from normcheck.runner.surrounded import surrounded

T = TypeVar("T")

FROZEN, THREE_THREADS = "with frozen parameters", "with 3 torch threads"
"""The mode of fine-tuning, in which no gradient of weight and bias is wanted; and one of a CPU of several cores."""

UNWANTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {FROZEN: OF_PARAMETERS} | {f"with no gradient of {name}": (g,) for g, name in GRADIENT_OF.items() if g != "dw"}
)
"""Modes in which some gradients are not wanted -> which."""

SERVING = ("under torch.no_grad()", "under torch.inference_mode()")
"""The modes in which engines serve, and no gradient is wanted."""


@contextmanager
def _three_threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


_SURROUNDING: Mapping[str, Callable[[], AbstractContextManager[object]]] = MappingProxyType(
    dict(zip(SERVING, (torch.no_grad, torch.inference_mode), strict=True)) | {THREE_THREADS: _three_threads}
)


class Pending(Generic[T]):
    """A call that was asked for. A process of its own works on it already; this process makes it in ``result``."""

    def __init__(self, collect: Callable[[], T]) -> None:
        self._collect = collect

    def result(self) -> T:
        """The result of the call, once. Raises Broken if the call failed, UnsupportedCase if its library refuses."""
        return self._collect()


@dataclass(frozen=True, slots=True)
class Forward:
    """The results of a forward: ``outputs``, tensors by name with ``y`` among them.

    ``by_autograd``: the cotangents by name (see ``Inputs.cotangents``) -> the gradients by autograd through y, and
    through residual_out if the op has that, by name; empty if y has no graph. ``joined`` counts how many gradients of x
    autograd adds up in half precision, see ``graph.joined``; it walks the graph when it is called.
    """

    outputs: Mapping[str, Tensor]
    by_autograd: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    joined: Callable[[], int] = lambda: 0


class Run(Protocol):
    """The calls of one run. They share an arena, and the plain values that the first forward returned."""

    def forward(self, case: Case, inputs: Inputs, *, others_first: bool = False, mode: str = "") -> Pending[Forward]:
        """Ask for a forward. ``others_first``: gradients through y are wanted only after other calls; ``mode``: one of
        UNWANTED or SERVING, or THREE_THREADS, "" for the usual one.
        """
        ...

    def backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> Pending[dict[str, Tensor]]:
        """Ask for the implementation's own backward with the ``saved`` tensors: its gradients by name."""
        ...

    def within(self, context: str, case: Case, inputs: tuple[Inputs, Inputs]) -> Pending[Performed]:
        """Ask for the calls of a context, see ``contexts.perform``. Inputs stay."""
        ...

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """The writes around memory that the calls allocated; ``named``: the outputs, to name the memory of each.

        Raises Broken if a call returned a result that was still being written.
        """
        ...


class LocalRun:
    """A run in this process."""

    def __init__(self, implementation: Implementation, surroundings: Surroundings) -> None:
        self._implementation = implementation
        self._arena = Arena(surroundings)

    def forward(self, case: Case, inputs: Inputs, *, others_first: bool = False, mode: str = "") -> Pending[Forward]:
        """See ``Run``."""
        return Pending(partial(self._forward, case, inputs, mode))

    def _forward(self, case: Case, inputs: Inputs, mode: str) -> Forward:
        surrounding = _SURROUNDING.get(mode, nullcontext)
        if self._implementation.backward is not None or OPS[case.op].quantises or mode in SERVING:
            with surrounding():
                outputs = call.forward(self._implementation, case, inputs, self._arena)
            plain = {name: t.clone() if t.is_inference() else t for name, t in outputs.items()}  # one may write to it
            return Forward(plain, lambda cotangents: {})
        leaves = call.differentiable(inputs, inputs.leaves.keys() - UNWANTED.get(mode, ()))
        with surrounding():
            outputs = call.forward(self._implementation, case, leaves, self._arena)

        def joined() -> int:
            return graph.joined(outputs["y"], leaves.x) if case.dtype != "fp32" and "y" in outputs else 0

        def by_autograd(cotangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with surrounding():
                return call.autograd(outputs, replace(leaves, **cotangents), self._arena)

        return Forward(outputs, by_autograd, joined)

    def backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> Pending[dict[str, Tensor]]:
        """See ``Run``."""
        return Pending(partial(call.backward, self._implementation, case, inputs, saved, self._arena))

    def within(self, context: str, case: Case, inputs: tuple[Inputs, Inputs]) -> Pending[Performed]:
        """See ``Run``."""
        return Pending(partial(surrounded, self._implementation, case, context, *inputs))

    def place(self, region: Region | None) -> None:
        """Have the next calls allocate in ``region``, as long as there is room. Its owner looks for strays there."""
        self._arena.region = region

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """See ``Run``."""
        return self._arena.strays(named)

    def clean(self) -> Tensor | None:
        """See ``Arena``."""
        return self._arena.clean()
