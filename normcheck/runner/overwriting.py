"""Inputs that an implementation may overwrite: they are put back after a call, and what lies in their memory is copied.

So the next call gets what the first one got, and an output in the memory of an input outlives it. Only a tensor's own
elements are put back: what was written around them shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.inputs import Inputs


@dataclass(frozen=True, slots=True)
class _Lent:
    """``place``: the own elements of an input; ``values``: what they were; ``size``: bytes of the storage behind it."""

    place: Tensor
    values: Tensor
    size: int

    def put_back(self) -> None:
        """Undo what was written to the elements, unless the storage was resized: then they may lie outside of it."""
        if self.place.untyped_storage().nbytes() == self.size:
            self.place.copy_(self.values)


@contextmanager
def put_back(names: Collection[str], inputs: Inputs) -> Iterator[None]:
    """At the end of the block, also by an exception, the inputs of these ``names`` are what they were before it."""
    places = [guard_bands.elements(tensor) for name, tensor in inputs.named() if name in names]
    lent = [_Lent(place, place.clone(), place.untyped_storage().nbytes()) for place in places]
    try:
        yield
    except BaseException:
        with suppress(Exception):  # a GPU that went wrong does not copy either: what was raised first counts
            _put_back(lent)
        raise
    _put_back(lent)


def _put_back(lent: Sequence[_Lent]) -> None:
    for one in lent:
        one.put_back()
    if lent and lent[0].place.is_cuda:
        torch.cuda.synchronize(lent[0].place.device)  # another process may be the next to read them


def apart(returned: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """``returned``, with a copy of each tensor that lies in the memory of an input. A copy keeps autograd's graph."""
    places = {tensor.untyped_storage().data_ptr() for _, tensor in inputs.named() if tensor.numel()}
    return {name: tensor.clone() if _within(tensor, places) else tensor for name, tensor in returned.items()}


def _within(tensor: Tensor, places: set[int]) -> bool:
    dense = tensor.layout == torch.strided and tensor.numel() > 0
    return dense and tensor.untyped_storage().data_ptr() in places
