"""The calls that are timed: an implementation's forward and backward, and the copy that is their ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from normcheck.bench.speed import BACKWARD, FORWARD, Point, Times
from normcheck.bench.timing import cache_bytes, in_turn, sets_needed, timed
from normcheck.bench.verified import case_of
from normcheck.cases.inputs import Inputs, make, torch_dtype
from normcheck.cases.op import Op
from normcheck.impls.implementation import Implementation
from normcheck.runner import call
from normcheck.runner.kernel_errors import called, guarded

Call = Callable[[], object]


def copy_times(count: int, device: str) -> Times:
    """The times of a copy that reads ``count`` // 2 bytes and writes as many."""
    half = max(count // 2, 1)
    sets = sets_needed(2 * half, cache_bytes(device))
    pairs = [torch.zeros((2, half), dtype=torch.uint8, device=device) for _ in range(sets)]
    return _after_one_call(in_turn([_copying(pair) for pair in pairs]), device)


def _copying(pair: torch.Tensor) -> Call:
    source, destination = pair
    return lambda: destination.copy_(source)


def times_of(implementation: Implementation, op: Op, point: Point, direction: str, device: str) -> Times:
    """The times of one direction, on inputs that no cache holds any more.

    The implementation's own backward gets the outputs of forward. Without one, torch.autograd.grad through y is called
    again and again on one graph, which must keep its saved tensors; see ``reusable_graphs`` for torch.compile. Raises
    Broken if the implementation fails, and torch.OutOfMemoryError.
    """
    x_bytes = point.M * point.N * torch_dtype(point.dtype).itemsize
    sets = range(sets_needed(x_bytes, cache_bytes(device)))
    inputs = [make(case_of(point, seed=seed), op, device) for seed in sets]
    if implementation.backward is None and BACKWARD in point.directions:
        inputs = [call.differentiable(one_set) for one_set in inputs]
    calls = [_CALLS[direction](implementation, point, one_set) for one_set in inputs]
    with guarded(f"{direction}, while it was timed,"):
        return called(_after_one_call, in_turn(calls), device)


def _after_one_call(run: Call, device: str) -> Times:
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return timed(run, device)


def _forward(implementation: Implementation, point: Point, inputs: Inputs) -> Call:
    options = {**call.named(inputs), **case_of(point).option_values}
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    return lambda: implementation.forward(x, weight, bias, eps=point.eps, **options)


def _backward(implementation: Implementation, point: Point, inputs: Inputs) -> Call:
    plain = call.Unwatched()
    saved = call.forward(implementation, case_of(point), inputs, plain)
    dy, x, weight, bias = inputs.dy, inputs.x, inputs.weight, inputs.bias
    own = implementation.backward
    options = {**call.named(inputs, cotangents=True), **case_of(point).option_values}
    if own is not None:
        kept = {**(plain.beside or {}), **saved}
        return lambda: own(dy, x, weight, bias, kept, eps=point.eps, **options)
    through, cotangents = call.graph_outputs(saved, inputs)
    leaves = list(inputs.leaves.values())
    return lambda: torch.autograd.grad(through, leaves, cotangents, retain_graph=True, allow_unused=True)


_CALLS = {FORWARD: _forward, BACKWARD: _backward}


@contextmanager
def reusable_graphs() -> Iterator[None]:
    """Keep torch.compile from donating saved tensors, so that a backward can be called again on one graph.

    (The time of both directions less that of forward is no substitute: a compiler may move work between them.)
    """
    import torch._functorch.config as functorch

    before = functorch.donated_buffer
    functorch.donated_buffer = False
    try:
        yield
    finally:
        functorch.donated_buffer = before
