"""Memory out of which a kernel's process allocates: the process that judges lays it with a pattern, and reads it.

The kernel's process only tells where its blocks lie. A kernel that hides a block is caught: its bytes differ
from the pattern where no block was reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from normcheck.cases.guard_bands import Pattern
from normcheck.errors import Broken
from normcheck.isolation.messages import Message
from normcheck.isolation.shared_memory import HostMemory, Memory
from normcheck.runner.arena import NOWHERE, Stray

UNTOLD = "its process did not tell what it allocated"
"""The beginning of the message on an answer without it."""

_ALIGNMENT = 512
_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 24  # of a region; what needs more is looked at in the kernel's process
_MOST_REGIONS = 64  # a kernel that keeps memory of so many calls keeps it from here on in memory of its own
_MOST_BLOCKS = 500  # of one call; what it allocates beyond is looked at in the kernel's process
_PART_BYTES = 1 << 18  # that are filled, or looked at, at a time
_BEYOND_BYTES = 1 << 16  # behind the last block, that are looked at


class Block(NamedTuple):
    """Memory of one allocated tensor: bytes ``at`` to ``end``, elements of ``size`` bytes."""

    at: int
    end: int
    size: int


class Region:
    """The kernel's side: where one call allocates, see ``runner.arena.Region``. ``blocks``: what it took, in order.

    ``earlier``: the regions of earlier calls. A call without a region of its own has one that ends where it begins.
    """

    def __init__(self, memory: HostMemory, first: int, end: int, earlier: Sequence[Region] = ()) -> None:
        self._memory, self._next, self._end, self._earlier = memory, first, end, earlier
        self.blocks: list[Block] = []
        self._ends: dict[int, int] = {}  # address of a block's storage -> address behind the block
        self._owners: list[weakref.ref[memoryview]] = []

    def take(self, count: int, band: int, size: int) -> Tensor | None:
        """See ``runner.arena.Region``."""
        at = self._next + band
        behind = -(-(at + count) // _ALIGNMENT) * _ALIGNMENT + band
        if behind > self._end or len(self.blocks) == _MOST_BLOCKS:
            return None
        self._next = behind
        self.blocks.append(Block(at, at + count, size))
        self._ends[self._memory.address + at - band] = self._memory.address + at + count
        owner = self._memory.owned(at - band, count + 2 * band)
        self._owners.append(weakref.ref(owner))
        return torch.frombuffer(owner, dtype=torch.uint8)

    def end_of(self, storage: int) -> int | None:
        """See ``runner.arena.Region``. Of two blocks at one place the later one counts."""
        ends = (region._ends.get(storage) for region in (self, *reversed(self._earlier)))
        return next((end for end in ends if end is not None), None)

    @property
    def kept(self) -> list[Block]:
        """The blocks whose tensors are still in use."""
        return [block for block, owner in zip(self.blocks, self._owners, strict=True) if owner() is not None]


def in_region(memory: Memory, tensor: Tensor) -> int | None:
    """The byte of shared memory where the first element of ``tensor`` lies, if it is in a region; else None."""
    if not isinstance(memory, HostMemory) or not tensor.numel():
        return None
    at = tensor.data_ptr() - memory.address
    return at if memory.size <= at < memory.end else None


@dataclass
class _Laid:
    """The judge's side of a region: its ``pattern``, and what a call took.

    Bytes before ``laid`` have had the pattern; those before ``clean`` have to be laid again before another call
    allocates here, for which there is memory to ``end``.
    """

    first: int
    end: int
    pattern: Pattern
    laid: int
    clean: int
    blocks: list[Block] = field(default_factory=list)
    kept: list[Block] = field(default_factory=list)

    def gaps(self) -> list[tuple[int, int]]:
        """The parts that no block has, up to some way behind the last one."""
        last = self.blocks[-1].end if self.blocks else self.first
        beyond = Block(min(self.end, last + _BEYOND_BYTES), 0, 0)
        edges = [Block(self.first, self.first, 0), *self.blocks, beyond]
        return [(one.end, other.at) for one, other in pairwise(edges)]


class WatchedMemory:
    """All regions of one kernel's process: the judge's side."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._regions: list[_Laid] = []
        self._current: _Laid | None = None
        self._places: dict[str, int] = {}  # of the latest results, by name

    def lay(self, given: int, pattern: Pattern) -> tuple[int, int] | None:
        """The first byte and the end of a region for a call that gets ``given`` bytes; None if it is too large for one.

        No tensor of an earlier call that is still in use lies there.
        """
        size = max(_LEAST_BYTES, 2 * given)
        free = [region for region in self._regions if not region.kept]
        region = next((region for region in free if region.pattern is pattern), None) or next(iter(free), None)
        self._current = region = None if size > _MOST_BYTES else region or self._new(pattern)
        if region is None:
            return None
        if region.pattern is not pattern:
            region.pattern, region.laid = pattern, region.first
        region.end = region.first + size
        self._places = {name: at for name, at in self._places.items() if not region.first <= at < region.end}
        self._fill(region.first, min(region.clean, region.laid), pattern)
        self._fill(region.laid, region.end, pattern)
        region.laid, region.clean, region.blocks = max(region.laid, region.end), region.first, []
        return region.first, region.end

    def _new(self, pattern: Pattern) -> _Laid | None:
        first = self._memory.size + len(self._regions) * _MOST_BYTES
        if len(self._regions) == _MOST_REGIONS or first + _MOST_BYTES > self._memory.end:
            return None
        self._regions.append(_Laid(first, first, pattern, first, first))
        return self._regions[-1]

    def look(self, answer: Message) -> list[Stray]:
        """The writes to memory of the latest call, and of what is kept from earlier ones, that is no block's.

        Each is told once. Raises Broken if the answer does not say where the blocks lie, or if a result lies in the
        memory of an earlier one.
        """
        current, self._current = self._current, None
        if current is None:
            return []
        told = answer.get("region")
        try:
            assert isinstance(told, Mapping)
            current.blocks = _blocks(told["blocks"], _MOST_BLOCKS, current)
            kept = frozenset(_blocks(told["kept"], _MOST_BLOCKS * _MOST_REGIONS))
        except (AssertionError, KeyError, TypeError, ValueError):
            raise Broken("crash", "", f"{UNTOLD}: {str(told)[:200]}") from None
        current.clean = current.gaps()[-1][1]
        for region in self._regions:
            region.kept = [block for block in region.blocks if block in kept]
        self._require_own_memory(_places(answer), current)
        looked = [region for region in self._regions if region is current or region.kept]
        return [stray for region in looked for gap in region.gaps() for stray in self._written(region, gap)]

    def _written(self, region: _Laid, gap: tuple[int, int]) -> list[Stray]:
        """The writes to a gap, as those of the block before it, or behind it. The gap is laid again."""
        first, end = gap
        words, odd = _filled(region.pattern.word), first % 2
        if all(words.startswith(self._memory.read(*part), odd) for part in _parts(first, end)):
            return []
        found = self._memory.part(first, end - first).clone()
        self._fill(first, end, region.pattern)
        wrong = (found != self._memory.part(first, end - first)).nonzero().flatten() + first
        before = [block for block in region.blocks if block.end == first]
        after = [block for block in region.blocks if block.at == end]
        middle = (first + end) // 2 if before and after else end if before else first
        strays = []
        for block, at in ((before, wrong[wrong < middle]), (after, wrong[wrong >= middle])):
            if len(at):
                strays.append(_stray(block[0] if block else None, at, self._places))
        return strays

    def _require_own_memory(self, results: Mapping[str, int], current: _Laid) -> None:
        """Raise Broken if a result lies at the place of the latest one of its name, and was not allocated anew."""
        before, self._places = self._places, {**self._places, **results}
        for name, at in results.items():
            if at == before.get(name) and not current.first <= at < current.end:
                text = f"{name} of two calls lies in the same memory: the second call overwrote the result of the first"
                raise Broken("not_repeatable", name, text)

    def _fill(self, first: int, end: int, pattern: Pattern) -> None:
        words, odd = memoryview(_filled(pattern.word)), first % 2
        for at, stop in _parts(first, end):
            self._memory.write(at, words[odd : odd + stop - at])


