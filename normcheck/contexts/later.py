"""The context ``again``: what happens to a graph, a gradient and a result after the call that made it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from normcheck.cases.inputs import Inputs
from normcheck.contexts.kernel import Kernel, Prevented, Step, both, copied
from normcheck.errors import Broken

_FURTHER_CALLS = 12
_LATE_SECONDS = 0.05


def again(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """A result looked at again; two micro-batches; a second backward. ``second`` has the weight and bias of ``first``.

    A second backward that raises is loud, and no wrong result: then it could not be tried. So it comes last.
    """
    kept, begun = both(kernel, copied(first)), time.perf_counter()  # the inputs are freed by now
    for _ in range(_FURTHER_CALLS):
        both(kernel, copied(second))
    time.sleep(max(0.0, _LATE_SECONDS - (time.perf_counter() - begun)))
    yield Step(f"when it is looked at again after {_FURTHER_CALLS} further calls", (0,), kept)
    if not kernel.by_autograd:
        return
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
