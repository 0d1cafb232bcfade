"""The reference: the textbook formulas over a block of rows, in fp64 on the tensors' own device.

It uses plain torch operations, never torch.compile, Triton or cuDNN, because those are judged. ``m`` is the number of
rows in the block, ``N`` their length. Inputs are the exact stored values, widened to fp64.
tests/oracle/test_reference.py compares it with mpmath at 50 digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.op import Op
from normcheck.cases.split import Heads, Split
from normcheck.oracle.activation import Gating


@dataclass(frozen=True, slots=True)
class Floor:
    """Of an op that divides by eps at least, bool (m, 1): the rows that it divides by it, ``reached``; ``doubt``: those
    that a correct kernel may divide by it or not.
    """

    reached: Tensor
    doubt: Tensor


@dataclass(frozen=True)
class Modulation:
    """What multiplies the xhat of rows, ``factor``, and what is added, ``shift``, (m, N); the rows are those of so many
    ``samples``, of each as many.

    ``off``: how far a kernel's factor may be from this one. ``normed``: xhat is rounded to the dtype of x; ``each``: so
    is its product; ``wide``: that product may be left in fp32, as scale and shift have it; ``apart``: so is its product
    with scale, to which it is added.
    """

    factor: Tensor
    off: Tensor
    shift: Tensor
    samples: int
    normed: bool
    each: bool
    wide: bool
    apart: bool


@dataclass(frozen=True)
class Grouping:
    """How a row of the case is ``split`` into the groups that are rows. ``silu``: it is applied to what is normed and
    scaled; ``each``: to that as it is rounded to the dtype of x.
    """

    split: Split
    silu: bool
    each: bool


@dataclass(frozen=True)
class Rotation:
    """What rotates rows that are heads of q and k, of m tokens: ``cos``, ``sin`` (m, 1, pairs), after each was
    multiplied by its ``factor``, shaped as the rows. ``rest``: the heads of v of each token.

    ``side_by_side``: which columns are a pair; ``rounding``: what is rounded to the dtype of x; ``wide``: what the
    weights, the cosines and the sines are multiplied to may be left in fp32, as they are.
    """

    heads: Heads
    cos: Tensor
    sin: Tensor
    factor: Tensor
    rest: Tensor
    side_by_side: bool
    rounding: str
    wide: bool

    def parts(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first and the second columns of pairs of ``t``, shaped as the rows, (m, heads, pairs), and the rest."""
        own, turned = t.reshape(-1, self.heads.normed, self.heads.columns), 2 * self.heads.pairs
        if self.side_by_side:
            return own[..., 0:turned:2], own[..., 1:turned:2], own[..., turned:]
        return own[..., : self.heads.pairs], own[..., self.heads.pairs : turned], own[..., turned:]

    def joined(self, first: Tensor, second: Tensor, rest: Tensor) -> Tensor:
        """What ``parts`` took apart."""
        both = torch.stack((first, second), -1).flatten(-2) if self.side_by_side else torch.cat((first, second), -1)
        return torch.cat((both, rest), -1).reshape(-1, self.heads.columns)


@dataclass(frozen=True)
class Stack:
    """Of rows whose groups have weights of their own: the group of each row, ``at`` (m,); how many there are."""

    at: Tensor
    groups: int

    def total(self, t: Tensor) -> Tensor:
        """The sums of ``t`` (m, N) over the rows of each group, (G, N)."""
        return t.new_zeros((self.groups, t.shape[1])).index_add_(0, self.at, t)


