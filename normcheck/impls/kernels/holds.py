"""How wide rows are held in shared memory (``held``): in how many pieces, and what stays there or in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from normcheck.impls.kernels.tiles import ceil_div

VECTOR_BYTES = 16
"""What a thread copies at once."""

ROOM = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper and later data-centre GPUs; on others rows are not held."""

MULTIPROCESSORS = 132
"""Those of an H100 or H200."""

UNASKED = 48 * 1024
"""Bytes that a program may have without asking. Triton asks for more if what it knows of exceeds them; it does not know
of the place where blocks meet."""

SPARE = 512
"""Bytes of it that sums over a row take, and more."""

ALIGNED = 16
"""Triton knows of a pointer, in bytes, and of a stride, in elements, whether it is a multiple of this."""


MOST_BLOCKS = 8
"""Multiprocessors of a cluster that every GPU of this kind has."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A row is shared by ``blocks`` of ``warps`` warps each, and cut into pieces of ``VECTOR_BYTES`` for each thread.

    There is room for ``stages`` rows. In a loop over rows, at most ``groups`` programs share them, and ``shared``
    pieces of the weight stay in shared memory.
    """

    warps: int
    blocks: int = 1
    stages: int = 1
    groups: int = MULTIPROCESSORS
    shared: int = 0

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of a row that a block has."""
        return self.warps * 32 * VECTOR_BYTES

    def pieces(self, N: int, itemsize: int) -> int:
        """The number of pieces of a row of N elements of ``itemsize`` bytes."""
        return ceil_div(N * itemsize, self.piece_bytes * self.blocks)

    def constants(self, N: int, itemsize: int) -> dict[str, int]:
        """The constants of every kernel in ``held``, and the options of its compilation."""
        pieces = self.pieces(N, itemsize)
        return {
            "PIECES": pieces, "VECTOR": VECTOR_BYTES // itemsize, "STAGES": self.stages,
            "num_warps": self.warps, "num_ctas": self.blocks,
        }  # fmt: skip

    def looped(self, N: int, itemsize: int) -> dict[str, int]:
        """The same of a kernel that loops over rows."""
        constants = self.constants(N, itemsize)
        return {**constants, "SHARED": min(self.shared, constants["PIECES"])}


def fitting(how: Hold, N: int, itemsize: int, weight_itemsize: int, *, matrices: int) -> Hold | None:
    """``how`` with no more stages than there is room for, and as much of the weight as fits beside; None: no room.

    A row of each of ``matrices``, of ``itemsize`` bytes an element, is held.
    """
    row = matrices * how.pieces(N, itemsize) * how.piece_bytes
    stages = min(how.stages, (ROOM - SPARE) // row)
    if not stages:
        return None
    each = how.piece_bytes // itemsize * weight_itemsize
    shared = min(how.shared, (ROOM - SPARE - stages * row) // each) if each else 0
    return replace(how, stages=stages, shared=shared)


def can_hold(N: int, *matrices: Tensor) -> bool:
    """Whether the rows of N columns of ``matrices``, on a GPU, are aligned as asynchronous copies need it."""
    return N % ALIGNED == 0 and all(m.data_ptr() % ALIGNED == 0 and m.stride(0) % ALIGNED == 0 for m in matrices)


@cache
def room_on(device: torch.device) -> bool:
    """Whether a program on this GPU may have ``ROOM`` bytes of shared memory."""
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= ROOM)
