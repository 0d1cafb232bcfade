"""The tensors of a case. One case line gives the same bits on every machine, on a CPU and on a GPU.

Every random number is a hash of its position; only exact or singly rounded fp64 operations make the stored value of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from normcheck.cases import fused_inputs
from normcheck.cases.case import GIVEN_SCALES, NO_WEIGHT, Case
from normcheck.cases.data_kinds import (
    DY_VALUES,
    GATE_VALUES,
    ONLY_ROW,
    RESIDUAL_VALUES,
    ROW_VALUES,
    ROWS,
    SCALE_VALUES,
    SPECIAL_ROWS,
    WEIGHT_KINDS,
    Field,
    weights,
)
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.guard_bands import as_integers, elements, placed, restrided, untouched
from normcheck.cases.layouts import (
    CHANNELS_LAST,
    HEADS,
    OF_ROW_GROUPS,
    SAMPLES_STRIDED,
    TRAILING,
    WEIGHT_STRIDED,
)
from normcheck.cases.of_samples import (
    SLAB_ELEMENTS,
    fill_both,
    fill_residual_gate,
    fill_rotation,
    heads_unfilled,
)
from normcheck.cases.op import RELU6, Op
from normcheck.cases.ops import OPS
from normcheck.cases.rng import hashed, normal, uniform
from normcheck.cases.strides import MODULATION, apart, expanded, gap_of, in_channels_last, modulation_stride, shift_of
from normcheck.cases.tensor_names import BY_NAME, DSCALE, GATE, RESIDUAL

_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
"""The bits of a NaN in an input. With an odd seed its sign bit is set."""

_X, _DY, _ROW, _WEIGHT, _BIAS, _RESIDUAL, _DRESIDUAL_OUT, _SCALE, _GATE = range(9)  # independent streams of one seed


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case on a device.

    ``x``, ``dy``: ``Case.shape``, (M, N) in most cases, in the io dtype; last stride 1, row stride N, or N + gap if
    strided. An expanded dy has row stride 0, a scalar dy has strides of 0 only. Of heads x has ``Case.head_strides``,
    dy is packed. ``weight``, ``bias``: ``Case.sides``, (N,) in most cases, with stride 2 in one layout; None if the
    case has none. Of a grouped op x and dy are (B, C, L), with the strides of (B, L, C) in one layout, and weight and
    bias are (C,), in numbers the first ones of (N,).
    ``residual``, ``dresidual_out``: as x, in the residual's dtype, None if the op adds none. ``scale``: (1,) in fp32,
    None unless the case has a given one. ``gate``: as x, but with a row stride of its own, None unless the op is gated.
    Of a modulated op x and dy are (B, S, N), ``scale`` and ``shift`` (B, N), each with a row stride, as the
    ``residual_gate`` of one that adds a residual; weight and bias are None; of a rotary op the
    weights (D,), ``cos`` and ``sin`` (M, pairs) with one row stride. Each lies in a buffer of its own, with NaN
    in its gaps, and where other heads lie, and in bands before and behind it.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor
    residual: Tensor | None = None
    dresidual_out: Tensor | None = None
    scale: Tensor | None = None
    gate: Tensor | None = None
    shift: Tensor | None = None
    residual_gate: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each input, without those that are None."""
        for name in _NAMES:
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """These inputs with ``change`` applied to every tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.named()})

    def flat(self, case: Case) -> Inputs:
        """These inputs with weight and bias packed, in as many dimensions as they have for rows of one dimension: (N,),
        or (G, N) if groups of rows have their own.
        """
        if case.layout not in (TRAILING, WEIGHT_STRIDED):
            return self
        both = {name: t.reshape(-1).contiguous() for name, t in self.named() if name in ("weight", "bias")}
        return replace(self, **both)

    @property
    def cotangents(self) -> dict[str, Tensor]:
        """dy, and that of residual_out if the op adds a residual."""
        return {name: tensor for name, tensor in self.named() if name in COTANGENTS}

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The inputs that have a gradient, by its name, in the order in which a backward returns them."""
        named = dict(self.named())
        of_codes = self.scale is not None and self.shift is None
        return {
            gradient: named[name]
            for gradient, name in GRADIENT_OF.items()
            if name in named and not (of_codes and gradient == DSCALE)
        }


