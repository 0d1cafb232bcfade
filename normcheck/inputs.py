"""Case -> tensors. The same case line gives the same bits on every machine, on a CPU and on a GPU.

Every random number is an integer hash of (seed, stream, position), computed in int64 on the target device; from there
only exact or singly rounded fp64 operations lead to the stored value. No library generator is involved, whose streams
differ between devices and versions, and no reduction, whose order differs.

``n`` below is a sum of four 16-bit uniforms, scaled to variance 1: near enough to normal, bounded by 3.47.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from normcheck.case import EXPANDED, Case
from normcheck.formats import FORMATS
from normcheck.memory import placed
from normcheck.ops.op import Op

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64: splitmix64 (Steele, Lea, Flood 2014)
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case on a device.

    ``x``, ``dy``: (M, N), or (B, S, N) where the case has rank 3; last stride 1, row stride N + gap where strided. A dy
    that is expanded has row stride 0, as a scalar it has no stride at all. ``weight``, ``bias`` (None where the case
    has none): (N,). Each lies in a buffer of its own, with NaN in its gaps and in bands before and behind it.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are there, by name."""
        for name in ("x", "weight", "bias", "dy"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with every tensor changed."""
        bias = None if self.bias is None else change(self.bias)
        return Inputs(change(self.x), change(self.weight), bias, change(self.dy))


@dataclass(frozen=True, slots=True)
class Field:
    """What a kind of rows is made from: ``n`` (M, N) normal-like, ``u`` (M, N) and ``ur`` (M, 1) uniform in [0, 1)."""

    n: Tensor
    u: Tensor
    ur: Tensor
    dtype: str

    def columns(self) -> Tensor:
        """Column numbers, (N,)."""
        return torch.arange(self.n.shape[1], device=self.n.device)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a format's name."""
    dtype: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return dtype


def hashed(seed: int, pieces: Sequence[tuple[int, int, int]], device: str) -> Tensor:
    """int64: splitmix64 of positions, for each piece (stream, first, count) one after another. The same everywhere."""
    z = torch.cat([_ramp(first, count, device) + _start(seed, stream) for stream, first, count in pieces])
    z ^= (z >> 30) & 0x3FFFFFFFF
    z *= _MIX_1
    z ^= (z >> 27) & 0x1FFFFFFFFF
    z *= _MIX_2
    return z.bitwise_xor_((z >> 31) & 0x1FFFFFFFF)


def _start(seed: int, stream: int) -> int:
    return ((seed + 1) * 0x2545F4914F6CDD1D + stream * 0x632BE59BD9B4E019) % 2**63


def _ramp(first: int, count: int, device: str) -> Tensor:
    """Positions from ``first``, times the golden constant; wraps."""
    if first + count <= _KEPT:
        return _kept_ramp(device)[first : first + count]
    return torch.arange(first, first + count, dtype=torch.int64, device=device).mul_(_GOLDEN)


@cache
def _kept_ramp(device: str) -> Tensor:
    return torch.arange(_KEPT, dtype=torch.int64, device=device).mul_(_GOLDEN)


def normal(bits: Tensor) -> Tensor:
    """fp64: the sum of the four 16-bit fields of each hash, centred, scaled to variance 1. Exact, then one rounding."""
    fields = bits.view(torch.int16).view(*bits.shape, 4)
    return fields.sum(-1).double().add_(2.0).mul_(1 / 37837.227)


def uniform(bits: Tensor) -> Tensor:
    """fp64 in [0, 1): the low 32 bits of each hash over 2^32. Exact."""
    return (bits & 0xFFFFFFFF).double().mul_(2.0**-32)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64 for integer-valued exponents in [-1000, 1000], exactly: written into the exponent field."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _at_random_column(f: Field) -> Tensor:
    """bool (M, N): one column of each row."""
    columns = f.n.shape[1]
    return f.columns() == (f.ur * columns).long()


def _offset(f: Field) -> Tensor:
    """Far from zero with a small spread: where E[x^2] - mean^2 cancels and a two-pass variance does not."""
    if f.dtype == "fp32":
        return f.n + 4096.0
    level, step = (2048.0, 2.0) if f.dtype == "fp16" else (256.0, 2.0)
    distance = (f.columns() - (f.ur * f.n.shape[1]).long()).abs()
    return level + step * (distance < 2).double()


def _large(f: Field) -> Tensor:
    return (f.n * 16000.0) if f.dtype == "fp16" else f.n * 2.0**33


def _subnormal(f: Field) -> Tensor:
    return f.n * (2.0**-18 if f.dtype == "fp16" else 2.0**-128)


def _constant(f: Field) -> Tensor:
    levels = torch.tensor([14.0, -3.5, 1234.0, 0.1, 1.0, -200.0, 3e-3, 40003.0], dtype=torch.float64, device=f.n.device)
    return levels[(f.ur * 8).long()].expand_as(f.n)


def _mixed(f: Field) -> Tensor:
    return f.n * _power_of_two((f.u * 30).floor() - 20)


def _tail(f: Field) -> Tensor:
    return torch.where(f.columns() == f.n.shape[1] - 1, 10.0 + f.n, f.n)


ROWS: Mapping[str, Callable[[Field], Tensor]] = MappingProxyType(
    {
        "normal": lambda f: f.n,
        "uniform": lambda f: f.u,
        "shifted": lambda f: f.n + 8.0,
        "scaled": lambda f: f.n * torch.where(f.ur < 0.5, 8.0, 0.125),
        "tail": _tail,
        "ramp": lambda f: (f.columns().double() * (8.0 / f.n.shape[1]) - 3.0).expand_as(f.n),
        "outlier": lambda f: torch.where(_at_random_column(f), 40.0 + f.n, f.n),
        "integers": lambda f: ((f.u * 5).floor() - 2) * (f.u > 0.5).double(),
        "alternating": lambda f: (100.0 - 200.0 * (f.columns() % 2).double()).expand_as(f.n),
        "zero": lambda f: torch.zeros_like(f.n),
        "constant": _constant,
        "tiny_variance": lambda f: f.n * _power_of_two((f.ur * 8).floor() - 17),
        "small_offset": lambda f: f.n * 2.0**-10 + 0.25,
        "mean100": lambda f: f.n + 100.0,
        "offset": _offset,
        "mean10000": lambda f: f.n + 10000.0,
        "mixed": _mixed,
        "large": _large,
        "subnormal": _subnormal,
    }
)
"""Ordinary kinds of rows, simplest first: name -> values in fp64 before they are rounded to the io dtype."""


def _in_one_row(value: Callable[[Field], Tensor]) -> Callable[[Field], Tensor]:
    """Normal rows, but for one, which is ``value``: the first, the last or any other."""

    def rows(f: Field) -> Tensor:
        out, height = f.n.clone(), f.n.shape[0]
        at = int(f.ur[0] * 4 * height) % height if height else 0
        row = slice(at, at + 1)
        out[row] = value(Field(f.n[row], f.u[row], f.ur[row], f.dtype))
        return out

    return rows


def _largest(f: Field) -> Tensor:
    return torch.copysign(torch.full_like(f.n, FORMATS[f.dtype].max), f.n)


SPECIAL_ROWS: Mapping[str, Callable[[Field], Tensor]] = MappingProxyType(
    {
        "signed_zero": lambda f: torch.copysign(torch.zeros_like(f.n), f.n),
        "largest": _in_one_row(_largest),
        "nan": _in_one_row(lambda f: torch.where(_at_random_column(f) | (f.ur < 0.25), math.nan, f.n)),
        "inf": _in_one_row(lambda f: torch.where(_at_random_column(f), torch.copysign(f.u + math.inf, f.n), f.n)),
    }
)
"""Special values, which the blend does not have. ``largest``: the format's largest finite number, of either sign;
``nan``: one of them in a row, or nothing else."""

NOT_FINITE = ("nan", "inf")
"""Kinds of rows and of dy with one element that is not finite."""

_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
"""The bits of the NaN that is an input; with an odd seed it has a sign."""

SLAB_ELEMENTS = 1 << 22
_X, _DY_STREAM, _ROW, _WEIGHT, _BIAS = range(5)  # streams of a seed
_KEPT = 1 << 15  # positions that are kept, instead of being counted anew for every small case


def _blend(f: Field) -> Tensor:
    """Row i is of the i-th kind, so that one case asks about all of them."""
    out = f.n.clone()
    for i, name in enumerate(tuple(ROWS)[: f.n.shape[0]]):
        rows = slice(i, None, len(ROWS))
        out[rows] = ROWS[name](Field(f.n[rows], f.u[rows], f.ur[rows], f.dtype))
    return out


_KINDS = {**ROWS, "blend": _blend, **SPECIAL_ROWS}
ROW_KINDS = (*ROWS, "blend", *SPECIAL_ROWS)
"""Kinds of rows, simplest first."""


def _with_one(n: Tensor, value: float) -> Tensor:
    """``n`` with ``value``, of either sign, in one place."""
    out = n.clone()
    if n.numel():
        at = int(float(n[0, 0].abs()) * 1e6) % n.numel()
        out.view(-1)[at] = math.copysign(value, float(n[0, 0]))
    return out


_DY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "normal": lambda n, x: n,
        "shifted": lambda n, x: n + 0.5,
        "ones": lambda n, x: torch.ones_like(n),
        "integers": lambda n, x: (n * 1.25).round(),
        "correlated": lambda n, x: x + 0.25 * n + 0.5,
        "last_row": lambda n, x: n + torch.copysign(torch.full_like(n, 0.5), n),
        "first_row": lambda n, x: n + torch.copysign(torch.full_like(n, 0.5), n),
        "small": lambda n, x: n * 2.0**-12,
        "nan": lambda n, x: _with_one(n, math.nan),
        "inf": lambda n, x: _with_one(n, math.inf),
    }
)
_ONLY_ROW = {"last_row": -1, "first_row": 0}
DY_KINDS = tuple(_DY)
"""Kinds of cotangents, simplest first, of unit scale, but for ``small``.
``correlated``: with the normal field behind x. ``nan``, ``inf``: one element of it."""

