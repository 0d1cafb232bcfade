"""Memory that two processes share: one copies tensors into it, the other uses them in place.

On a CPU it is a file without a name that both map, as large as the machine's memory; pages exist once they are
touched. On a GPU it is a buffer of the parent, which a worker opens by CUDA's own handles.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import inspect
import math
import mmap
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.guard_bands import buffer_of
from normcheck.cases.inputs import torch_dtype
from normcheck.cases.layouts import SAMPLES_STRIDED
from normcheck.cases.ops import OPS
from normcheck.cases.strides import MODULATION, angle_stride, gap_of, modulation_stride
from normcheck.cases.tensor_names import GATE, RESIDUAL
from normcheck.errors import UnsupportedCase

_ALIGNMENT = 512
_OTHER_BYTES = 1 << 24  # for parameters, their gradients and what aligns them
MIRROR_BYTES = 1 << 26
"""Room for the tensors of any call of a small case, several times over."""

_GROUND_SHARE = 8  # one byte of so many is for what a kernel's process allocates
_KEPT_BYTES = 1 << 26  # stay in memory between cases; pages beyond go back to the system


# Of the class in C, which code under test cannot change: a result must not be computed by a look at it.
_address, _copy, _detach, _clone = (
    getattr(torch._C.TensorBase, name) for name in ("data_ptr", "copy_", "detach", "clone")
)


class Memory(Protocol):
    """Bytes that two processes share, on a ``device`` ("cpu" or "cuda")."""

    size: int
    device: str

    @property
    def address(self) -> int:
        """The address of the first byte, in this process."""
        ...

    def part(self, at: int, count: int) -> Tensor:
        """``count`` bytes from ``at``: uint8, (count,), a storage of its own. Raises ValueError if some are outside."""
        ...


class HostMemory:
    """Shared memory of the CPU. ``fd``: the file behind it, which the other process maps as well.

    Tensors that are passed lie before byte ``size``. From there to ``end`` is what a kernel's process allocates from,
    see ``watched_memory``.
    """

    device = "cpu"

    def __init__(self, fd: int | None = None) -> None:
        self.fd, self._map = _new_file() if fd is None else (fd, mmap.mmap(fd, 0))
        self.end = len(self._map) - mmap.PAGESIZE
        self.size = self.end // _GROUND_SHARE * (_GROUND_SHARE - 1) // mmap.PAGESIZE * mmap.PAGESIZE

    def owned(self, at: int, count: int) -> memoryview:
        """``count`` bytes from ``at``, as an object: ``torch.frombuffer`` of it keeps it as long as it is used."""
        return memoryview(self._map)[at : at + count]

    def read(self, first: int, end: int) -> bytes:
        """A copy of the bytes ``first`` to ``end``."""
        return self._map[first:end]

    def write(self, first: int, content: bytes | memoryview) -> None:
        """Write ``content`` from byte ``first`` on."""
        self._map[first : first + len(content)] = content

    def take(self, first: int, address: int, count: int) -> None:
        """Copy ``count`` bytes from an ``address`` of this process to byte ``first`` on.

        No function of torch has a part in it, and no other Python thread runs meanwhile.
        """
        source = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
        memoryview(self._map)[first : first + count] = source

    @cached_property
    def address(self) -> int:
        """See ``Memory``."""
        return self.part(0, 1).data_ptr()

    @property
    def in_autograd(self) -> bool:
        """Whether the worker is in autograd's backward, which belongs to the request of a forward. In the last byte."""
        return self._map[-1] != 0

    @in_autograd.setter
    def in_autograd(self, value: bool) -> None:
        self._map[-1] = int(value)

    def part(self, at: int, count: int) -> Tensor:
        """See ``Memory``."""
        if not (at >= 0 and count >= 0 and at + count <= self.end):
            raise ValueError(f"{count} bytes from {at} are not within {self.end}")
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=at)

    def give_back(self, used: int) -> None:
        """Free the pages of the first ``used`` bytes, except those that are kept between cases."""
        beyond = (min(used, self.size) - _KEPT_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        if beyond > 0 and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES, beyond)


