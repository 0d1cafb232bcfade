"""What a call allocates through torch: between guard bands, and poisoned where torch promises no contents.

A band that has changed was written to; outputs that change with the pattern read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normcheck.cases.guard_bands import NAN, Pattern, allocated, band_of


@dataclass(frozen=True)
class Surroundings:
    """The patterns of one run: in the bands and gaps of inputs, in fresh memory, in the bands of what is allocated."""

    inputs: Pattern = NAN
    fresh: Pattern = NAN
    allocated: Pattern = NAN


class Stray(NamedTuple):
    """Writes around a block of ``elements``, ``name``d where it became an output: how many, and where the first is."""

    name: str
    elements: int
    written: int
    where: str


class Arena(TorchFunctionMode):
    """While active, what torch's factory functions return lies between guard bands; what is fresh is poisoned.

    It sees what is called from Python. Memory that C++ code allocates is poisoned by torch itself, see ``call``.
    ``beside``: what the first forward of the run returned beside tensors, for its backward; None before that.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__()
        self._fresh, self._around = surroundings.fresh, surroundings.allocated
        self.beside: Mapping[str, object] | None = None
        self._blocks: list[tuple[Tensor, int, int, torch.dtype]] = []  # buffer as integers, first and end of the tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``; move what a factory made between bands. What torch.compile traces is let through as it is."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        fresh = _FACTORIES.get(func)
        if fresh is None or not _can_be_moved(out) or (kwargs and kwargs.get("out") is not None):
            return out
        shape, stride = tuple(out.shape), tuple(out.stride())
        tensor, block = allocated(shape, stride, out, self._around, self._fresh if fresh else None)
        self._blocks.append((*block, out.dtype))
        return tensor if fresh else tensor.copy_(out)

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """What was written around the blocks that were handed out; ``named``: what became of them, by name."""
        places = {t.data_ptr(): name for name, t in named.items()}
        found = []
        for buffer, first, end, dtype in self._blocks:
            band = band_of(self._around.bits[dtype], buffer.dtype, buffer.device, max(first, len(buffer) - end))
            if torch.equal(buffer[:first], band[:first]) and torch.equal(buffer[end:], band[: len(buffer) - end]):
                continue
            wrong = torch.cat([buffer[:first], buffer[end:]]) != self._around.bits[dtype]
            at = int(wrong.nonzero()[0])
            words = f"{first - at} before its first element" if at < first else f"{at - first + 1} behind its last"
            name = places.get(buffer[first:end].data_ptr(), "")
            found.append(Stray(name, end - first, int(wrong.sum()), words))
        return found


_FACTORIES: Mapping[Callable[..., Any], bool] = MappingProxyType(
    {
        **dict.fromkeys((torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted), True),
        **dict.fromkeys((torch.Tensor.new_empty, torch.Tensor.new_empty_strided), True),
        **dict.fromkeys((torch.zeros, torch.zeros_like, torch.Tensor.new_zeros), False),
        **dict.fromkeys((torch.ones, torch.ones_like, torch.Tensor.new_ones), False),
        **dict.fromkeys((torch.full, torch.full_like, torch.Tensor.new_full), False),
    }
)
"""Function -> whether torch promises nothing about the contents."""


def _can_be_moved(out: object) -> bool:
    return (
        type(out) is Tensor
        and out.layout == torch.strided
        and out.device.type in ("cpu", "cuda")
        and not out.requires_grad
        and out.dtype in NAN.bits
        and out.numel() > 0
        and not (out.device.type == "cpu" and torch.cuda.is_available() and out.is_pinned())
    )