@dataclass(frozen=True)
class Rows:
    """Normalised rows: ``x``, ``xh`` = (x - mean) * rstd (m, N); ``mean``, ``var``, ``rstd`` (m, 1).

    ``mean`` is None if the op is not centred, ``var`` if the statistics were given. ``gating``: what a gate does to
    these rows, None if the op is not gated. A row may be one of ``groups`` groups of columns of a row of the case.
    ``floor``: None unless the op divides by eps at least. ``modulation``: what such an op multiplies them by and adds,
    None if it is not modulated. ``grouping``: of an op that norms groups of channels; ``rotation``: of one that rotates
    heads. ``off`` (m, N): how far what a kernel norms may be from ``x``; None if that is given. ``stack``: None unless
    groups of rows have their own weights.
    """

    x: Tensor
    mean: Tensor | None
    var: Tensor | None
    rstd: Tensor
    xh: Tensor
    gating: Gating | None = None
    floor: Floor | None = None
    modulation: Modulation | None = None
    grouping: Grouping | None = None
    off: Tensor | None = None
    rotation: Rotation | None = None
    stack: Stack | None = None

    @property
    def groups(self) -> int:
        """How many of these rows are one of the case."""
        if self.grouping is not None:
            return self.grouping.split.groups
        if self.rotation is not None:
            return self.rotation.heads.normed
        return 1 if self.gating is None else self.gating.groups

    def total(self, t: Tensor) -> Tensor:
        """The sum of ``t``, shaped as these rows, over the rows of the case: (N,), or of each sample: (samples, N); of
        each channel: (C,); of each group of rows: (G, N).
        """
        if self.stack is not None:
            return self.stack.total(t)
        if self.grouping is not None:
            return t.reshape(-1, self.grouping.split.channels, self.grouping.split.length).sum((0, 2))
        if self.modulation is not None:
            return t.reshape(self.modulation.samples, t.shape[0] // self.modulation.samples, t.shape[1]).sum(1)
        return t.sum(0) if self.groups == 1 else t.reshape(-1, self.groups * t.shape[1]).sum(0)

    def of_channels(self, t: Tensor) -> Tensor:
        """What channels have, (C,), for each element of these rows."""
        assert self.grouping is not None
        split = self.grouping.split
        whole = t.repeat_interleave(split.length).view(split.groups, split.columns)
        return whole.repeat(self.x.shape[0] // split.groups, 1)

    @property
    def xh_off(self) -> Tensor | None:
        """How far a kernel's xhat may be off by that, the errors of its statistics apart."""
        return None if self.off is None else self.off * self.rstd

    @cached_property
    def x_abs(self) -> Tensor:
        """|x|, (m, N)."""
        return self.x.abs()

    @cached_property
    def xh_abs(self) -> Tensor:
        """|xh|, (m, N)."""
        return self.xh.abs()


@dataclass(frozen=True)
class Scale:
    """The factor of xhat, ``weight`` (N,), or (2, D) of q and k, plus ``offset``; ``weight`` is as stored, or what
    stands in for none.
    """

    weight: Tensor
    offset: float = 0.0

    @cached_property
    def g(self) -> Tensor:
        """The factor in fp64."""
        g = self.weight.double()
        return g + self.offset if self.offset else g

    @cached_property
    def abs(self) -> Tensor:
        """|g|."""
        return self.g.abs()

    @cached_property
    def alone(self) -> Tensor | None:
        """|weight| if g is not 0, else 0: of a kernel that adds xhat to xhat * weight; None if the weight is g."""
        return torch.where(self.g == 0, 0.0, (self.g - self.offset).abs()) if self.offset else None

    @cached_property
    def where(self) -> Tensor | None:
        """0 where g is 0, else 1; None if all are 1."""
        return None if bool(self.g.all()) else (self.g != 0).double()


@dataclass(frozen=True, slots=True)
class Forward:
    """``p`` = xh * g, ``z`` = p + bias before the clip, ``y`` after it (z itself if the op has none), all (m, N)."""

    p: Tensor
    z: Tensor
    y: Tensor


@dataclass(frozen=True, slots=True)
class Backward:
    """``wd`` = dy * g, ``dx`` (m, N); ``c1`` = mean(xh * wd), ``c2`` = mean(wd) or None (m, 1).

    ``dw``, ``db`` (N,) are this block's share of the sums over all rows, or (samples, N) over those of each sample, or
    (G, N) over those of each group.
    """

    wd: Tensor
    c1: Tensor
    c2: Tensor | None
    dx: Tensor
    dw: Tensor
    db: Tensor


def scale(op: Op, weight: Tensor) -> Scale:
    """The factor of xhat, exactly ``weight`` (N,) or ``1 + weight``."""
    return Scale(weight, op.weight_offset)


def scale_of(op: Op, inputs: Inputs) -> Scale:
    """The factor of xhat in ``inputs``; exactly 1 for every op if they have no weight."""
    if inputs.weight is not None:
        return scale(op, inputs.weight)
    if inputs.q_weight is not None and inputs.k_weight is not None:
        return Scale(torch.stack((inputs.q_weight, inputs.k_weight)))
    columns = inputs.x.shape[1] if op.grouped else inputs.x.shape[-1]
    return scale(op, inputs.x.new_full((columns,), 1.0 - op.weight_offset))


def normalise(op: Op, x: Tensor, eps: float) -> Rows:
    """Statistics and xhat of the rows of ``x`` (m, N), fp64. The mean is compensated, the variance is biased."""
    if not op.centered:
        var = (x * x).mean(1, keepdim=True)
        rstd = (var + eps).rsqrt_()
        return Rows(x, None, var, rstd, x * rstd)
    mean = x.mean(1, keepdim=True)
    mean = mean + (x - mean).mean(1, keepdim=True)
    xc = x - mean
    var = (xc * xc).mean(1, keepdim=True)
    rstd = (var + eps).rsqrt_()
    return Rows(x, mean, var, rstd, xc * rstd)


def stacked(case: Case, rows: Rows, first: int, end: int) -> Rows:
    """``rows``, those from ``first`` to ``end`` of a case whose groups of rows have weights of their own."""
    at = torch.arange(first, end, device=rows.x.device)
    return replace(rows, stack=Stack(case.group_of(at), case.row_groups))


def normalise_with(rows: Rows, mean: Tensor | None, rstd: Tensor) -> Rows:
    """``rows`` with xhat from given statistics (m, 1), which count as exact; ``mean``: None if not centred."""
    xh = rows.x * rstd if mean is None else (rows.x - mean).mul_(rstd)
    return replace(rows, mean=mean, var=None, rstd=rstd, xh=xh)


def renormalised(rows: Rows, x: Tensor) -> Rows:
    """Other numbers ``x`` (m, N) in fp64, normalised by the statistics of ``rows``."""
    return Rows(x, rows.mean, rows.var, rows.rstd, x * rows.rstd if rows.mean is None else (x - rows.mean) * rows.rstd)


def forward(op: Op, rows: Rows, g: Tensor, bias: Tensor | None, options: Mapping[str, float]) -> Forward:
    """z and y (m, N) from normalised rows; ``g`` and ``bias`` (N,), or (m, N), in fp64."""
    p = rows.xh * g
    z = p if bias is None else p + bias
    y = z.clamp(options["lower_clip"], options["upper_clip"]) if op.clamped else z
    return Forward(p, z, y)


def bits(z: Tensor, options: Mapping[str, float]) -> Tensor:
    """bool (m, N): the elements of ``z`` strictly between the limits."""
    return (z > options["lower_clip"]) & (z < options["upper_clip"])


def backward(op: Op, rows: Rows, g: Tensor, dy: Tensor) -> Backward:
    """Gradients from normalised rows and the cotangent ``dy`` (m, N) in fp64 (already masked by the bits).

        dx = (wd - (xh * mean(xh * wd) + mean(wd))) * rstd,  dw = sum_M(dy * xh),  db = sum_M(dy)

    Without centring the term mean(wd) is absent. Derivation: Ba et al. 2016, or differentiate ``forward``.
    """
    wd = dy * g
    c1 = (rows.xh * wd).mean(1, keepdim=True)
    if op.centered:
        c2 = wd.mean(1, keepdim=True)
        dx = (wd - torch.addcmul(c2, rows.xh, c1)) * rows.rstd
    else:
        c2 = None
        dx = (wd - rows.xh * c1) * rows.rstd
    return Backward(wd, c1, c2, dx, rows.total(dy * rows.xh), rows.total(dy))
