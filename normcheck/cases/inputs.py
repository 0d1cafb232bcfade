"""The tensors of a case. One case line gives the same bits on every machine, on a CPU and on a GPU.

Every random number is a hash of its position; only exact or singly rounded fp64 operations make the stored value of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from normcheck.cases import fused_inputs
from normcheck.cases.case import EXPANDED, Case
from normcheck.cases.data_kinds import DY_VALUES, ONLY_ROW, ROW_VALUES, ROWS, Field, weights
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.guard_bands import elements, placed, untouched
from normcheck.cases.ops import OPS, RELU6, Op
from normcheck.cases.rng import hashed, normal, uniform

_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
"""The bits of a NaN in an input. With an odd seed its sign bit is set."""

SLAB_ELEMENTS = 1 << 22
_X, _DY, _ROW, _WEIGHT, _BIAS = range(5)  # independent streams of one seed


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case on a device.

    ``x``, ``dy``: (M, N), or (B, S, N) if the case has rank 3, in the io dtype; last stride 1, row stride N, or N + gap
    if strided. An expanded dy has row stride 0, a scalar dy has strides of 0 only. ``weight``, ``bias``: (N,), each
    None if the case has none. Each lies in a buffer of its own, with NaN in its gaps and in bands before and behind it.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each input, without a weight or bias that is None."""
        for name in ("x", "weight", "bias", "dy"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """These inputs with ``change`` applied to every tensor."""
        x, weight, bias = (None if t is None else change(t) for t in (self.x, self.weight, self.bias))
        assert x is not None
        return Inputs(x, weight, bias, change(self.dy))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of the format of this name."""
    dtype: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return dtype


def format_of(dtype: torch.dtype) -> Format:
    """The format of a floating-point torch dtype; StopIteration for one that is not in ``FORMATS``."""
    return next(f for f in FORMATS.values() if getattr(torch, f.torch_name) == dtype)


def make(case: Case, op: Op, device: str) -> Inputs:
    """The tensors of ``case`` on ``device`` ("cpu" or "cuda"): a large one on a GPU by one kernel, if Triton
    works there."""
    made = _unfilled(case, device)
    if device == "cuda" and _is_for_kernel(case) and _kernel_fits(case.dtype, case.weight_format, device):
        fused_inputs.fill(case, op, made.x, made.dy, made.weight, made.bias, slab_height(case), nan_bits(case))
    else:
        fill(case, op, made)
    if case.rank == 3:
        shape = (case.batch, case.M // case.batch, case.N)
        made = replace(made, x=made.x.view(shape), dy=made.dy.view(shape))
    return made


def fill(case: Case, op: Op, made: Inputs) -> None:
    """Write the numbers of ``case`` into its tensors, of which x and dy are (M, N). This defines them.

    Rows are made in slabs, so that temporary memory stays small.
    """
    x, dy, height = made.x, made.dy, slab_height(case)
    device = x.device.type
    for first in range(0, max(case.M, 1), height):
        rows = slice(first, min(first + height, case.M))
        x[rows], cotangents, parameters = _slab(case, rows, device)
        if case.layout not in EXPANDED:
            dy[rows] = cotangents
        elif not first and case.M:  # the one row, or the one number, that all rows share
            shared = cotangents[0] if case.layout == "dy_expanded" else torch.ones(1, device=device)
            dy.as_strided(shared.shape, (1,)).copy_(shared)
    if case.dy in ONLY_ROW and case.M and case.layout not in EXPANDED:
        only = dy[ONLY_ROW[case.dy]].clone()
        dy.zero_()
        dy[ONLY_ROW[case.dy]] = only
    if case.rows == "nan" or case.dy == "nan":  # devices convert a NaN to different bits
        for t in map(elements, (x, dy)):
            integers = t.view(torch.int16 if t.element_size() == 2 else torch.int32)
            integers.masked_fill_(torch.isnan(t), nan_bits(case))
    for tensor, values in zip((made.weight, made.bias), weights(case, op, parameters), strict=True):
        if tensor is not None:
            tensor.copy_(values.float())  # rounded to fp32 first: every device does that alike


def nan_bits(case: Case) -> int:
    """The bits of a NaN in x and dy, as a signed integer of their size."""
    io = torch_dtype(case.dtype)
    return _NAN[io] - (case.seed % 2 << (8 * io.itemsize - 1))


def slab_height(case: Case) -> int:
    """How many rows ``fill`` makes at a time: "blend" repeats after as many rows as there are kinds."""
    return max(1, SLAB_ELEMENTS // (case.N * len(ROWS))) * len(ROWS)


def _is_for_kernel(case: Case) -> bool:
    """Whether the case is so large that it pays to compile the kernel, or the kernel is there."""
    key = case.dtype, case.weight_format
    if case.M * case.N >= SLAB_ELEMENTS:
        _compiled.add(key)
    return key in _compiled


_compiled: set[tuple[str, str]] = set()


@cache
def _kernel_fits(dtype: str, weight_format: str, device: str) -> bool:
    """Whether the kernel for these dtypes works here, and makes two small cases as ``fill`` does, to the bit."""
    op = OPS["layernorm_relu_bitmask"]
    like = Case(
        op=op.name,
        dtype=dtype,
        M=20,
        N=37,
        rows="blend",
        dy="correlated",
        weights="probe",
        weight_dtype="same" if weight_format == dtype else weight_format,
        options=op.clips(RELU6),
    )
    for case in (like, replace(like, N=1025)):  # several rows in a tile; a piece of one row
        plain, fused = _unfilled(case, device), _unfilled(case, device)
        fill(case, op, plain)
        try:
            fused_inputs.fill(case, op, fused.x, fused.dy, fused.weight, fused.bias, slab_height(case), nan_bits(case))
        except fused_inputs.Unavailable:
            return False
        if not all(untouched(a, b) for (_, a), (_, b) in zip(plain.named(), fused.named(), strict=True)):
            return False
    return True


def _unfilled(case: Case, device: str) -> Inputs:
    """The tensors of a case, unfilled, with x and dy (M, N)."""
    io = torch_dtype(case.dtype)
    x, dy = _placed(case, "x", io, device), _placed(case, "dy", io, device)
    weight, bias = (_parameter(case, device) if has else None for has in (case.weight, case.bias))
    return Inputs(x, weight, bias, dy)


def _placed(case: Case, name: str, dtype: torch.dtype, device: str) -> Tensor:
    """An unfilled x or dy (M, N) in the layout of the case."""
    stride = (case.N + (case.gap if case.layout in ("strided", "rank3_strided", f"{name}_strided") else 0), 1)
    if name == "dy" and case.layout in EXPANDED:
        stride = (0, int(case.layout == "dy_expanded"))
    return placed((case.M, case.N), stride, dtype, device, shift=_shift(case))


def _shift(case: Case) -> int:
    """How many elements behind an aligned address every tensor begins."""
    return int(case.layout == "misaligned")


def _parameter(case: Case, device: str) -> Tensor:
    """An unfilled weight or bias (N,)."""
    return placed((case.N,), (1,), torch_dtype(case.weight_format), device, shift=_shift(case))


def _slab(case: Case, rows: slice, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x and dy (rows, N) of a slab in fp32, which the copy into place rounds; the numbers of weight and bias (2, N)."""
    n, height = case.N, rows.stop - rows.start
    elements, first = height * n, rows.start * n
    pieces = [(_X, first, elements), (_DY, first, elements), (_WEIGHT, 0, n), (_BIAS, 0, n)]
    bits = hashed(case.seed, [*pieces, (_ROW, rows.start, height)], device)
    gauss = normal(bits[: 2 * (elements + n)])
    nx, ndy = gauss[: 2 * elements].view(2, height, n)
    if case.rows == "normal":
        x = nx
    else:
        u, ur = uniform(bits[:elements]).view(height, n), uniform(bits[2 * (elements + n) :]).view(height, 1)
        x = ROW_VALUES[case.rows](Field(nx, u, ur, case.dtype))
    return x.float(), DY_VALUES[case.dy](ndy, nx).float(), gauss[2 * elements :].view(2, n)