_NAMES = tuple(f.name for f in fields(Inputs))

COTANGENTS = ("dy", "dresidual_out")
"""The inputs of a backward alone."""

NAMED = tuple(name for name in _NAMES if name not in ("x", "weight", "bias", "dy"))
"""The inputs that a backward gets by name, if there are any; a forward gets those that are no COTANGENTS."""

_OF_ROWS = ("x", "dy", RESIDUAL, "dresidual_out", GATE)
"""The inputs that have the shape of x."""


def inputs_of(named: Mapping[str, Tensor]) -> Inputs:
    """The inputs of these names. Those of a forward alone may lack dy: x stands for it."""
    optional = {name: named.get(name) for name in ("weight", "bias", *NAMED)}
    return Inputs(named["x"], dy=named.get("dy", named["x"]), **optional)


_OF_NAMED = {gradient: name for name, gradient in BY_NAME.items() if gradient}
GRADIENT_OF = MappingProxyType({"dx": "x", **_OF_NAMED, "dw": "weight", "db": "bias"})
"""Gradient -> the input of which it is one."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of the format of this name."""
    dtype: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return dtype


@cache
def format_of(dtype: torch.dtype) -> Format:
    """The format of a floating-point torch dtype; StopIteration for one that is not in ``FORMATS``."""
    return next(f for f in FORMATS.values() if getattr(torch, f.torch_name) == dtype)


def make(case: Case, op: Op, device: str) -> Inputs:
    """The tensors of ``case`` on ``device`` ("cpu" or "cuda"), on a CPU by one kernel if that works."""
    if case.layout in (HEADS, CHANNELS_LAST, SAMPLES_STRIDED):
        return _moved(case, make(replace(case, layout="contiguous", gap=0), op, device))
    if case.layout in OF_ROW_GROUPS:
        return _with_row_groups(case, op, make(replace(case, layout="contiguous", weight_groups=0), op, device), device)
    made = _unfilled(case, device)
    known = case.weights in (*WEIGHT_KINDS, NO_WEIGHT)
    if known and device == "cpu" and _kernel_fits(case.dtype, case.weight_format):
        fused_inputs.fill(case, op, made.x, made.dy, made.weight, made.bias, slab_height(case), nan_bits(case))
    else:
        fill(case, op, made)
    if made.gate is not None:
        _fill_gate(case, made.gate)
    if made.cos is not None:
        fill_rotation(case, op, dict(made.named()))
    if made.scale is not None and made.shift is not None:
        fill_both(case, op, made.scale, made.shift)
        if made.residual_gate is not None:
            fill_residual_gate(case, made.residual_gate)
    elif made.scale is not None:
        made.scale.fill_(SCALE_VALUES[case.scale](float(uniform(hashed(case.seed, [(_SCALE, 0, 1)], "cpu")))))
    if made.residual is not None:
        _fill_residual(case, made)
    if case.rank > 2:
        made = replace(made, **{name: tensor.view(case.shape) for name, tensor in made.named() if name in _OF_ROWS})
    if len(case.sides) > 1:
        both = {name: tensor.view(case.sides) for name, tensor in made.named() if name in ("weight", "bias")}
        made = replace(made, **both)
    return made


def _moved(case: Case, packed: Inputs) -> Inputs:
    """The same numbers, but x, and what else has its shape, in the strides of the layout and in buffers of NaN.

    dy of heads stays packed, and of channels-last memory by turns dy or x: what comes before need not keep the layout,
    nor what follows."""
    _, middle, last = case.shape
    names, strides = {
        HEADS: (("x",), (*case.head_strides, 1)),
        CHANNELS_LAST: (in_channels_last(case), (middle * last, 1, middle)),
        SAMPLES_STRIDED: (tuple(apart(case)), (middle * last + case.gap, last, 1)),
    }[case.layout]
    of_rows = {name: t.view(case.shape) for name, t in packed.named() if name in _OF_ROWS}
    return replace(packed, **{name: restrided(t, strides) if name in names else t for name, t in of_rows.items()})


