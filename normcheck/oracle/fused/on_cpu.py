"""The fused judge's kernels on a CPU: ``on_cpu.c``, compiled by the C compiler that is there, once on a machine.

Where there is no compiler, or nothing that it makes can be loaded, the plain judge judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from normcheck import c_library
from normcheck.cases.fused_inputs import OF_TYPES, TYPES
from normcheck.oracle.fused import layout

SOURCE = Path(__file__).with_suffix(".c")

KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "forward_kernel": (
            "found_ptr", "x_ptr", "y_ptr", "weight_ptr", "bias_ptr", "own_mean_ptr", "own_rstd_ptr", "own_bits_ptr",
            "numbers_ptr", "rows_ptr", "mean_ptr", "rstd_ptr", "bits_ptr", "ties_ptr", "doubt_ptr",
            "M", "N", "x_stride", "y_stride", "bits_stride",
            "weight_offset", "CENTERED", "ANY_VARIANCE", "FOLDED", "CAST", "CLAMPED", "OWN", "PACKED", "ROUNDED",
            "STORED", "FLUSH",
        ),
        "dx_kernel": (
            "found_ptr", "x_ptr", "dy_ptr", "dx_ptr", "weight_ptr", "bits_ptr", "doubt_ptr", "rows_ptr", "numbers_ptr",
            "M", "N", "x_stride", "dy_stride", "dy_column", "dx_stride",
            "weight_offset", "CENTERED", "RAW", "IO_ROUNDED", "STORED", "FLUSH",
        ),
        "sums_kernel": (
            "x_ptr", "dy_ptr", "bits_ptr", "doubt_ptr", "rows_ptr", "numbers_ptr", "sums_ptr",
            "M", "N", "group_rows", "x_stride", "dy_stride", "dy_column",
            "BOTH", "RAW", "IO_ROUNDED", "FLUSH",
        ),
        "dw_db_kernel": (
            "found_ptr", "dw_ptr", "db_ptr", "sums_ptr", "numbers_ptr", "groups", "N",
            "GIVEN", "BOTH", "STORED", "FLUSH",
        ),
    }
)  # fmt: skip
"""Kernel -> its arguments in order: tensors, sizes, and facts of the case. Those of the Triton kernel of that name, but
for its tiles."""


def launch(name: str, way: object, grid: object, *arguments: Tensor | int | None, **facts: object) -> None:
    """Call the kernel of this name, see ``launch.launch``; what only a GPU's kernel needs is left out.

    Raises MemoryError.
    """
    known = KERNELS[name]
    values: list[int] = []
    for argument, field in zip(arguments, known, strict=False):
        if field.endswith("_ptr"):
            assert not isinstance(argument, int)
            values += (0, -1) if argument is None else (argument.data_ptr(), TYPES.get(argument.dtype, -1))
        else:
            assert isinstance(argument, int)
            values.append(argument)
    values += [int(facts[field]) for field in known[len(arguments) :]]  # type: ignore[call-overload]
    library = c_library.loaded(SOURCE, _BEFORE)
    assert library is not None
    c_library.call(library, name, values)


def works() -> bool:
    """Whether the kernels are there. Compiles them the first time on a machine."""
    return c_library.loaded(SOURCE, _BEFORE) is not None


def _lines() -> tuple[str, ...]:
    """The arguments and places as C has them."""
    places = {name: value for name, value in vars(layout).items() if name.isupper() and isinstance(value, int)}
    numbers = {name.upper(): at for at, name in enumerate(layout.NUMBERS)}
    structures = [
        c_library.structure(kernel, [f"{a}, {a.removesuffix('_ptr')}_type" if a.endswith("_ptr") else a for a in given])
        for kernel, given in KERNELS.items()
    ]
    return (*c_library.definitions({**numbers, **places, **OF_TYPES}), *structures)


_BEFORE = _lines()
