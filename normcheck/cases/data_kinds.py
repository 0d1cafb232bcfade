"""Kinds of data: the ``rows``, ``dy`` and ``weights`` of a case, as functions of random numbers.

``n`` below is a sum of four 16-bit uniforms, scaled to variance 1: near enough to normal, bounded by 3.47. Only exact
or singly rounded fp64 operations follow, so that every machine makes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import CODES, FORMATS
from normcheck.cases.op import Op


@dataclass(frozen=True, slots=True)
class Field:
    """The random numbers behind rows, in fp64: ``n`` (M, N) normal-like, ``u`` (M, N) and ``ur`` (M, 1) in [0, 1).

    ``dtype``: the name of the io dtype.
    """

    n: Tensor
    u: Tensor
    ur: Tensor
    dtype: str

    def columns(self) -> Tensor:
        """Column numbers, int64 (N,)."""
        return torch.arange(self.n.shape[1], device=self.n.device)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, exactly, for integer-valued exponents in [-1000, 1000]: it writes the exponent field."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _at_random_column(f: Field) -> Tensor:
    """bool (M, N): True in one random column of each row."""
    columns = f.n.shape[1]
    return f.columns() == (f.ur * columns).long()


def _offset(f: Field) -> Tensor:
    """Far from zero with a small spread: E[x^2] - mean^2 cancels, a two-pass variance does not.

    In half precision a row has one level, which is random: a power of two has squares whose sums are exact, and hide
    it. A few neighbours are one step of the format above it. In fp16 more of them in longer rows: mean^2 / v must not
    be so large that the bound of any order of summing lets the variance be anything.
    """
    if f.dtype == "fp32":
        return f.n + 4096.0
    columns = f.n.shape[1]
    place = f.ur * columns  # exact: 32 bits times 21
    lowest, width = (2048.0, max(2, columns // 128)) if f.dtype == "fp16" else (256.0, 2)
    level = lowest + 2.0 * ((place - place.floor()) * (lowest / 4)).floor()
    distance = (f.columns() - place.long()).abs()
    return level + 2.0 * (distance < width).double()


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
"""Ordinary kinds of rows, simplest first: name -> x (M, N) in fp64 before it is rounded to the io dtype."""


def _in_one_row(value: Callable[[Field], Tensor]) -> Callable[[Field], Tensor]:
    """Normal rows, except for one random row, which is ``value``."""

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
"""Kinds of rows with special values, which are not in the blend. ``largest``: the format's largest finite number, of
either sign; ``nan``: one row has a single NaN, or nothing but NaN."""

NOT_FINITE = ("nan", "inf")
"""Kinds of rows and of dy with NaN or infinities."""


def _blend(f: Field) -> Tensor:
    """Row i is of the i-th kind, modulo their number, so that one case has all of them."""
    out = f.n.clone()
    for i, name in enumerate(tuple(ROWS)[: f.n.shape[0]]):
        rows = slice(i, None, len(ROWS))
        out[rows] = ROWS[name](Field(f.n[rows], f.u[rows], f.ur[rows], f.dtype))
    return out


ROW_VALUES: Mapping[str, Callable[[Field], Tensor]] = MappingProxyType({**ROWS, "blend": _blend, **SPECIAL_ROWS})
"""Every kind of rows: name -> x (M, N) in fp64 before it is rounded to the io dtype."""

ROW_KINDS = tuple(ROW_VALUES)
"""Kinds of rows, simplest first."""


def _with_one(n: Tensor, value: float) -> Tensor:
    """``n`` with ``value``, of either sign, at one element."""
    out = n.clone()
    if n.numel():
        at = int(float(n[0, 0].abs()) * 1e6) % n.numel()
        out.view(-1)[at] = math.copysign(value, float(n[0, 0]))
    return out


DY_VALUES: Mapping[str, Callable[[Tensor, Tensor, str], Tensor]] = MappingProxyType(
    {
        "normal": lambda n, x, dtype: n,
        "shifted": lambda n, x, dtype: n + 0.5,
        "ones": lambda n, x, dtype: torch.ones_like(n),
        "integers": lambda n, x, dtype: (n * 1.25).round(),
        "correlated": lambda n, x, dtype: x + 0.25 * n + 0.5,
        "last_row": lambda n, x, dtype: n + torch.copysign(torch.full_like(n, 0.5), n),
        "first_row": lambda n, x, dtype: n + torch.copysign(torch.full_like(n, 0.5), n),
        "small": lambda n, x, dtype: n * 2.0 ** (-12 if dtype == "fp16" else -30),
        "large": lambda n, x, dtype: n * 2.0**9,
        "nan": lambda n, x, dtype: _with_one(n, math.nan),
        "inf": lambda n, x, dtype: _with_one(n, math.inf),
    }
)
"""Every kind of cotangent: name -> dy (M, N) in fp64, from its own normal-like numbers, those of x, and its dtype."""

ONLY_ROW = MappingProxyType({"last_row": -1, "first_row": 0})
"""Kind of dy that is 0 except for one row -> the index of that row."""

DY_KINDS = tuple(DY_VALUES)
"""Kinds of cotangents, simplest first, all but ``small`` and ``large``, as of a loss that is scaled, of unit scale.
``correlated``: with the normal-like numbers of x. ``nan``, ``inf``: one element is."""

WEIGHT_KINDS = ("normal", "small", "probe")
"""``small``: N(0, 1/300), so that 1 + weight is not representable. ``probe``: columns of exactly 0, -1, 2^-8 and 2^-9,
and 8 times normal ones; if the factor of xhat is 0, the bias of a clamped op is a limit, so that z ties with it."""


RESIDUAL_VALUES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "normal": lambda n, x: n,
        "large": lambda n, x: 64.0 * n,
        "half": lambda n, x: -0.5 * x,
        "small": lambda n, x: n * 2.0**-6,
        "opposite": lambda n, x: -x * (1.0 + n * 2.0**-5),
    }
)
"""Every kind of residual: name -> residual (M, N) in fp64, from its own normal-like numbers and from x. ``large``: as
deep in a model, where the sum of all layers is larger than one; ``half``: the sum keeps the kind of x, at half its
size; ``opposite``: the sum cancels."""


def _turning(f: Field) -> Tensor:
    """Columns of numbers at which an activation or its slope is special, with normal ones between them."""
    special = torch.tensor(_TURNING, dtype=torch.float64, device=f.n.device)
    column = f.columns()
    return torch.where(column % 2 == 0, special[(column // 2) % len(_TURNING)], f.n)


_TURNING = (0.0, -1.278464542761074, -100.0, 50.0, -88.75, -20.0, 2.0**-9, 100.0, -1.0)
"""silu is 0 at 0, and -1.278 is where it turns: its slope is 0. e^88.73 overflows in fp32, e^20 is more than 1 / u. A
sigmoid of e^-z overflows at -100, one of e^z at 100."""

GATE_VALUES: Mapping[str, Callable[[Field], Tensor]] = MappingProxyType(
    {
        "normal": lambda f: f.n,
        "turning": _turning,
        "wide": lambda f: f.n * 16.0,
        "open": lambda f: f.n + 50.0,
        "shut": lambda f: f.n * 3.0 - 8.0,
        "inf": lambda f: SPECIAL_ROWS["inf"](f),
    }
)
"""Every kind of gate: name -> gate (M, N) in fp64, from normal-like numbers of its own. ``open``: silu is the gate
itself and sigmoid 1, so that a plain norm is left; ``shut``: all of a row is nearly 0; ``inf``: one number is
infinite."""

GATE_KINDS = tuple(GATE_VALUES)
"""Kinds of gates, simplest first."""

Angles = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""cos and sin (M, pairs) in fp64, from two numbers in [0, 1) of each, and from the number of each row, int64 (M,)."""