def _with_row_groups(case: Case, op: Op, packed: Inputs, device: str) -> Inputs:
    """The same rows in three dimensions, with a weight and a bias (G, N)."""
    made = [placed(case.sides, (case.N, 1), torch_dtype(case.weight_format), device) for _ in range(2)]
    fill_both(case, op, *made)
    both = {name: own for name, own in zip(("weight", "bias"), made, strict=True) if getattr(packed, name) is not None}
    return replace(packed, x=packed.x.view(case.shape), dy=packed.dy.view(case.shape), **both)


def fill(case: Case, op: Op, made: Inputs) -> None:
    """Write the numbers of ``case`` into its tensors, of which x and dy are (M, N). This defines them.

    Rows are made in slabs, so that temporary memory stays small.
    """
    x, dy, height = made.x, made.dy, slab_height(case)
    device = x.device.type
    for first in range(0, max(case.M, 1), height):
        rows = slice(first, min(first + height, case.M))
        x[rows], cotangents, parameters = _slab(case, rows, device)
        if expanded(case) != "dy":
            dy[rows] = cotangents
        elif not first and case.M:  # the one row, or the one number, that all rows share
            shared = cotangents[0] if case.layout == "dy_expanded" else torch.ones(1, device=device)
            dy.as_strided(shared.shape, (1,)).copy_(shared)
    if case.dy in ONLY_ROW and case.M and expanded(case) != "dy":
        only = dy[ONLY_ROW[case.dy]].clone()
        dy.zero_()
        dy[ONLY_ROW[case.dy]] = only
    if case.rows == "nan" or case.dy == "nan":  # devices convert a NaN to different bits
        for t in map(elements, (x, dy)):
            integers = t.view(torch.int16 if t.element_size() == 2 else torch.int32)
            integers.masked_fill_(torch.isnan(t), nan_bits(case))
    for tensor, values in zip((made.weight, made.bias), weights(case, op, parameters), strict=True):
        if tensor is not None:
            tensor.copy_(values[: len(tensor)].float())  # rounded to fp32 first: every device does that alike


