"""The arena: memory that a call allocates through torch lies between guard bands, poisoned where torch leaves it unset.

If a band has changed, the call wrote to it. If outputs change with the pattern, the call read it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normcheck.cases import guard_bands
from normcheck.cases.guard_bands import NAN, Pattern, allocated, as_integers, band_of
from normcheck.errors import Broken
from normcheck.impls.kernels import on_cpu

NOWHERE = "where it says that it has allocated nothing"
"""Of a write that lies beside no block of the call."""

LATE = "was still being written"
"""Of a result, in the message on one that a call returned too early."""


@dataclass(frozen=True)
class Surroundings:
    """The patterns of one run: in bands and gaps of ``inputs``, in ``fresh`` (unset) memory, around ``allocated``, and
    around the ``saved`` outputs that a backward gets."""

    inputs: Pattern = NAN
    fresh: Pattern = NAN
    allocated: Pattern = NAN
    saved: Pattern = NAN


class Stray(NamedTuple):
    """Writes to the bands around one allocated block.

    ``name``: the output that lies in the block, or ""; ``elements``: the size of the block, 0 if there is no block;
    ``written``: the number of changed elements in its bands, or of bytes; ``where``: the place of the first, in words.
    """

    name: str
    elements: int
    written: int
    where: str


class Region(Protocol):
    """Memory that somebody else has laid with the pattern around allocated blocks, and looks at after the call."""

    def take(self, count: int, band: int, size: int) -> Tensor | None:
        """``count`` bytes for elements of ``size``, between two bands of ``band`` bytes: all of them; None if full.

        uint8 (band + count + band,), a storage of its own.
        """
        ...

    def end_of(self, storage: int) -> int | None:
        """The address behind the block whose storage begins at this address, here or in an earlier call's region."""
        ...


