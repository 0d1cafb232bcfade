"""The context ``again``: what happens to a graph, a gradient, a result and torch's own state after the call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.inputs import GRADIENT_OF, Inputs
from normcheck.cases.tensor_names import RESIDUAL_OUT
from normcheck.contexts.kernel import Kernel, Prevented, Step, as_it_lies, both, copied
from normcheck.errors import Broken

_FURTHER_CALLS = 17  # one more than a ring of buffers has, most likely
_LATE_SECONDS = 0.05


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None is how a process begins


def _flushes_denormal() -> bool:
    """What no function of torch tells."""
    return not bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 1.0)


_STATE: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = MappingProxyType(
    {
        "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
        "torch.get_default_device()": (torch.get_default_device, _set_default_device),
        "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
        "torch.get_float32_matmul_precision()": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "torch.set_flush_denormal": (_flushes_denormal, torch.set_flush_denormal),
        "torch.initial_seed()": (torch.initial_seed, torch.manual_seed),  # a random number that is drawn leaves it
    }
)
"""What a call must leave as it is, as all that the caller computes afterwards hangs on it; how it is read and set."""

_before: dict[str, Any] = {}


def note_state(*, anew: bool = True) -> None:
    """Note torch's state before the first call of a kernel; not ``anew``: unless that of one before it was noted."""
    if anew or not _before:
        _before.update((name, read()) for name, (read, _) in _STATE.items())


def _set_back() -> list[str]:
    """What of the state has changed, in words. It is set back: smaller cases show it too, and no kernel after this."""
    changed = []
    for name, was in _before.items():
        read, put = _STATE[name]
        if (now := read()) != was:
            changed.append(f"{name} is {now}, and was {was}")
            put(was)
    return changed


@contextmanager
def _default_mode() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was[0], warn_only=was[1])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(was)


def _served(kernel: Kernel, inputs: Inputs) -> Mapping[str, Tensor]:
    with torch.no_grad():
        return kernel.forward(copied(inputs)).outputs


def again(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """torch's state; a result looked at again, one without gradients too, and a backward, after further calls; torch's
    deterministic mode off, in which a kernel runs everywhere else, and another default dtype; within a network; a
    backward after an output was written to; two micro-batches; a second backward. ``second`` has the weight and bias of
    ``first``.

    A second backward that raises is loud, and no wrong result: then it could not be tried. So it comes last.
    """
    kept, begun = both(kernel, copied(first)), time.perf_counter()  # the inputs are freed by now
    early = kernel.forward(copied(first))  # as the first layer of a model
    served = {} if kernel.is_compiled() else _served(kernel, first)  # it would be compiled anew
    for _ in range(_FURTHER_CALLS):
        both(kernel, copied(second))
        if served:
            _served(kernel, second)
    time.sleep(max(0.0, _LATE_SECONDS - (time.perf_counter() - begun)))
    if changed := _set_back():
        raise Broken("exception", "", f"after its calls {'; '.join(changed)} before the first one")
    yield Step(f"when it is looked at again after {_FURTHER_CALLS} further calls", (0,), kept)
    if served:
        yield Step(
            f"under torch.no_grad(), and looked at again after {_FURTHER_CALLS} further calls",
            (0,),
            served,
            exact=False,
        )
    yield Step(f"in a backward after {_FURTHER_CALLS} further calls", (0,), kernel.backward(early))
    if not kernel.is_compiled():  # it would be compiled anew
        with _default_mode():
            found = both(kernel, copied(first))
        yield Step("with torch's deterministic mode off, as it is by default", (0,), found, exact=False)
        with _default_dtype(torch.bfloat16):
            found = both(kernel, copied(first))
        yield Step("with bf16 as torch's default dtype, as engines have it", (0,), found, exact=False)
    if not kernel.by_autograd:
        return
    if not kernel.is_compiled():  # it would be compiled anew
        yield from _within_a_network(kernel, first)
    yield from _written_to(kernel, first)
    added = kernel.accumulated((copied(first), copied(second)))
    yield Step("added up over two micro-batches", (0, 1), added)
    called = kernel.forward(copied(first))
    try:
        gradients = kernel.backward(called, retain=True)
        yield Step("in a backward that keeps its graph", (0,), gradients)
        gradients = kernel.backward(called)
    except Broken as broken:
        raise Prevented(f"a second backward through one graph: {broken.message}") from broken
    yield Step("in a second backward through one graph", (0,), gradients)


def _written_to(kernel: Kernel, inputs: Inputs) -> Iterator[Step]:
    """A backward after the caller has written to an output, as an activation in place does, or the next layer that adds
    to the residual. What autograd was asked to keep it does not give back then, which is loud.
    """
    for name in ("y", RESIDUAL_OUT):
        called = kernel.forward(copied(inputs))
        if name in called.outputs:
            called.outputs[name].detach().zero_()  # which counts as a change of it, as of no ``y.data``
            with suppress(Broken):  # autograd takes another way back through a view: the bits may be others
                gradients = kernel.backward(called)
                yield Step(f"in a backward after {name} was written to in place", (0,), gradients, exact=False)


def _within_a_network(kernel: Kernel, inputs: Inputs) -> Iterator[Step]:
    """Inputs that autograd has computed, as in any layer but the first, or of 1 + weight; copies of what is saved, as
    of offloading; a dy whose rows are columns in memory, as behind a transposed y, for which a kernel may raise.
    """
    own = copied(inputs)
    computed = {GRADIENT_OF[name]: as_it_lies(t.detach().requires_grad_()) for name, t in own.leaves.items()}
    called = kernel.forward(replace(own, **computed))
    _require_unchanged(kernel, computed, inputs)
    outputs = {**called.outputs, **kernel.backward(called)}
    _require_unchanged(kernel, computed, inputs)
    yield Step("with inputs that autograd has computed", (0,), outputs, tuple(inputs.leaves), exact=False)
    with torch.autograd.graph.saved_tensors_hooks(as_it_lies, lambda tensor: tensor):
        called = kernel.forward(copied(inputs))
    gradients = kernel.backward(called)
    yield Step("with copies of what was saved, as offloading makes them", (0,), gradients, exact=False)
    called = kernel.forward(copied(inputs))
    columns = called.inputs.dy.mT.contiguous().mT if inputs.dy.dim() > 1 else inputs.dy
    with suppress(Broken):
        gradients = kernel.backward(replace(called, inputs=replace(called.inputs, dy=columns)))
        yield Step("with a dy whose last dimension is not packed", (0,), gradients, exact=False)


def _require_unchanged(kernel: Kernel, computed: Mapping[str, Tensor], inputs: Inputs) -> None:
    for name, tensor in computed.items():
        if name not in kernel.overwrites and not guard_bands.same_bits(tensor, getattr(inputs, name)):
            words = f"{name} was modified, which autograd has computed; inputs belong to the caller"
            raise Broken("input_modified", name, words)
