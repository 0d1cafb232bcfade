"""Contexts of a GPU: a side stream, a CUDA graph, a device that is not the current one.

The shape of what is done is that of torch's own documentation: https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.guard_bands import NAN, as_integers
from normcheck.cases.inputs import Inputs
from normcheck.contexts.kernel import Called, Kernel, NotTried, Prevented, Step, both, copied, fill
from normcheck.errors import Broken

_LATE_CYCLES = 20_000_000
"""Clock cycles for which a stream is kept busy: some 10 ms, in which the host queues all that a kernel launches."""

_STREAMS, _LONGER = 32, 2
"""How many streams of a priority torch has, which it hands out in turn; how much longer they are busy."""

_WARM_UPS = 3


def stream(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward, then backward, on a side stream on which slow work comes before the copies that make the inputs.

    The streams that torch has for everybody are busy for longer: who works on one of them, and lets nobody wait for it,
    is late for who reads the results.
    """
    both(kernel, copied(second))  # compiles and plans; its results lie in memory that may be used again
    side, given = _stream(priority=-1), _poisoned(copied(first))
    of_all = [_stream() for _ in range(_STREAMS)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _sleep(side)
        fill(given, replace(first, dy=given.dy))
        _sleep(*of_all, times=_LONGER)
        called = kernel.forward(given, waits=False)
        _sleep(side)
        given.dy.copy_(first.dy)
        _sleep(*of_all, times=_LONGER)
        gradients = kernel.backward(called, waits=False)
        found = {name: t.detach().clone() for name, t in {**called.outputs, **gradients}.items()}
    torch.cuda.synchronize()
    yield Step("on a side stream whose inputs become ready late", (0,), found)


@dataclass(frozen=True)
class _Captured:
    """A graph, the inputs in whose memory it computes, and its results by name."""

    graph: Any
    given: Inputs
    results: dict[str, Tensor]

    def replayed(self, inputs: Inputs) -> dict[str, Tensor]:
        """The results for ``inputs``; before, poison is where they will be."""
        fill(self.given, inputs)
        for result in self.results.values():
            _poison(result.detach())
        self.graph.replay()
        torch.cuda.synchronize()
        return self.results


def graph(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward alone, and with backward, captured and replayed; with other inputs, after other work, two in turn."""
    warm = _stream()
    with torch.cuda.stream(warm):
        for _ in range(_WARM_UPS):
            both(kernel, copied(first))
    torch.cuda.synchronize()
    alone = _captured(kernel, copied(first), backward=False)
    yield Step("in a replay of a CUDA graph of forward, with other inputs", (1,), alone.replayed(second))
    one = _captured(kernel, copied(first), backward=True)
    yield Step("in a replay of a CUDA graph, with other inputs in the same memory", (1,), one.replayed(second))
    both(kernel, copied(second))
    torch.cuda.empty_cache()
    yield Step("in a replay of a CUDA graph after other work", (0,), one.replayed(first))
    other = _captured(kernel, copied(second), backward=True)
    one.replayed(first)
    yield Step("in one of two CUDA graphs that are replayed in turn", (1,), other.replayed(second))
    yield Step("after the replay of another CUDA graph of the same kernel", (0,), one.results)


def _captured(kernel: Kernel, given: Inputs, *, backward: bool) -> _Captured:
    """The graph of a call on ``given``. Raises Prevented with the operation that cannot be captured, and its line."""
    captured, refused = torch.cuda.CUDAGraph(), ""
    called: Called | None = None
    gradients: dict[str, Tensor] = {}
    try:
        with torch.cuda.graph(captured):
            try:
                called = kernel.forward(given, waits=False)
                gradients = kernel.backward(called, waits=False) if backward else {}
            except Broken as broken:
                refused = _why(broken)
                raise
    except Broken as broken:
        raise Prevented(refused or _why(broken)) from broken
    except RuntimeError as error:  # the capture itself ends with an error, whatever was raised in it
        raise Prevented(refused or f"it cannot be captured: {str(error).splitlines()[0]}") from error
    assert called is not None
    return _Captured(captured, given, {**called.outputs, **gradients})


def _why(broken: Broken) -> str:
    line = next((frame.strip().splitlines()[0] for frame in reversed(broken.frames) if "File" in frame), "")
    return f"it cannot be captured: {broken.message.splitlines()[0]}" + f" ({line})" * bool(line)


def device(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Inputs on a GPU that is not the current one, then on the current one, and again.

    The current GPU is busy meanwhile, so that what is launched on it in place of the other one is late for who reads
    the results there. A copy between two GPUs would wait for both.
    """
    count = torch.cuda.device_count()
    if count < 2:
        raise NotTried("it takes two GPUs, and there is one")
    current = torch.cuda.current_device()
    there = f"cuda:{(current + 1) % count}"
    for number, inputs in enumerate((first, second)):
        other = (second, first)[number]  # whose results lie in memory that may be used again
        given, before = (own.each(lambda tensor: tensor.to(there)) for own in (inputs, other))
        both(kernel, before)  # what compiles or plans takes longer than the current GPU is busy
        for gpu in (current, there):
            torch.cuda.synchronize(gpu)
        _sleep(torch.cuda.current_stream())
        found = {name: tensor.clone() for name, tensor in both(kernel, given).items()}
        torch.cuda.synchronize(there)
        astray = [f"{name} is on {t.device}" for name, t in found.items() if t.device != given.x.device]
        if torch.cuda.current_device() != current:
            astray.append(f"cuda:{torch.cuda.current_device()} is the current device afterwards")
            torch.cuda.set_device(current)
        if astray:
            raise Broken("exception", "", f"inputs are on {there}, cuda:{current} is current: {'; '.join(astray)}")
        home = {name: t.to(first.x.device) for name, t in found.items()}
        yield Step("on a GPU that is not the current one", (number,), home)
        yield Step("on the current GPU after a call on another one", (number,), both(kernel, copied(inputs)))


def _stream(priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def _sleep(*streams: torch.cuda.Stream, times: int = 1) -> None:
    """Keep each of them busy for so many times ``_LATE_CYCLES``."""
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(times * _LATE_CYCLES)  # type: ignore[no-untyped-call]


def _poisoned(given: Inputs) -> Inputs:
    """``given``, with NaN in its memory."""
    return given.each(_poison)


def _poison(tensor: Tensor) -> Tensor:
    """``tensor``, filled with NaN, or with the bits of one."""
    if tensor.dtype in NAN.bits:
        as_integers(tensor).fill_(NAN.bits[tensor.dtype])
    else:
        tensor.fill_(True)
    return tensor
