"""The context ``profiler``: which kernels a forward and its backward launch on a GPU, by torch's own profiler.

https://docs.pytorch.org/docs/stable/profiler.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from normcheck.cases.inputs import Inputs
from normcheck.contexts.kernel import Kernel, Launched, NotTried, Step, copied
from normcheck.errors import one_line

LONGEST_NAME = 60
"""Characters of a kernel's name: those of templates have hundreds."""

_COPIES = ("Memcpy ", "Memset ")


def kernels(events: Iterable[Any]) -> list[str]:
    """The names of the kernels on a GPU, in the order in which they began; copies are none.

    ``events``: of torch's profiler, each a torch.autograd.profiler_util.FunctionEvent.
    """
    on_gpu = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    on_gpu.sort(key=lambda event: event.time_range.start)
    return [event.name.removeprefix("void ") for event in on_gpu if not event.name.startswith(_COPIES)]


def profiler(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward, then backward, each under torch's profiler; what was launched before has ended."""
    given = copied(first)
    with _unfilled():
        forward, backward = list[str](), list[str]()
        with _noted(forward):
            called = kernel.forward(given, waits=False)
        with _noted(backward):
            gradients = kernel.backward(called, waits=False)
    names = [*forward, *backward]
    if not names and first.x.numel():
        raise NotTried("torch's profiler saw no kernel")
    of_forward, of_backward = (
        tuple(one_line(n, LONGEST_NAME, keep_end=False) for n in of) for of in (forward, backward)
    )
    expected = any(re.search(kernel.expects, name) for name in names)
    launched = Launched(of_forward, of_backward, expected, kernel.built())
    yield Step("under torch's profiler", (0,), {**called.outputs, **gradients}, launched=launched)


@contextmanager
def _noted(names: list[str]) -> Iterator[None]:
    """Add the names of the kernels that are launched in the block to ``names``."""
    torch.cuda.synchronize()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profile.start()
    except RuntimeError as error:  # such as another profiler, which the kernel has started
        raise NotTried(f"torch's profiler does not start: {error}") from error
    try:
        yield
        torch.cuda.synchronize()
    finally:
        profile.stop()
    names += kernels(profile.events() or ())  # type: ignore[no-untyped-call]


@contextmanager
def _unfilled() -> Iterator[None]:
    """Leave new memory as it is: each tensor that the kernel allocates would be filled by a kernel of torch."""
    usual = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(usual)