def _turned(u: Tensor, signs: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Any angle, of which no library has to make a cosine: t = tan(angle / 2) gives both."""
    square, size = u * u, 1.0 / (1.0 + u * u)
    cosine, sine = (1.0 - square) * size, 2.0 * u * size
    quadrant = (signs * 4).long()
    return torch.where(quadrant % 2 == 0, cosine, -cosine), torch.where(quadrant < 2, sine, -sine)


def _scaled_turns(u: Tensor, signs: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    size = _power_of_two(row % _MAGNITUDES - 1)[:, None]
    cosine, sine = _turned(u, signs, row)
    return cosine * size, sine * size


ANGLE_VALUES: Mapping[str, Angles] = MappingProxyType(
    {
        "normal": _turned,
        "scaled": _scaled_turns,
        "right": lambda u, signs, row: (torch.zeros_like(u), torch.where(signs < 0.5, 1.0, -1.0).double()),
        "zero": lambda u, signs, row: (torch.ones_like(u), torch.zeros_like(u)),
    }
)
"""Every kind of angles: name -> cos and sin. ``scaled``: as with a scaling of attention, twice as large for the next
token, so that no other token's will do; ``right``: a head's columns change places; ``zero``: position 0, where the norm
of each head is left."""

ANGLE_KINDS = tuple(ANGLE_VALUES)
"""Kinds of angles, simplest first."""

CODE_WEIGHTS = "codes"
"""Weights of an op that quantises: on rows of one magnitude, such as ``alternating``, every y lies in the middle of two
codes, but for one that is the largest code, if the scale is TIE_SCALE; if it is ``power``, some are between those of
int8. If the scale is returned, it is that one for
int8, e4m3fn or e5m2 in turn, by the seed."""

TIE_SCALE = 7 * 2.0**-8
"""A scale by which dividing is exact where multiplying by its reciprocal is not: odd multiples of 7 tell the two."""


def weight_kinds(op: Op) -> tuple[str, ...]:
    """The kinds of weights of an op, simplest first."""
    return (*WEIGHT_KINDS, CODE_WEIGHTS) if op.quantises else WEIGHT_KINDS


def dy_kinds(op: Op, dtype: str) -> tuple[str, ...]:
    """The kinds of dy of an op, simplest first. Eager code rounds each product to the dtype of x, which is a convention
    of some ops: in fp16 that overflows beside a large dy.
    """
    if op.quantises:
        return DY_KINDS[:1]
    overflows = dtype == "fp16" and (op.gated or op.modulated or op.grouped or op.rotary)
    return tuple(kind for kind in DY_KINDS if not (overflows and kind == "large"))


SCALE_VALUES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "normal": lambda u: 2.0**-5 * (1.0 + u),
        "ties": lambda u: TIE_SCALE,
        "power": lambda u: 2.0**-8,
        "coarse": lambda u: 2.0 + u,
        "fine": lambda u: 2.0**-9 * (1.0 + u),
        "tiny": lambda u: 2.0**-120 * (1.0 + u),
    }
)
"""Each of ``case.GIVEN_SCALES``: name -> the scale, from u in [0, 1). ``power``: dividing by it is exact in every
way; ``coarse``: most codes are small; ``fine``: many saturate; ``tiny``: all do but those of 0."""

RESIDUAL_KINDS = tuple(RESIDUAL_VALUES)
"""Kinds of residuals, simplest first. Beside a row of SPECIAL_ROWS a residual is ``normal``."""


def weights(case: Case, op: Op, n: Tensor) -> tuple[Tensor, Tensor]:
    """weight and bias (N,) in fp64 from normal-like ``n`` (2, N), or scale and shift (B, N) from ``n`` (2, B, N)."""
    weight, bias = n[0], n[1]
    if case.weights == "small":
        return weight * (1 / 300), bias
    if case.weights == CODE_WEIGHTS:
        return _middles_of_codes(case.N, case.seed, n), bias
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


def modulation(case: Case, op: Op, n: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """scale and shift (B, N) of samples from ``first`` on, in fp64, from normal-like ``n`` (2, B, N).

    Those of the next sample are twice as large, so that no other sample's will do. A scale of ``probe`` is -1 in some
    columns, where y is the shift alone.
    """
    sample = torch.arange(first, first + n.shape[1], device=n.device)
    return weights(case, op, n * _power_of_two(sample % _MAGNITUDES)[:, None])


def residual_gate(case: Case, n: Tensor, first: int = 0) -> Tensor:
    """The gate (B, N) of x of samples from ``first`` on, in fp64, from normal-like ``n`` (B, N).

    Gates of the next sample are twice as large, as its scale is, from 1 / 8 to 1: of large rows even these may be too
    large a product for fp16. Those of ``small`` weights are one power of two in all columns, so that the sum has what
    the rows of x have, such as a mean far from 0. Those of ``probe`` are 0 in some columns, where the sum is the
    residual alone, and 1 + 2^-9 in others, which half precision rounds; by every third seed they are 0 in all, as a
    model of AdaLN-Zero begins: then the gradient of the gate is what is left.
    """
    size = _power_of_two(torch.arange(first, first + n.shape[0], device=n.device) % _MAGNITUDES - 3)[:, None]
    if case.weights == "small":
        return size.expand(n.shape)
    gate = n * size
    if case.weights != "probe":
        return gate
    if case.seed % 3 == 0:
        return torch.zeros_like(gate)
    at = torch.arange(n.shape[1], device=n.device) % 5
    return torch.where(at == 1, 0.0, torch.where(at == 3, 1 + 2.0**-9, gate))


_MAGNITUDES = 4
"""How many samples of a modulation, or tokens, differ in their exponents."""


def _middles_of_codes(columns: int, seed: int, n: Tensor) -> Tensor:
    """The weights of CODE_WEIGHTS (N,): the largest code in the first column, behind it middles for each format.

    The largest code of int8, times TIE_SCALE, has ten bits: bf16 rounds it.
    """
    at = torch.arange(columns, device=n.device)
    of_int8 = at % 18 + 0.5
    of_e4m3 = (17.0 + 2 * (at % 8)) * 2.0 ** (at % 3).double()
    of_e5m2 = (9.0 + 2 * (at % 4)) * 2.0 ** (at % 4).double()
    codes = torch.where(at % 3 == 0, of_int8, torch.where(at % 3 == 1, of_e4m3, of_e5m2)).double()
    codes[0] = tuple(fmt.max for fmt in CODES.values())[seed % 3]
    return codes * TIE_SCALE
