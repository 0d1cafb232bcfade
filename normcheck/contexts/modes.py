"""Contexts of torch's modes: no gradients wanted, few of them wanted, autocast.

A kernel may take a shorter way if a gradient is not wanted, so its results need not have the bits of the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normcheck.cases.inputs import GRADIENT_OF, Inputs
from normcheck.contexts.kernel import Kernel, NotTried, Step, copied

_PARAMETERS = ("dw", "db")


def inference(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward under torch.no_grad(), and with no input that wants a gradient."""
    with torch.no_grad():
        outputs = kernel.forward(copied(first)).outputs
    yield Step("under torch.no_grad()", (0,), outputs, exact=False)
    if kernel.by_autograd:
        outputs = kernel.forward(copied(first), wanted=()).outputs
        yield Step("with no input that wants a gradient", (0,), outputs, exact=False)


def frozen(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Gradients of one input alone, and of all but the parameters."""
    names = tuple(first.leaves)
    if not kernel.by_autograd:
        raise NotTried("its backward is a function of its own, and not asked for some gradients only")
    if len(names) < 2:
        raise NotTried("one input alone has a gradient")
    of_data = tuple(name for name in names if name not in _PARAMETERS)
    for wanted in dict.fromkeys([of_data, *((name,) for name in names)]):
        called = kernel.forward(copied(first), wanted=wanted)
        inputs = " and ".join(GRADIENT_OF[name] for name in wanted)
        words = f"with a gradient wanted of {inputs} alone"
        yield Step(words, (0,), {**called.outputs, **kernel.backward(called)}, wanted, exact=False)


def autocast(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward under torch.autocast of the dtype of x, or of bf16 if that is fp32."""
    x = first.x
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    with torch.autocast(x.device.type, dtype=dtype):
        called = kernel.forward(copied(first))
    outputs = {**called.outputs, **kernel.backward(called)}
    yield Step(f"under torch.autocast of {str(dtype).removeprefix('torch.')}", (0,), outputs, exact=False)
