"""Contexts of torch's modes: no gradients wanted, few of them wanted, autocast, torch.compile.

A kernel may take a shorter way if a gradient is not wanted, so its results need not have the bits of the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.inputs import GRADIENT_OF, Inputs
from normcheck.cases.tensor_names import OF_PARAMETERS, RESIDUAL_OUT
from normcheck.contexts.kernel import Kernel, NotTried, Step, both, copied, fill
from normcheck.errors import Broken

_WANTED_BY_NOBODY = "with no input that wants a gradient"


def inference(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Forward under torch.no_grad(), under torch.inference_mode(), as engines serve, and with no input that wants a
    gradient: then with other values in the same memory, of new tensors, whose addresses and versions are those of the
    old ones, and of the same tensors and parameters, as when weights are loaded anew; then with inputs in other memory.
    What was returned stays as it was when the next call is made.
    """
    for words, mode in (
        ("under torch.no_grad()", torch.no_grad),
        ("under torch.inference_mode()", torch.inference_mode),
        *((_WANTED_BY_NOBODY, nullcontext) for _ in range(kernel.by_autograd)),
    ):
        given, elsewhere = _new_tensors(copied(first)), copied(second)
        kept = _called(kernel, given, first, words, mode)
        yield Step(words, (0,), kept, exact=False)
        anew = _with_parameters(_new_tensors(given), wanted=mode is not nullcontext)
        fill(_new_tensors(given), second)  # at once: what is kept of the last call alone is still there
        outputs = _called(kernel, anew, second, words, mode)
        yield Step(f"{words} with new tensors in the memory of old ones", (1,), outputs, exact=False)
        yield Step(f"{words}, when it is looked at again after a further call", (0,), kept, exact=False)
        with torch.no_grad():
            fill(anew, first)
        outputs = _called(kernel, anew, first, words, mode)
        yield Step(f"{words} with other values in the memory of its inputs", (0,), outputs, exact=False)
        outputs = _called(kernel, elsewhere, second, words, mode)
        yield Step(f"{words} with inputs in other memory", (1,), outputs, exact=False)


def _new_tensors(inputs: Inputs) -> Inputs:
    """Tensors of the same memory, that nobody has written to yet, as torch counts."""
    return inputs.each(lambda tensor: tensor.data)


def _with_parameters(inputs: Inputs, *, wanted: bool) -> Inputs:
    """Weight and bias as parameters, with which a kernel may keep what it made; ``wanted``: their gradients are."""
    own = {name: getattr(inputs, name) for name in ("weight", "bias")}
    made = {name: torch.nn.Parameter(t, requires_grad=wanted) for name, t in own.items() if t is not None}
    return replace(inputs, **made)


def _called(
    kernel: Kernel, inputs: Inputs, values: Inputs, words: str, mode: Callable[[], AbstractContextManager[object]]
) -> Mapping[str, Tensor]:
    """What forward returns for ``inputs``, which have these ``values``; Broken if it changes one, and may not."""
    with mode():
        outputs = kernel.forward(inputs, wanted=() if words == _WANTED_BY_NOBODY else None).outputs
    for (name, now), (_, before) in zip(inputs.named(), values.named(), strict=True):
        if name not in kernel.overwrites and not guard_bands.same_bits(now.detach(), before):
            raise Broken("input_modified", name, f"{name} was modified {words}; inputs belong to the caller")
    return outputs


def frozen(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Gradients of one input alone, of all but one, and of all but the parameters; of all, after an optimizer's step
    has written to the tensors of a call before, and if nobody uses y, or the sum that is returned beside it, as in the
    last layer: the gradient of that is 0 in ``second``.

    What torch.compile has compiled it compiles anew for each: then all but one are not asked for.
    """
    names = tuple(first.leaves)
    if not kernel.by_autograd:
        raise NotTried("its backward is a function of its own, and not asked for some gradients only")
    if len(names) < 2:
        raise NotTried("one input alone has a gradient")
    of_data = tuple(name for name in names if name not in OF_PARAMETERS)
    others = [tuple(each for each in names if each != name) for name in names] if not kernel.is_compiled() else []
    for wanted in dict.fromkeys([of_data, *((name,) for name in names), *others]):
        called = kernel.forward(copied(first), wanted=wanted)
        inputs = " and ".join(GRADIENT_OF[name] for name in wanted)
        words = f"with a gradient wanted of {inputs} alone"
        yield Step(words, (0,), {**called.outputs, **kernel.backward(called)}, wanted, exact=False)
    trained = kernel.forward(copied(first)).inputs
    with torch.no_grad():
        fill(trained, second)
    words = "after an optimizer's step has written to the tensors of the call before"
    yield Step(words, (1,), both(kernel, trained), names, exact=False)
    if second.dresidual_out is not None:
        yield from _half_used(kernel, second, names)


def _half_used(kernel: Kernel, inputs: Inputs, names: tuple[str, ...]) -> Iterator[Step]:
    """Gradients if nobody uses one of y and the sum beside it: the one of which the gradient is 0 here."""
    called, of_sum = kernel.forward(copied(inputs)), bool(inputs.dy.any())
    if not (of_sum or called.outputs[RESIDUAL_OUT].requires_grad):
        return
    unused: dict[str, Any] = {"dresidual_out" if of_sum else "dy": None}
    outputs = {**called.outputs, **kernel.backward(replace(called, inputs=replace(called.inputs, **unused)))}
    words = f"with no gradient of {f'{RESIDUAL_OUT}, as in the last layer' if of_sum else 'y, which nobody uses'}"
    owed = names if of_sum else tuple(name for name in names if name in _OF_SUM)
    yield Step(words, (1,), outputs, owed, exact=False)


_OF_SUM = ("dx", "dresidual", "dresidual_gate")
"""The gradients that hang on the sum which is normed."""


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
