"""Contexts of torch's modes: no gradients wanted, few of them wanted, autocast, torch.compile.

A kernel may take a shorter way if a gradient is not wanted, so its results need not have the bits of the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normcheck.cases.inputs import GRADIENT_OF, Inputs
from normcheck.contexts.kernel import Kernel, NotTried, Step, both, copied, fill

_PARAMETERS = ("dw", "db")


def inference(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward under torch.no_grad(), with other values in the same memory, as when weights are loaded anew, and in
    other memory; and with no input that wants a gradient.
    """
    given = copied(first)
    for words, number, values, inputs in (
        ("", 0, first, given),
        (" with other values in the memory of its inputs", 1, second, given),
        (" with inputs in other memory", 0, second, copied(first)),
    ):
        fill(given, values)
        with torch.no_grad():
            outputs = kernel.forward(inputs).outputs
        yield Step(f"under torch.no_grad(){words}", (number,), outputs, exact=False)
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


def inside_compile(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """The functions inside torch.compile, which has sizes that change: at first there are fewer rows.

    What is compiled adds in another order, so its bits may differ.
    """
    compiled, shape = kernel.compiled(), first.x.shape

    def fewer_rows(tensor: Tensor) -> Tensor:
        return (tensor[: (shape[0] + 1) // 2] if tensor.shape == shape else tensor).clone()

    both(compiled, first.each(fewer_rows))
    for number, inputs in enumerate((first, second)):
        yield Step("inside torch.compile", (number,), both(compiled, copied(inputs)), exact=False)
