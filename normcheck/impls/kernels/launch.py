"""Launch a kernel as an earlier call did, without asking Triton again which compilation fits.

``kernel[grid](...)`` looks at each argument in every call (its type, its alignment, whether it is 1), which takes the
host some 20 us: longer than a GPU takes for small rows. Here a call that looks to Triton like an earlier one goes to
the compilation of that one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16
"""Triton loads 16 bytes at a time if a pointer, in bytes, or a stride is a multiple of this."""

_known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
"""What the compilation of a call depends on -> the compilation, and the kernel's constants as arguments."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | int | float | None, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``. The first argument is a tensor; ``constants`` may include options.

    Interpreted kernels, on CPU tensors, are called as they are. Triton launches on the current GPU, whatever GPU the
    tensors lie on: there nothing would wait for the kernel.
    """
    first = arguments[0]
    assert isinstance(first, Tensor)
    if not first.is_cuda:
        kernel[grid](*arguments, **constants)
        return
    current = torch.cuda.current_device()
    if first.device.index != current:
        with torch.cuda.device(first.device):
            launch(kernel, grid, *arguments, **constants)
        return
    call = (kernel.fn, current, *constants.items(), *map(_fact, arguments))
    known = _known.get(call)
    if known is None:
        compiled = kernel[grid](*arguments, **constants)
        _known[call] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    else:
        compiled, last = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *last)


def _fact(argument: Tensor | int | float | None) -> Hashable:
    """What a compilation depends on: for an integer, whether it is 1, a multiple of 16, and fits into 32 bits."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNED == 0
    if isinstance(argument, int):
        return argument == 1, argument % _ALIGNED == 0, -(2**31) <= argument < 2**31
    return argument is None
