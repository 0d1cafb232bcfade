"""A kernel in Gluon run on the CPU, program by program, with torch in the place of Gluon's language.

Asynchronous copies are as late as they may be: a slot is NaN from the moment a copy into it begins until a
``wait_group`` says that it must be there. So a kernel that reads too early, or fills a slot that it has yet to read,
gives NaN; two copies at once into one slot are an AssertionError. What it does not show: races between the threads of a
program, which Triton's barriers prevent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language import constexpr


class Pointer:
    """The address of elements of a tensor: its memory, and offsets into it."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.memory, self.offset + by)

    def chosen(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The offsets, and which of them are asked for; IndexError if one of those is outside of the memory."""
        offset = torch.as_tensor(self.offset)
        wanted = torch.as_tensor(True if mask is None else mask).expand(offset.shape)
        if bool(((offset < 0) | (offset >= len(self.memory)))[wanted].any()):
            raise IndexError("outside of the tensor's memory")
        return offset, wanted


class Shared:
    """Shared memory, of which a part can be indexed."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, at: int) -> Shared:
        return Shared(self.data[at])

    def load(self, layout: object) -> Tensor:
        return self.data.clone()


class Copies:
    """Asynchronous copies: groups of those that are under way."""

    def __init__(self) -> None:
        self.open: list[tuple[Tensor, Tensor]] = []
        self.groups: list[list[tuple[Tensor, Tensor]]] = []

    def async_copy_global_to_shared(self, to: Shared, pointer: Pointer, mask: Any) -> None:
        under_way = {slot.data_ptr() for group in (*self.groups, self.open) for slot, _ in group}
        assert to.data.data_ptr() not in under_way, "two copies are under way into one slot"
        self.open.append((to.data, load(pointer, mask=mask)))
        to.data.fill_(float("nan"))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for to, value in self.groups.pop(0):
                to.copy_(value)


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    offset, wanted = pointer.chosen(mask)
    return torch.where(wanted, pointer.memory[torch.where(wanted, offset, 0)], other).to(pointer.memory.dtype)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, wanted = pointer.chosen(mask)
    pointer.memory[offset[wanted]] = torch.as_tensor(value).expand(offset.shape)[wanted].to(pointer.memory.dtype)


def allocated(dtype: torch.dtype, shape: list[int], layout: object, value: Tensor | None = None) -> Shared:
    return Shared(torch.full(shape, float("nan"), dtype=dtype) if value is None else value.clone())


def exchanged(asm: str, constraints: str, args: list[Tensor], **_: object) -> Any:
    """What the two pieces of assembly do: nothing yet, or sums over blocks, which are rows of a tensor here."""
    return args[0] if len(args) == 1 else tuple(t.sum().expand_as(t) for t in args[:2])


def language(program: int, sample: int, programs: int, warps: int, blocks: int) -> SimpleNamespace:
    """What the kernels use of ``triton.experimental.gluon.language``."""
    return SimpleNamespace(
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        uint8=torch.uint8,
        program_id=lambda axis: torch.tensor((program, sample)[axis]),
        num_programs=lambda axis: programs,
        num_warps=lambda: warps,
        num_ctas=lambda: blocks,
        static_range=range,
        SliceLayout=lambda *_: None,
        inline_asm_elementwise=exchanged,
        allocate_shared_memory=allocated,
        load=load,
        store=store,
        arange=lambda start, end, layout: torch.arange(start, end),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        where=torch.where,
        sum=lambda x, axis: x.sum(axis),
        min=lambda x, axis: x.amin(axis),
        reshape=torch.reshape,
        convert_layout=lambda x, layout: x,
        reduce=lambda tensors, axis, combine: tuple(x.sum(axis) for x in tensors),
        div_rn=torch.div,
        sqrt_rn=torch.sqrt,
        exp=torch.exp,
    )


def launcher(module: ModuleType) -> Callable[..., None]:
    """A ``launch`` that runs kernels of ``module`` on tensors of the CPU."""

    def run(
        kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, num_ctas: int, **constants: Any
    ) -> None:
        values = [Pointer(_memory(a)) if isinstance(a, Tensor) else a for a in arguments]
        for program, sample in itertools.product(range(grid[0]), range((*grid, 1)[1])):
            names: dict[str, Any] = {
                **dict.fromkeys(("MEET", "EXCHANGE"), ""),
                **dict.fromkeys(("in_registers", "in_shared_memory"), lambda *_: None),
                "gl": language(program, sample, grid[0], num_warps, num_ctas),
                "async_copy": Copies(),
                **{name: value.value for name, value in vars(module).items() if isinstance(value, constexpr)},
            }
            jitted = [(name, f) for name, f in vars(module).items() if isinstance(f, GluonJITFunction)]
            names |= {name: FunctionType(f.fn.__code__, names) for name, f in jitted}
            names[kernel.fn.__name__](*values, **constants)

    return run


def _memory(tensor: Tensor) -> Tensor:
    """All that lies between the first element of ``tensor`` and its last, flat."""
    extents: Iterable[int] = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((1 + sum(extents),), (1,))
