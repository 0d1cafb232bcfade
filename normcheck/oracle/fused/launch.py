"""Launches of the fused judge's kernels: how a kernel is tiled and compiled, and how a launch costs little time.

Triton takes 40 us to find out that a kernel is compiled; a launch like one before goes to its compilation directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from normcheck.lock import locked


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the kernels are launched: tiles of ``rows`` x ``columns`` by so many ``warps``, on ``each`` multiprocessor.

    ``sum_rows``, ``sum_columns``, ``sums_each``: the same for the sums over rows. ``specialised``: compiled for sizes,
    strides and addresses that are multiples of 16. ``registers``: at most so many a thread. ``stages``, ``sum_stages``:
    so many tiles are read at once. ``sum_groups``: at most so many groups of rows share their sums.
    """

    rows: int
    columns: int
    warps: int
    each: int
    sum_rows: int
    sum_columns: int
    sums_each: int
    specialised: bool
    registers: int | None = None
    stages: int = 1
    sum_stages: int = 1
    sum_groups: int = 64

    def tile(self, M: int, N: int) -> dict[str, int | bool | None]:
        """The tile of M rows of N elements, as constants of a kernel."""
        constants: dict[str, int | bool | None] = {"WHOLE": self.specialised and self.columns >= N}
        constants["FULL"] = self.specialised and M % self.rows == 0 and N % self.columns == 0
        constants["STAGES"] = self.stages
        return constants | {"R": self.rows, "B": self.columns, "num_warps": self.warps, "maxnreg": self.registers}


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def programs(M: int, way: Way, device: torch.device) -> int:
    """How many programs share M rows."""
    return min(-(-M // way.rows), multiprocessors(device) * way.each)


compiling_seconds = 0.0
"""For which launches of the main thread have waited, see ``judging.compiling_seconds``."""

_known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
"""What the compilation of a launch depends on -> the compilation, and the kernel's constants as arguments."""


def launch(name: str, way: Way, grid: tuple[int, ...], *arguments: Tensor | int | None, **constants: Any) -> None:
    """Launch the Triton kernel of this name; one that was launched like this before without asking Triton, which takes
    40 us to look.
    """
    on_gpu = arguments[0].is_cuda if isinstance(arguments[0], Tensor) else False
    facts, values = _taken(arguments)
    key = (name, way.specialised, *constants.values(), *facts)
    known = _known.get(key) if on_gpu else None
    if known is not None:
        compiled, last = known
        compiled[(*grid, 1, 1)[:3]](*values, *last)
        return
    kernel = _kernel(name)
    begun = time.perf_counter()
    with locked(f"{way} {key}") if on_gpu else nullcontext():  # all but the first find it on disk
        compiled = _compiled(kernel, way.specialised)[grid](*arguments, **constants)
    if threading.current_thread() is threading.main_thread():
        _note_compiling(time.perf_counter() - begun)
    if on_gpu:
        _known[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


@cache
def _kernel(name: str) -> Any:
    from normcheck.oracle.fused import forward, gradients

    return getattr(forward, name, None) or getattr(gradients, name)


def _note_compiling(seconds: float) -> None:
    global compiling_seconds
    compiling_seconds += seconds


def _taken(arguments: Sequence[Tensor | int | None]) -> tuple[list[Hashable], list[int | None]]:
    """What a compilation depends on, if all or no addresses are aligned: a dtype, or whether an integer is wide; and
    what a launch gets: of a tensor its address, which Triton would ask the driver about.
    """
    facts: list[Hashable] = []
    values: list[int | None] = []
    for a in arguments:
        if isinstance(a, Tensor):
            facts.append(a.dtype)
            values.append(a.data_ptr())
        else:
            facts.append(a if a is None or 0 <= a <= 1 else "i32" if -_WIDE <= a < _WIDE else "i64")
            values.append(a)
    return facts, values


_WIDE = 2**31


@cache
def _compiled(kernel: Any, specialised: bool) -> Any:
    """``kernel``; one that is not ``specialised`` is compiled once for all sizes, strides and addresses."""
    import triton

    sizes = [name for name in kernel.arg_names if name in _SIZES]
    if specialised:
        return triton.jit(kernel.fn, do_not_specialize=[name for name in sizes if name in _COUNTS])
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    return triton.jit(kernel.fn, do_not_specialize=sizes, do_not_specialize_on_alignment=pointers)


_COUNTS = ("M", "group_rows", "groups")
_SIZES = (*_COUNTS, "N", "x_stride", "y_stride", "bits_stride", "dy_stride", "dy_column", "dx_stride")