def _new_file() -> tuple[int, mmap.mmap]:
    """A file without a name and its mapping: as large as the machine's memory, or as this process may map."""
    fd = os.memfd_create("normcheck", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    while True:
        try:
            os.ftruncate(fd, size)
            mapped = mmap.mmap(fd, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return fd, mapped
        except OSError:
            size //= 2 * mmap.PAGESIZE
            size *= mmap.PAGESIZE
            if size < _KEPT_BYTES:
                raise


class DeviceMemory:
    """Shared memory of a GPU: ``buffer`` is uint8; ``handle`` opens it in another process."""

    device = "cuda"

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.size, self.address = buffer, buffer.numel(), buffer.data_ptr()
        self._shared: Mapping[str, Any] = {}

    @classmethod
    def allocated(cls, size: int) -> DeviceMemory:
        """``size`` bytes of this process. Raises torch.OutOfMemoryError.

        Whoever opens a handle can write to the whole block that torch once got from the driver. So these bytes have a
        block of their own: torch keeps what it has cached apart by stream, and this stream is used for nothing else.
        """
        torch.cuda.empty_cache()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return cls(buffer)

    @classmethod
    def opened(cls, handle: str) -> DeviceMemory:
        """The memory of this process's parent, which made ``handle``."""
        rebuild, arguments = pickle.loads(bytes.fromhex(handle))  # from the parent, never from a worker
        return cls(rebuild(*arguments))

    @cached_property
    def handle(self) -> str:
        """The text by which ``opened`` finds this memory."""
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = shared = reduce_tensor(self.buffer)  # type: ignore[no-untyped-call]
        self._shared = inspect.signature(rebuild).bind(*arguments).arguments
        atexit.register(self._free)
        return pickle.dumps(shared).hex()

    def release(self) -> None:
        """Give the memory back to the driver. No other process may have it open any more."""
        atexit.unregister(self._free)
        self._free()
        torch.cuda.empty_cache()

    def _free(self) -> None:
        """Free the buffer, but first the one reference to it that torch counts for all its receivers.

        Workers are killed, and never release it; torch would complain on standard error.
        """
        if self._shared:
            counter = self._shared["ref_counter_handle"], self._shared["ref_counter_offset"]
            torch.UntypedStorage._release_ipc_counter(*counter, device="cuda")  # type: ignore[no-untyped-call]
        self._shared, self.size = {}, 0
        self.buffer.untyped_storage().resize_(0)

    def part(self, at: int, count: int) -> Tensor:
        """See ``Memory``."""
        if not (at >= 0 and count >= 0 and at + count <= self.size):
            raise ValueError(f"{count} bytes from {at} are not within {self.size}")
        if not count:
            return torch.empty(0, dtype=torch.uint8, device=self.buffer.device)
        return torch.as_tensor(_Bytes(self.buffer.data_ptr() + at, count), device=self.buffer.device)


class Mirror:
    """Memory of the host as a GPU's kernel sees it: a ``copy`` on the device, for a case whose tensors are on the CPU.

    One transfer brings what a call needs, and one takes back what it leaves.
    """

    def __init__(self, host: HostMemory, copy: Memory) -> None:
        self._host, self._copy = host, copy
        self.device, self.size, self.address = copy.device, copy.size, copy.address

    def part(self, at: int, count: int) -> Tensor:
        """See ``Memory``."""
        return self._copy.part(at, count)

    def bring(self, first: int, end: int) -> None:
        """Copy the host's bytes from ``first`` to ``end``."""
        self.part(first, end - first).copy_(self._host.part(first, end - first), non_blocking=True)

    def take_back(self, first: int, end: int) -> None:
        """Copy the bytes from ``first`` to ``end`` to the host, once the device has finished its work."""
        self._host.part(first, end - first).copy_(self.part(first, end - first))


@dataclass(frozen=True)
class _Bytes:
    """Device memory in the form that every array library accepts: its tensor has a storage of just these bytes."""

    pointer: int
    count: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.count,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


@dataclass(frozen=True, slots=True)
class SharedCopy:
    """A tensor's own bytes and their copy in shared memory."""

    own: Tensor
    copy: Tensor

    def bring_back(self) -> None:
        """Copy the shared bytes back into the tensor's own."""
        self.own.copy_(self.copy)


class Space:
    """Places in shared memory, one behind the other from byte ``first`` on. ``next``: the first free byte.

    ``device``: where the kernel finds what lies there, if not where the memory is.
    """

    def __init__(self, memory: Memory, first: int = 0, device: str = "") -> None:
        self.memory, self.first, self.next, self.device = memory, first, first, device or memory.device

    def copy_in(self, tensor: Tensor) -> tuple[dict[str, Any], SharedCopy]:
        """Copy the whole storage of ``tensor``, with what lies around it -> its place as plain data, and the copy.

        A tensor that lies in this memory already is its own copy.
        """
        whole = buffer_of(tensor)
        count = len(whole)
        at, part = whole.data_ptr() - self.memory.address, whole
        if not 0 <= at < self.memory.size:
            at = self._reserved(count)
            part = self.memory.part(at, count).copy_(whole)
        return {**place_of(tensor, at, count), "offset": tensor.storage_offset()}, SharedCopy(whole, part)

    def copy_in_dense(self, tensor: Tensor) -> dict[str, Any]:
        """Copy only the elements of ``tensor``, packed -> their place as plain data.

        On a CPU as they are in memory now.
        """
        count = tensor.numel() * tensor.element_size()
        at = self._reserved(count)
        packed = self.memory.part(at, count).view(tensor.dtype).view(tensor.shape)
        if count and isinstance(self.memory, HostMemory):
            own = tensor if tensor.is_contiguous() and not tensor.is_neg() else _packed(tensor)
            self.memory.take(at, _address(own), count)
        else:
            _copy(packed, _detach(tensor))
        return place_of(packed, at, count)

    def _reserved(self, count: int) -> int:
        at = math.ceil(self.next / _ALIGNMENT) * _ALIGNMENT
        self.next = at + count
        if self.next > self.memory.size:
            needed, there = self.next / 2**30, self.memory.size / 2**30
            raise UnsupportedCase(f"needs {needed:.1f} GiB of shared memory, and there are {there:.1f} GiB")
        return at


def _packed(tensor: Tensor) -> Tensor:
    """A copy whose elements lie one behind the other, none of them marked to be negated."""
    return cast(Tensor, _clone(torch.resolve_neg(_detach(tensor)), memory_format=torch.contiguous_format))


def place_of(tensor: Tensor, at: int, count: int) -> dict[str, Any]:
    """The place of ``tensor``, whose first element is the first of ``count`` bytes from ``at``, as plain data."""
    form = {"shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": 0}
    return {"at": at, "bytes": count, "dtype": _name(tensor.dtype), **form}


def shared_bytes(case: Case) -> int:
    """Shared memory that any one call of ``case`` needs: x, dy, y, dx, what else forward saves, and what lies around.

    A run in which forward is called for other inputs before backward needs twice as much.
    """
    op, item = OPS[case.op], torch_dtype(case.dtype).itemsize
    y = max(torch_dtype(name).itemsize for name in op.y_dtypes(case.dtype, case.weight_format))
    band = 2 * (case.N + 512)  # of a row and 256 elements, before a tensor and behind it
    wide = torch_dtype(case.residual_format).itemsize
    sizes = [("x", item), ("dy", item), *[(GATE, item)] * op.gated]
    sizes += [(name, wide) for name in (RESIDUAL, "dresidual_out")] * op.adds_residual
    inputs = sum(((case.M + 1) * (case.N + gap_of(case, name)) + band) * size for name, size in sizes)
    outputs = (case.M * case.N + band) * (y + item) + 4 * (case.M * (case.N // 64 + 1) + band) * op.quantises
    inputs *= 1 + (case.layout == SAMPLES_STRIDED)  # behind the last sample is room for another
    if op.adds_residual:  # with residual_out as a saved input
        outputs += 3 * (case.M * case.N + band) * wide
    if op.gated:
        outputs += (case.M * case.N + band) * item
    if op.modulated:
        wide = torch_dtype(case.weight_format).itemsize
        inputs += sum((case.batch + 1) * modulation_stride(case, name) + band for name in MODULATION) * wide
        outputs += (2 + op.gates_residual) * (case.batch * case.N + band) * wide
    if op.rotary:
        wide = torch_dtype(case.weight_format).itemsize
        inputs += 2 * ((case.M + 1) * angle_stride(case) + 2 * band) * wide
    saved = case.M * case.N * op.clamped + 12 * case.M * case.split.groups * len(op.statistics)  # a bitmask may be bool
    return inputs + outputs + saved + 32 * case.N * case.row_groups + _OTHER_BYTES


def tensor_at(memory: Memory, place: Mapping[str, Any]) -> Tensor:
    """The tensor at ``place``, not a copy. Raises ValueError, KeyError or TypeError if the place is malformed."""
    dtype = dtype_of(place["dtype"])
    shape, stride, at, count, offset = place["shape"], place["stride"], place["at"], place["bytes"], place["offset"]
    if not all(type(v) is int and 0 <= v < 2**62 for v in (*shape, *stride, at, count, offset)):
        raise ValueError(f"{str(place)[:200]}: expected integers >= 0")
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if (offset + extent) * dtype.itemsize > count or count % dtype.itemsize:
        raise ValueError(f"shape={shape} with stride={stride} does not lie within {count} bytes")
    return memory.part(at, count).view(dtype).as_strided(shape, stride, offset)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: object) -> torch.dtype:
    """A torch dtype by its name. Raises ValueError for anything else."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r}: expected the name of a torch dtype")
    return dtype
