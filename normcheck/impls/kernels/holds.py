"""How wide rows are held in shared memory (``held``): in how many pieces, and what stays there or in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from normcheck.impls.kernels.tiles import Tile, ceil_div

VECTOR_BYTES = 16
"""What a thread copies at once."""

ROOM = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper and later data-centre GPUs; on others rows are not held."""

MULTIPROCESSORS = 132
"""Those of an H100 or H200."""

SPARE = 512
"""Bytes of it that sums over a row take, and more."""

ALIGNED = 16
"""Triton knows of a pointer, in bytes, and of a stride, in elements, whether it is a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A row is cut into pieces of ``VECTOR_BYTES`` for each thread of ``warps`` warps; ``stages`` rows are held.

    At most ``groups`` programs share the rows. Of the weight, and of a forward's bias, ``shared`` pieces stay in shared
    memory and ``registers`` pieces in registers. ``most_registers``: a limit for each thread, so that more programs fit
    on a multiprocessor.
    """

    warps: int
    stages: int
    groups: int
    shared: int = 0
    registers: int = 0
    most_registers: int | None = None
    blocks: int = 1

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of a row."""
        return self.warps * 32 * VECTOR_BYTES

    def pieces(self, N: int, itemsize: int) -> int:
        """The number of pieces of a row of N elements of ``itemsize`` bytes."""
        return ceil_div(N * itemsize, self.piece_bytes * self.blocks)

    def columns(self, N: int, itemsize: int) -> int:
        """The columns of a row that each thread has."""
        return self.pieces(N, itemsize) * VECTOR_BYTES // itemsize

    def constants(self, N: int, itemsize: int) -> dict[str, int]:
        """The constants of a kernel in ``held``, and the options of its compilation."""
        count = self.pieces(N, itemsize)
        shared = min(self.shared, count)
        limit = {} if self.most_registers is None else {"maxnreg": self.most_registers}
        return {
            "PIECES": count, "VECTOR": VECTOR_BYTES // itemsize, "STAGES": self.stages,
            "SHARED": shared, "HELD": min(self.registers, count - shared), "num_warps": self.warps, "num_ctas": self.blocks, **limit,
        }  # fmt: skip


def fitting(
    how: Hold, N: int, itemsize: int, weight_itemsize: int, *, matrices: int, vectors: int, programs: int = 1
) -> Hold | None:
    """``how`` with no more stages than there is room for, and as much of the vectors as fits beside; None: no room.

    A row of each of ``matrices`` (of ``itemsize`` bytes an element) and the shared pieces of ``vectors`` are held by
    each of ``programs`` on a multiprocessor.
    """
    row = matrices * how.pieces(N, itemsize) * how.piece_bytes
    room = ROOM // programs - SPARE
    stages = min(how.stages, room // row)
    if not stages:
        return None
    each = vectors * how.piece_bytes // itemsize * weight_itemsize
    shared = min(how.shared, (room - stages * row) // each) if each else 0
    return replace(how, stages=stages, shared=shared)


def with_room(t: Tile, element_bytes: int) -> Tile:
    """``t`` with no more stages than its programs have room for; ``element_bytes``: those loaded for each element.

    Of all stages but one the rows are in shared memory, and ``t.groups`` programs are on ``MULTIPROCESSORS``.
    """
    beside = ceil_div(t.groups, MULTIPROCESSORS)
    fit = (ROOM - SPARE) // (beside * t.rows * t.block * element_bytes)
    return replace(t, stages=min(t.stages, max(1 + fit, 2)))


def can_hold(N: int, *matrices: Tensor) -> bool:
    """Whether the rows of N columns of ``matrices``, on a GPU, are aligned as asynchronous copies need it."""
    return N % ALIGNED == 0 and all(m.data_ptr() % ALIGNED == 0 and m.stride(0) % ALIGNED == 0 for m in matrices)


@cache
def room_on(device: torch.device) -> bool:
    """Whether a program on this GPU may have ``ROOM`` bytes of shared memory."""
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= ROOM)