class Arena(TorchFunctionMode):
    """While it is active, torch's factories return tensors between guard bands; uninitialised ones are poisoned.

    It sees calls from Python only; ``call.poisoned_memory`` has torch poison memory that C++ code allocates.
    ``beside``: the plain values that the run's first forward returned with its tensors, for the backward; None before.
    ``region``: where tensors on the CPU are placed while there is room; None, and behind that: in memory of its own.
    ``waits``: see ``call.Unwatched``.
    """

    waits = True

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__()
        self._fresh, self._around = surroundings.fresh, surroundings.allocated
        self.beside: Mapping[str, object] | None = None
        self.region: Region | None = None
        self._blocks: list[tuple[Tensor, int, int, torch.dtype]] = []  # integer buffer; start, end, dtype of the tensor
        self._settled: list[tuple[str, Tensor]] = []  # name of a result, and whether it was whole when it was returned

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and move a factory's tensor between bands. What torch.compile traces is only called, and what
        its runtime calls: in the pool of its graphs (mode="reduce-overhead") nothing else may live.
        """
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        func, args, kwargs = on_cpu.without_gpu(func, args, kwargs or {})
        if func in _RESIZING or kwargs.get("out") is not None:
            return self._resized(func, args, kwargs)
        out = func(*args, **kwargs)
        fresh = _FACTORIES.get(func)
        if fresh is None or not _can_be_moved(out) or _is_of_inductor(sys._getframe(1)):
            return out
        tensor = self._on_plot(out, fresh)
        if tensor is None:
            shape, stride = tuple(out.shape), tuple(out.stride())
            tensor, block = allocated(shape, stride, out, self._around, self._fresh if fresh else None)
            self._blocks.append((*block, out.dtype))
        return tensor if fresh else tensor.copy_(out)

    def _resized(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func``, which may resize tensors. One that grows out of its block gets memory of its own."""
        found = [
            t for t in tree_leaves((args[:1], kwargs.get("out"))) if type(t) is Tensor and self._end(t) is not None
        ]
        held = [_Held.of(tensor, self._end(tensor) or 0) for tensor in found]
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if not held or "not resizable" not in str(error):
                raise
            for each in held:  # what lies in a region cannot grow beyond its bands
                each.restore()
                _move(each.tensor, each.tensor.clone())
            return func(*args, **kwargs)
        for each in held:
            end = self._end(each.tensor)
            if end is not None and _last_byte(each.tensor) > end:
                value = each.tensor.clone()
                each.restore_behind(end)
                _move(each.tensor, value)
        return out

    def _end(self, tensor: Tensor) -> int | None:
        """The address behind the block in whose memory ``tensor`` lies; None if it lies in none."""
        if tensor.layout != torch.strided:
            return None
        place = tensor.untyped_storage().data_ptr()
        for buffer, _, end, _ in self._blocks:
            if buffer.data_ptr() == place:
                return place + end * buffer.element_size()
        return None if self.region is None else self.region.end_of(place)

    def _on_plot(self, like: Tensor, fresh: bool) -> Tensor | None:
        """A tensor of this geometry in the region, poisoned if it is ``fresh``; None if there is no room."""
        if self.region is None or like.is_cuda:
            return None
        shape, stride, size = tuple(like.shape), tuple(like.stride()), like.element_size()
        band, extent = guard_bands.footprint(shape, stride, size)
        place = self.region.take(extent * size, band * size, size)
        if place is None:
            return None
        if fresh and (size == 1 or self._fresh is not self._around):  # what was laid has elements of two bytes
            inside = place[band * size : (band + extent) * size]
            as_integers(inside.view(like.dtype)).fill_(self._fresh.bits[like.dtype])
        tensor = torch.empty(0, dtype=like.dtype)
        return tensor.set_(place.untyped_storage(), band, shape, stride)

    def _bands(self, buffer: Tensor, first: int, end: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """The two bands of a block as integers, each with what it was filled with."""
        band = band_of(self._around.bits[dtype], buffer.dtype, buffer.device, max(first, len(buffer) - end))
        return [(buffer[:first], band[:first]), (buffer[end:], band[: len(buffer) - end])]

    def note(self, name: str, settled: Tensor) -> None:
        """Note whether a result was whole when it was returned: a bool (), not waited for."""
        self._settled.append((name, settled))

    def clean(self) -> Tensor | None:
        """Whether ``strays`` finds nothing, as a bool () that is not waited for; None if that is known."""
        flags = guard_bands.equality([pair for block in self._blocks for pair in self._bands(*block)])
        if flags is None:
            return torch.tensor(False)
        flags += [settled for _, settled in self._settled]
        return torch.stack(flags).all() if flags else None

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """The writes to the bands around allocated blocks; ``named``: the outputs, to name the block of each.

        Raises Broken if a result was still being written when it was returned.
        """
        clean = self.clean()
        if clean is None or bool(clean):
            return []
        for name, settled in self._settled:
            if not settled:
                message = f"{name} {LATE}, by another stream, when it was returned"
                raise Broken("not_repeatable", name, message)
        places = {t.data_ptr(): name for name, t in named.items()}
        strays: list[Stray] = []
        for buffer, first, end, dtype in self._blocks:
            if guard_bands.all_equal(self._bands(buffer, first, end, dtype)):
                continue
            wrong = torch.cat([buffer[:first], buffer[end:]]) != self._around.bits[dtype]
            if not wrong.any():  # what was written to is the copy of the pattern, which lies beside
                band_of.cache_clear()
                return [*strays, Stray("", 0, len(buffer) - (end - first), NOWHERE)]
            at = int(wrong.nonzero()[0])
            words = f"{first - at} before its first element" if at < first else f"{at - first + 1} behind its last"
            name = places.get(buffer[first:end].data_ptr(), "")
            strays.append(Stray(name, end - first, int(wrong.sum()), words))
        return strays


_FACTORIES: Mapping[Callable[..., Any], bool] = MappingProxyType(
    {
        **dict.fromkeys((torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted), True),
        **dict.fromkeys((torch.Tensor.new_empty, torch.Tensor.new_empty_strided), True),
        **dict.fromkeys((torch.zeros, torch.zeros_like, torch.Tensor.new_zeros), False),
        **dict.fromkeys((torch.ones, torch.ones_like, torch.Tensor.new_ones), False),
        **dict.fromkeys((torch.full, torch.full_like, torch.Tensor.new_full), False),
    }
)
"""Factory function -> whether the memory that it returns is uninitialised."""


_RESIZING = frozenset((torch.Tensor.resize_, torch.Tensor.resize_as_, torch.resize_as_))


@dataclass(frozen=True)
class _Held:
    """A tensor in a block, before a call that may resize it: its geometry, and the bytes ``behind`` the block."""

    tensor: Tensor
    storage: torch.UntypedStorage
    geometry: tuple[int, torch.Size, tuple[int, ...]]
    behind: Tensor

    @classmethod
    def of(cls, tensor: Tensor, end: int) -> Self:
        whole = guard_bands.buffer_of(tensor)
        geometry = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return cls(tensor, tensor.untyped_storage(), geometry, whole[end - whole.data_ptr() :].clone())

    def restore(self) -> None:
        """Give the tensor its geometry again, which torch changes before it sees that the memory cannot grow."""
        self.tensor.set_(self.storage, *self.geometry)

    def restore_behind(self, end: int) -> None:
        """Write the bytes behind the block again."""
        whole = guard_bands.buffer_of(self.tensor)
        first = end - whole.data_ptr()
        whole[first : first + len(self.behind)] = self.behind


def _last_byte(tensor: Tensor) -> int:
    """The address behind the last element."""
    _, extent = guard_bands.footprint(tuple(tensor.shape), tensor.stride(), tensor.element_size())
    return tensor.data_ptr() + extent * tensor.element_size()


def _move(tensor: Tensor, to: Tensor) -> None:
    tensor.set_(to.untyped_storage(), 0, to.shape, to.stride())


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


def _is_of_inductor(caller: FrameType | None) -> bool:
    """Whether the runtime of torch.compile calls a factory, and no kernel does; a mode of a device may lie between."""
    while caller is not None and caller.f_globals.get("__name__") == "torch.utils._device":
        caller = caller.f_back
    return caller is not None and str(caller.f_globals.get("__name__")).startswith("torch._inductor.")