def _fill_residual(case: Case, made: Inputs) -> None:
    """Write the residual and its cotangent, which are (M, N) yet. ``made`` has x."""
    assert made.residual is not None and made.dresidual_out is not None
    kind = RESIDUAL_VALUES["normal" if case.rows in SPECIAL_ROWS else case.residual]
    device, height = made.x.device.type, slab_height(case)
    for first in range(0, case.M, height):
        rows = slice(first, min(first + height, case.M))
        count = (rows.stop - rows.start) * case.N
        pieces = [(_RESIDUAL, first * case.N, count), (_DRESIDUAL_OUT, first * case.N, count)]
        own, cotangents = normal(hashed(case.seed, pieces, device)).view(2, -1, case.N)
        x = made.x[rows].double()
        if made.residual_gate is not None:  # a residual that cancels what is added to it cancels that product
            x = x * _of_rows(case, made.residual_gate, rows)
        made.residual[rows] = kind(own, x).float()
        if expanded(case) != "dresidual_out":
            made.dresidual_out[rows] = cotangents.float()
        elif not first:  # the one row, or the one number, that all rows share
            shared = cotangents[0] if case.layout == "dy_expanded" else cotangents.new_ones(1)
            made.dresidual_out.as_strided(shared.shape, (1,)).copy_(shared)
    for tensor, kind_of_it, row in ((made.residual, case.rows, -1), (made.dresidual_out, case.dy, 0)):
        if case.M and kind_of_it in _OF_RESIDUAL:
            _put(tensor, row, case.N // 2, _OF_RESIDUAL[kind_of_it])


def _of_rows(case: Case, gate: Tensor, rows: slice) -> Tensor:
    """What a gate (B, N) of samples has for these rows of the case, in fp64."""
    return gate[torch.arange(rows.start, rows.stop, device=gate.device) // (case.M // case.batch)].double()


def _fill_gate(case: Case, gate: Tensor) -> None:
    """Write the gate, which is (M, N) yet."""
    device, height = gate.device.type, slab_height(case)
    for first in range(0, case.M, height):
        rows = slice(first, min(first + height, case.M))
        count = (rows.stop - rows.start) * case.N
        bits = hashed(case.seed, [(_GATE, first * case.N, count)], device)
        n, u = normal(bits).view(-1, case.N), uniform(bits).view(-1, case.N)
        gate[rows] = GATE_VALUES[case.gate](Field(n, u, u[:, :1], case.dtype)).float()


_OF_RESIDUAL: Mapping[str, Mapping[torch.dtype, int]] = MappingProxyType(
    {"nan": _NAN, "inf": {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}}
)
"""Kind of rows, or of dy -> the bits of one such number, which the residual, or its cotangent, has as well."""


def _put(tensor: Tensor, row: int, column: int, bits: Mapping[torch.dtype, int]) -> None:
    as_integers(tensor[row, column : column + 1]).fill_(bits[tensor.dtype])


def nan_bits(case: Case) -> int:
    """The bits of a NaN in x and dy, as a signed integer of their size."""
    io = torch_dtype(case.dtype)
    return _NAN[io] - (case.seed % 2 << (8 * io.itemsize - 1))


def slab_height(case: Case) -> int:
    """How many rows ``fill`` makes at a time: "blend" repeats after as many rows as there are kinds."""
    return max(1, SLAB_ELEMENTS // (case.N * len(ROWS))) * len(ROWS)


@cache
def _kernel_fits(dtype: str, weight_format: str) -> bool:
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
        plain, fused = _unfilled(case, "cpu"), _unfilled(case, "cpu")
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
    op, x, dy = OPS[case.op], _placed(case, "x", io, device), _placed(case, "dy", io, device)
    if op.modulated:
        wide, both = torch_dtype(case.weight_format), (case.batch, case.N)
        names = MODULATION[: 2 + op.gates_residual]
        own = {
            name: placed(both, (modulation_stride(case, name), 1), wide, device, shift=_shift(case, name, wide))
            for name in names
        }
        return _with_residual(case, Inputs(x, None, None, dy, **own), device)
    if op.rotary:
        return Inputs(x, None, None, dy, **heads_unfilled(case, torch_dtype(case.weight_format), device))
    shape, stride = (case.split.channels,), (1 + (case.layout == WEIGHT_STRIDED),)
    wide = torch_dtype(case.weight_format)
    weight, bias = (
        placed(shape, stride, wide, device, shift=_shift(case, name, wide)) if getattr(case, name) else None
        for name in ("weight", "bias")
    )
    scale = placed((1,), (1,), torch.float32, device) if case.scale in GIVEN_SCALES else None
    gate = _placed(case, GATE, io, device) if op.gated else None
    return _with_residual(case, Inputs(x, weight, bias, dy, scale=scale, gate=gate), device)


def _with_residual(case: Case, made: Inputs, device: str) -> Inputs:
    """``made``, with a residual and its cotangent, unfilled, if the op adds one."""
    if not OPS[case.op].adds_residual:
        return made
    wide = torch_dtype(case.residual_format)
    cotangent = _placed(case, "dresidual_out", wide, device)
    return replace(made, residual=_placed(case, "residual", wide, device), dresidual_out=cotangent)


def _placed(case: Case, name: str, dtype: torch.dtype, device: str) -> Tensor:
    """An unfilled tensor (M, N) in the layout of the case."""
    row, column = case.N + gap_of(case, name), 1
    if name == expanded(case):
        row, column = 0, int(case.layout == "dy_expanded")
    return placed((case.M, case.N), (row, column), dtype, device, shift=_shift(case, name, dtype))


def _shift(case: Case, name: str, dtype: torch.dtype) -> int:
    return shift_of(case, name, dtype.itemsize)


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
    return x.float(), DY_VALUES[case.dy](ndy, nx, case.dtype).float(), gauss[2 * elements :].view(2, n)
