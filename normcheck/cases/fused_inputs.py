"""Fill the tensors of a case on a CPU by one kernel of C, with the bits of ``inputs.fill``, which defines them.

A GPU takes milliseconds for the plain way, and a kernel of its own seconds to be compiled.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from normcheck import c_library
from normcheck.cases import rng
from normcheck.cases.case import Case
from normcheck.cases.data_kinds import DY_KINDS, NOT_FINITE, ONLY_ROW, ROW_KINDS, ROWS, WEIGHT_KINDS
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.op import Op
from normcheck.cases.strides import expanded


class Unavailable(Exception):
    """The kernel cannot be compiled here. The message is its reason."""


def fill(
    case: Case, op: Op, x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, slab: int, nan_bits: int
) -> None:
    """Write the numbers of ``case`` into x, dy (M, N), weight, bias (N,), or the first ones of these, all on a CPU.

    ``slab``: how many rows the plain way makes at a time, on which some special kinds depend; ``nan_bits``: of a NaN.
    Raises Unavailable if the kernel cannot be compiled here.
    """
    m, n = case.M, case.N
    dy_kind, dy_elements, only_row = DY_KINDS.index(case.dy), m * n, -1
    if expanded(case) == "dy":
        dy_elements = min(n if case.layout == "dy_expanded" else 1, dy_elements)
        dy_kind = dy_kind if case.layout == "dy_expanded" else DY_KINDS.index("ones")
    elif case.dy in ONLY_ROW:
        only_row = ONLY_ROW[case.dy] % max(m, 1)
    lower, upper = tuple(value for _, value in case.options) or (0.0, 0.0)
    numbers = (
        *(m, n, x.stride(0), dy.stride(0), dy_elements, slab, rng.start(case.seed, 0)),
        *(ROW_KINDS.index(case.rows), dy_kind, only_row, nan_bits),
        *(WEIGHT_KINDS.index(case.weights) if case.weight else 0, int(op.clamped), int(bias is not None)),
        *map(_bits, (8.0 / n, op.weight_offset, lower, upper)),
    )
    like = weight if weight is not None else x if bias is None else bias
    made = [like.new_empty(case.N) if t is None or len(t) != case.N or t.stride(0) != 1 else t for t in (weight, bias)]
    tensors = x, dy, made[0], made[0] if bias is None else made[1]  # the kernel always makes a weight
    library = c_library.loaded(_SOURCE, _lines())
    if library is None:
        raise Unavailable("there is no C compiler, or nothing that it makes can be loaded")
    of_tensors = (number for tensor in tensors for number in (tensor.data_ptr(), TYPES[tensor.dtype]))
    c_library.call(library, "make", (*of_tensors, *numbers))
    for tensor, whole in zip((weight, bias), made, strict=True):
        if tensor is not None and tensor is not whole:  # of a grouped op (C,), or strided
            tensor.copy_(whole[: len(tensor)])


TYPES = {getattr(torch, fmt.torch_name): number for number, fmt in enumerate(FORMATS.values())}
"""Dtype -> its number in C, where ``OF_TYPES`` are its names."""

OF_TYPES = {name.upper(): number for number, name in enumerate(FORMATS)}

_SOURCE = Path(__file__).with_name("fused_inputs.c")


@cache
def _lines() -> tuple[str, ...]:
    """The numbers of kinds, as C has them."""
    of_rng = {name: getattr(rng, name) for name in ("GOLDEN", "MIX_1", "MIX_2", "OF_STREAM", "NORMAL_SCALE")}
    most = {f"MAX_{name.upper()}": FORMATS[name].max for name in FORMATS}
    kinds = {kind.upper() + "_ROWS" * (kind in NOT_FINITE): at for at, kind in enumerate(ROW_KINDS)}
    of_dy = {f"DY_{kind.upper()}": at for at, kind in enumerate(DY_KINDS)}
    of_weights = {"SMALL_WEIGHTS": WEIGHT_KINDS.index("small"), "PROBE": WEIGHT_KINDS.index("probe")}
    others = {"KINDS": len(ROWS), "X": 0, "DY": 1, "ROW": 2, "WEIGHT": 3, "BIAS": 4}
    return c_library.definitions({**of_rng, **most, **kinds, **of_dy, **of_weights, **OF_TYPES, **others})


def _bits(value: float) -> int:
    """The bits of an fp64, as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
