"""The memory that a client's present case uses: what all cases share, or device memory of its own if it is huge."""

from __future__ import annotations

from functools import cache

import torch

from normcheck.cases.case import Case
from normcheck.isolation.messages import Message
from normcheck.isolation.shared_memory import DeviceMemory, Space, shared_bytes
from normcheck.runner.environment import memory_bytes


class CaseMemory:
    """Counts the shared memory of a case, and keeps the device memory that it has for itself.

    ``held``: shared memory below this byte holds its inputs. ``opened``: the device memory that the present worker has
    opened.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._used = 0  # bytes of shared memory
        self._own_bytes = 0  # of device memory for this case alone, 0 if it needs none
        self._own: DeviceMemory | None = None
        self._cached = False  # whether torch caches here what a case alone has used
        self.held = 0
        self.opened: DeviceMemory | None = None

    def begin(self, case: Case) -> int:
        """Begin a case, and return the bytes of shared memory that the one before has used.

        What torch still caches here of one that was ``alone`` is given back: its outputs were in use until now.
        """
        if self._cached:
            torch.cuda.empty_cache()
        self._cached = False
        needed = shared_bytes(case) if case.huge and self._device == "cuda" else 0
        self._own_bytes = needed if needed and needed > _usual_bytes() else 0
        used, self._used, self.held = self._used, 0, 0
        return used

    @property
    def alone(self) -> bool:
        """Whether the present case has device memory of its own."""
        return self._own_bytes > 0

    def finish(self) -> None:
        """Release the device memory of a case that was ``alone``."""
        if self._own is not None:
            self._own.release()
        self._own, self._own_bytes, self.held = None, 0, 0
        self._cached = True

    def use(self, end: int) -> None:
        """Count the shared memory below byte ``end`` as used."""
        self._used = max(self._used, end)

    def where(self, space: Space) -> Message:
        """What the worker must know of the memory of ``space``; once, the handle that opens it."""
        if not isinstance(space.memory, DeviceMemory):
            return {"first": space.first, "mirrored": space.device != space.memory.device}
        known, self.opened = self.opened is space.memory, space.memory
        return {"opened": "" if known else space.memory.handle}

    def of_device(self) -> DeviceMemory:
        """The device memory of the present case: its own, or what all share."""
        if not self._own_bytes:
            return _usual_memory()
        if self._own is None:
            self._own = DeviceMemory.allocated(self._own_bytes)
        return self._own


@cache
def _usual_bytes() -> int:
    """Bytes of the GPU memory that all cases share but the largest, which have memory of their own."""
    return min(memory_bytes("cuda") // 4, 8 << 30)


@cache
def _usual_memory() -> DeviceMemory:
    """GPU memory that all workers share, allocated once."""
    return DeviceMemory.allocated(_usual_bytes())
