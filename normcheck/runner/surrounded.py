"""Calls of a kernel in surroundings that a context makes: without an arena, with the gradients that it asks for."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.ops import OPS
from normcheck.contexts.kernel import Called, NotTried
from normcheck.contexts.perform import Performed, perform
from normcheck.impls.implementation import ONE_MODULE, Implementation
from normcheck.impls.kernels import interpreted
from normcheck.impls.torch_compile import unavailable
from normcheck.runner import call, compiled, kernel_errors


class Calls:
    """See ``contexts.kernel.Kernel``."""

    def __init__(self, implementation: Implementation, case: Case, device: str) -> None:
        self._implementation, self._case, self._device = implementation, case, device
        self.by_autograd = implementation.backward is None and not OPS[case.op].quantises

    @property
    def one_at_a_time(self) -> str:
        """See ``Kernel``."""
        if interpreted.launched():
            return "Triton's interpreter, which stands for a GPU here, runs one kernel at a time"
        one = getattr(self._implementation.forward, ONE_MODULE, False)
        return "normcheck puts the weight of each call into one module" if one else ""

    @property
    def overwrites(self) -> Collection[str]:
        """See ``Kernel``."""
        return self._implementation.overwrites

    @property
    def expects(self) -> str:
        """See ``Kernel``."""
        return self._implementation.expects_kernel

    def is_compiled(self) -> bool:
        """See ``Kernel``."""
        return compiled.graphs() > 0

    def built(self) -> int:
        """See ``Kernel``."""
        return compiled.built()

    def forward(self, inputs: Inputs, *, wanted: Collection[str] | None = None, waits: bool = True) -> Called:
        """See ``Kernel``."""
        given = call.differentiable(inputs, wanted) if self.by_autograd else inputs
        unwatched = call.Unwatched(waits=waits)
        outputs = call.forward(self._implementation, self._case, given, unwatched)
        return Called(outputs, given, unwatched.beside)

    def backward(self, called: Called, *, retain: bool = False, waits: bool = True) -> dict[str, Tensor]:
        """See ``Kernel``."""
        unwatched = call.Unwatched(called.beside, waits=waits)
        if self.by_autograd:
            own = {name: tensor.clone() for name, tensor in called.inputs.cotangents.items()}  # it may overwrite them
            return call.autograd(called.outputs, replace(called.inputs, **own), unwatched, retain=retain)
        if self._implementation.backward is None:
            return {}
        return call.backward(self._implementation, self._case, called.inputs, called.outputs, unwatched)

    def compiled(self) -> Calls:
        """See ``Kernel``."""
        if interpreted.launched():
            raise NotTried("Triton's interpreter runs the kernel here, in which there is nothing to compile")
        if reason := unavailable(self._device):
            raise NotTried(reason)
        own = self._implementation
        inside = partial(torch.compile, fullgraph=False, dynamic=True)
        backward = None if own.backward is None else inside(own.backward)
        return Calls(replace(own, forward=inside(own.forward), backward=backward), self._case, self._device)

    def accumulated(self, batches: Collection[Inputs]) -> dict[str, Tensor]:
        """See ``Kernel``."""
        first: Inputs | None = None
        for inputs in batches:
            leaves = call.differentiable(inputs)
            if first is not None:
                leaves = replace(leaves, weight=first.weight, bias=first.bias)
            first = first or leaves
            outputs = call.forward(self._implementation, self._case, leaves, call.Unwatched())
            if not outputs["y"].requires_grad:
                return {}
            with kernel_errors.guarded("backward, by torch autograd through y,"), call.without_formula():
                kernel_errors.called(torch.autograd.backward, *call.graph_outputs(outputs, leaves))
        parameters = {name: leaf for name, leaf in first.leaves.items() if name in ("dw", "db")} if first else {}
        return {name: leaf.grad for name, leaf in parameters.items() if leaf.grad is not None}


def surrounded(implementation: Implementation, case: Case, context: str, first: Inputs, second: Inputs) -> Performed:
    """What the implementation does in ``context``.

    Of one function torch.compile has several graphs, and which of them a call gets hangs on the calls before it: then
    the bits need not be those of the eager call.
    """
    calls = Calls(implementation, case, first.x.device.type)
    with kernel_errors.quiet(), compiled.uncounted() if context == "compile" else nullcontext():  # once for all threads
        performed = perform(context, calls, first, second)
    if not compiled.graphs():
        return performed
    return replace(performed, steps=tuple(replace(step, exact=False) for step in performed.steps))
