"""What the fused judge keeps of one case between its launches: numbers found, rows, and sums over them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """What kernels have found, by position, see ``layout``: each of the numbers as a count, and as a size in fp64."""

    counts: Sequence[int]
    sizes: Sequence[float]


@dataclass
class Found:
    """What kernels find of a case: ``numbers`` (n,) int64, 0 at first. All of them are read from the GPU at once."""

    numbers: Tensor
    _used: int = 0
    _seen: tuple[list[int], list[float]] | None = None

    @classmethod
    def room_for(cls, number: int, device: torch.device) -> Found:
        """So many numbers on ``device``. On a GPU one launch makes those of _AT_ONCE cases."""
        if device.type == "cpu":
            return cls(torch.zeros(number, dtype=torch.int64))
        made = _made.setdefault((number, device, threading.get_ident()), [])
        if not made:
            aligned = number + number % 2  # as Triton takes every address to be, to 16 bytes
            made += torch.zeros((_AT_ONCE, aligned), dtype=torch.int64, device=device).unbind()
        return cls(made.pop())

    def has_room(self, number: int) -> bool:
        """Whether so many numbers are left that no kernel fills."""
        return self._used + number <= self.numbers.numel()

    def next(self, number: int) -> slice:
        """The place of the next numbers, for a kernel that is launched now."""
        place = slice(self._used, self._used + number)
        self._used, self._seen = place.stop, None
        return place

    def seen(self, place: slice) -> Seen:
        """The numbers of a place, after every kernel that was launched so far."""
        if self._seen is None:
            numbers = self.numbers.cpu()
            self._seen = numbers.tolist(), numbers.view(torch.float64).tolist()
        counts, sizes = self._seen
        return Seen(counts[place], sizes[place])


_AT_ONCE = 64
_made: dict[tuple[int, torch.device, int], list[Tensor]] = {}
"""For each number, device and thread, which may use a stream of its own: rows of zeros that no case has yet."""


@dataclass(frozen=True)
class Sums:
    """The ``values`` of ``gradients.sums_kernel``, for dy whose ``bits`` are set, those in ``doubt`` or not.

    ``both``: with those of a kernel that is given the statistics.
    """

    values: Tensor
    bits: Tensor | None
    doubt: Tensor | None
    both: bool

    def are_for(self, bits: Tensor | None, doubt: Tensor | None, *, given: bool) -> bool:
        """Whether these are the sums for such a backward."""
        return self.bits is bits and self.doubt is doubt and (self.both or not given)


@dataclass(frozen=True)
class Kept:
    """What the forward leaves for the gradients: the ``rows`` (8, M) of ``forward_kernel``, and room in ``found``.

    ``numbers``: those of the case. ``both``: whether a backward can be given the statistics. ``sums``: those that were
    added up.
    """

    rows: Tensor
    found: Found
    numbers: Tensor
    both: bool
    sums: list[Sums] = field(default_factory=list)