WEIGHT_KINDS = ("normal", "small", "probe")
"""``small``: N(0, 1/300), where 1 + weight is not representable. ``probe``: exact 0, -1, 2^-8, 2^-9 and 8x columns;
where the scale is then 0 the bias of a clamped op is one of its limits, so that z ties with it exactly."""


def _weights(case: Case, op: Op, n: Tensor) -> tuple[Tensor, Tensor]:
    """weight and bias (N,) in fp64 from ``n`` (2, N)."""
    weight, bias = n[0], n[1]
    if case.weights == "small":
        return weight * (1 / 300), bias
    if case.weights == "probe":
        special = torch.tensor([0.0, -1.0, 2.0**-8, 2.0**-9, 1.0, 8.0], dtype=torch.float64, device=n.device)
        column = torch.arange(case.N, device=n.device)
        kind = column % 9
        weight = torch.where(kind % 2 == 1, weight, special[(kind // 2) % 6])
        weight = torch.where(kind == 8, 8.0 * n[0], weight)
        if op.clamped:
            limits = torch.tensor([v for _, v in case.options], dtype=torch.float64, device=n.device)
            bias = torch.where(weight + op.weight_offset == 0, limits[(column // 9) % 2], bias)
    return weight, bias


def make(case: Case, op: Op, device: str) -> Inputs:
    """The tensors of ``case`` on ``device`` ("cpu" or "cuda"). The same bits everywhere.

    Rows are made in slabs, so that what is needed besides the tensors themselves stays small.
    """
    io = torch_dtype(case.dtype)
    x, dy = _placed(case, "x", io, device), _placed(case, "dy", io, device)
    height = max(1, SLAB_ELEMENTS // (case.N * len(ROWS))) * len(ROWS)  # "blend" repeats after that many rows
    for first in range(0, max(case.M, 1), height):
        rows = slice(first, min(first + height, case.M))
        x[rows], cotangents, parameters = _slab(case, rows, device)
        if case.layout not in EXPANDED:
            dy[rows] = cotangents
        elif not first and case.M:  # the one row, or the one number, that all rows share
            shared = cotangents[0] if case.layout == "dy_expanded" else torch.ones(1, device=device)
            dy.as_strided(shared.shape, (1,)).copy_(shared)
    if case.dy in _ONLY_ROW and case.M and case.layout not in EXPANDED:
        only = dy[_ONLY_ROW[case.dy]].clone()
        dy.zero_()
        dy[_ONLY_ROW[case.dy]] = only
    if case.rows == "nan" or case.dy == "nan":  # devices round a NaN to other bits
        for t in (x, dy):
            integers = t.view(torch.int16 if t.element_size() == 2 else torch.int32)
            if case.layout not in EXPANDED or t is x:
                integers.masked_fill_(torch.isnan(t), _NAN[io] - (case.seed % 2 << (8 * t.element_size() - 1)))
    weight, bias = _weights(case, op, parameters)
    if case.rank == 3:
        shape = (case.batch, case.M // case.batch, case.N)
        x, dy = x.view(shape), dy.view(shape)
    parameter = partial(_parameter, case, device)
    return Inputs(x, parameter(weight), parameter(bias) if case.bias else None, dy)


def _placed(case: Case, name: str, dtype: torch.dtype, device: str) -> Tensor:
    """x or dy (M, N), to be filled, in the layout of the case."""
    stride = (case.N + (case.gap if case.layout in ("strided", f"{name}_strided") else 0), 1)
    if name == "dy" and case.layout in EXPANDED:
        stride = (0, int(case.layout == "dy_expanded"))
    return placed((case.M, case.N), stride, dtype, device, shift=_shift(case))


def _shift(case: Case) -> int:
    """Elements by which the base of every tensor is off an aligned address."""
    return int(case.layout == "misaligned")


def _parameter(case: Case, device: str, values: Tensor) -> Tensor:
    """fp64 -> the weights' dtype through fp32, which every device rounds alike."""
    dtype = torch.float32 if case.weight_dtype == "fp32" else torch_dtype(case.dtype)
    return placed((case.N,), (1,), dtype, device, shift=_shift(case)).copy_(values.float())


def _slab(case: Case, rows: slice, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x and dy of some rows, (rows, N) in fp32: the copy into place rounds them; and (2, N) behind weight and bias."""
    n, height = case.N, rows.stop - rows.start
    elements, first = height * n, rows.start * n
    pieces = [(_X, first, elements), (_DY_STREAM, first, elements), (_WEIGHT, 0, n), (_BIAS, 0, n)]
    bits = hashed(case.seed, [*pieces, (_ROW, rows.start, height)], device)
    gauss = normal(bits[: 2 * (elements + n)])
    nx, ndy = gauss[: 2 * elements].view(2, height, n)
    if case.rows == "normal":
        x = nx
    else:
        u, ur = uniform(bits[:elements]).view(height, n), uniform(bits[2 * (elements + n) :]).view(height, 1)
        x = _KINDS[case.rows](Field(nx, u, ur, case.dtype))
    return x.float(), _DY[case.dy](ndy, nx).float(), gauss[2 * elements :].view(2, n)