def _places(answer: Message) -> dict[str, int]:
    """Where the results of an answer lie, by name, those that are in a region."""
    parts = [answer, answer["gradients"]] if isinstance(answer.get("gradients"), dict) else [answer]
    returned = [item for part in parts if isinstance(part.get("returned"), list) for item in part["returned"]]
    told = {str(item.get("name"))[:100]: item.get("lies") for item in returned if isinstance(item, dict)}
    return {name: at for name, at in told.items() if type(at) is int}


@cache
def _filled(word: bytes) -> bytes:
    """Memory that is filled with ``word``, a byte longer than a part."""
    return word * (_PART_BYTES // 2 + 1)


def _parts(first: int, end: int) -> Iterator[tuple[int, int]]:
    """The bytes ``first`` to ``end`` in parts, each with its end: what fills them stays in a core's cache."""
    for at in range(first, end, _PART_BYTES):
        yield at, min(at + _PART_BYTES, end)


def _blocks(told: object, most: int, region: _Laid | None = None) -> list[Block]:
    """What was told, checked: blocks in order and apart, within ``region``. Raises ValueError or TypeError."""
    if not isinstance(told, list) or len(told) > most:
        raise ValueError(f"expected at most {most} blocks")
    blocks = [Block(*item) for item in told]
    if not all(type(number) is int for block in blocks for number in block):
        raise TypeError("expected integers")
    ends = [block.end for block in blocks]
    apart = all(block.at >= end for block, end in zip(blocks[1:], ends, strict=False))
    if region is not None and not (apart and (not blocks or (region.first <= blocks[0].at and ends[-1] <= region.end))):
        raise ValueError("expected blocks that lie one behind the other within the region")
    if not all(block.at < block.end and block.size in (1, 2, 4, 8) for block in blocks):
        raise ValueError("expected blocks of at least one byte")
    return blocks


def _stray(block: Block | None, at: Tensor, results: Mapping[str, int]) -> Stray:
    """The written bytes ``at``, in order, in words about the elements of ``block``; without one, about bytes."""
    if block is None:
        return Stray("", 0, len(at), NOWHERE)
    name = next((name for name, place in results.items() if block.at <= place < block.end), "")
    distance = (block.at - 1 - at) if at[0] < block.at else (at - block.end)
    elements = torch.unique(distance // block.size)
    words = "before its first element" if at[0] < block.at else "behind its last"
    first = int(distance[0]) // block.size + 1
    return Stray(name, (block.end - block.at) // block.size, len(elements), f"{first} {words}")
