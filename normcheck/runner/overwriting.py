"""Inputs that an implementation may overwrite: they are restored after a call, and outputs in their memory are copied.

So the next call gets the same inputs, and restoring an input does not change an output. Only a tensor's own elements
are restored, so that writes around them still show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.inputs import Inputs
from normcheck.errors import Broken


class _Lent(torch.autograd.Function):
    """The identity. What it returns has the memory of the leaf that it gets, but is no view of it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return _in_its_memory(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _in_its_memory(tensor: Tensor) -> Tensor:
    """Another tensor of the same elements, which autograd takes for no view."""
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return own.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def lent(names: Collection[str], inputs: Inputs) -> Inputs:
    """``inputs``, with another tensor of the same memory for each of these ``names``, if autograd records: a call may
    mark it as written to (``ctx.mark_dirty``), which makes it a part of the graph, and which no leaf may be.

    The gradient of one that wants one is still the leaf's.
    """
    own = [(name, tensor) for name, tensor in inputs.named() if name in names and torch.is_grad_enabled()]
    apply: Any = _Lent.apply
    return replace(inputs, **{name: apply(t) if t.requires_grad else _in_its_memory(t) for name, t in own})


@dataclass(frozen=True, slots=True)
class _Saved:
    """``elements``: an input's own elements; ``values``: a copy of them; ``size``: bytes of the input's storage."""

    elements: Tensor
    values: Tensor
    size: int


@contextmanager
def put_back(names: Collection[str], inputs: Inputs) -> Iterator[None]:
    """At the end of the block, also by an exception, give the inputs of these ``names`` their values from before it.

    Raises Broken if an earlier call has left one of them without its memory.
    """
    own = [_elements(name, tensor) for name, tensor in inputs.named() if name in names]
    saved = [_Saved(elements, elements.clone(), elements.untyped_storage().nbytes()) for elements in own]
    try:
        yield
    except BaseException:
        with suppress(Exception):  # a failed GPU cannot copy either, and the first error is the one to report
            _put_back(saved)
        raise
    _put_back(saved)


def _elements(name: str, tensor: Tensor) -> Tensor:
    try:
        return guard_bands.elements(tensor)
    except RuntimeError as error:  # its storage was resized
        text = f"{name} was modified: its shape, strides or storage; inputs belong to the caller"
        raise Broken("input_modified", name, text) from error


def _put_back(saved: Sequence[_Saved]) -> None:
    """Write the values back, except into a storage that was resized: the elements may lie outside of it."""
    for one in saved:
        if one.elements.untyped_storage().nbytes() == one.size:
            one.elements.copy_(one.values)
    if saved and saved[0].elements.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(saved[0].elements.device)  # another process may be the next to read them


def apart(returned: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """``returned``, with a copy of each tensor that lies in the memory of an input. A copy keeps autograd's graph.

    An input itself, or a view of it, has none: what was written there was written behind autograd's back.
    """
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in inputs.named() if tensor.numel()}
    own = {name: tensor.detach() if _is_input(tensor) else tensor for name, tensor in returned.items()}
    return {name: tensor.clone() if _within(tensor, storages) else tensor for name, tensor in own.items()}


def _is_input(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a leaf of autograd's graph, one that was ``lent``, or a view of one."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_SAME_VALUES):
        node = node.next_functions[0][0]
    return tensor.requires_grad and (node is None or node.name() == "torch::autograd::AccumulateGrad")


_SAME_VALUES = (
    *("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "AliasBackward", "AsStridedBackward"),
    f"{_Lent.__name__}Backward",
)
"""The beginnings of the names of nodes that are views, or the identity."""


def _within(tensor: Tensor, storages: set[int]) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # another class need not have memory; it is not taken
    return (
        plain
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.untyped_storage().data_ptr() in storages
    )
