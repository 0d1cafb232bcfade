"""Faults in dx: the two means of backward, rebuilt xhat, tiles, shared memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import (
    CLEAN,
    HALF,
    LAYERNORMS,
    OPS,
    RELU,
    TILE,
    ZERO_CENTERED,
    Kernel,
    KernelCall,
    full_tiles,
    mean_in_io,
)
from normcheck.audit.mutants.mutant import UNWRITTEN, Mutant, implementations, mutant, not_exercised

_NO_RELU = tuple(op for op in OPS if op not in RELU)


def _by_tile(c: KernelCall, row_means: Tensor) -> Tensor:
    """The sum of a (M, 1) tensor over each tile of rows, in every row of the tile."""
    tile = torch.arange(c.M, device=c.x.device) // TILE
    sums = torch.zeros_like(row_means[:, 0]).index_add_(0, tile, row_means[:, 0])
    return sums[tile][:, None]


def _along_columns(c: KernelCall) -> Tensor:
    """c1 of row j mod M in column j, the same in every row."""
    means = CLEAN.mean1(c)
    return means[torch.arange(c.N, device=c.x.device) % c.M].t() if c.M else means


def _overwritten_dy(c: KernelCall) -> Tensor:
    # The steps are: dx = -(xhat*c1 + c2); dx += wdy; dx *= rstd. If dx is dy, the second step adds dx to itself.
    dx = -(c.xh * c.c1 + c.c2)
    return (dx + dx) * c.r


def _xhat_from_y(clamp: bool) -> Callable[[KernelCall], Tensor]:
    """A step that rebuilds xhat as (y - bias) / gamma from the stored y; ``clamp`` keeps gamma eps away from 0."""

    def xhat(c: KernelCall) -> Tensor:
        gain = c.one_plus(c.w)
        if clamp:
            gain = torch.where(gain < 0, gain.clamp(max=-c.eps), gain.clamp(min=c.eps))
        y = c.saved["y"].reshape(-1, c.N).float()
        return (y - (0 if c.b is None else c.b)) / gain

    return xhat


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="mD01",
        what="the xhat * c1 term is missing in dx",
        source="invented",
        kernel=Kernel(mean1=lambda c: c.zeros),
        outputs=("dx",),
    ),
    mutant(
        id="mD02",
        what="mean(wdy) is missing in dx",
        source="invented",
        kernel=Kernel(mean2=lambda c: c.zeros),
        ops=LAYERNORMS,
        outputs=("dx",),
    ),
    mutant(
        id="mD03",
        what="c1 and c2 are divided by BLOCK, the padded row, instead of N",
        source="invented",
        kernel=Kernel(
            mean1=lambda c: c.sum_n(c.xh * c.wd) / c.block,
            mean2=lambda c: c.sum_n(c.wd) / c.block,
        ),
        outputs=("dx",),
        when="N is not a power of two",
    ),
    mutant(
        id="mD04",
        what="c1 is formed without gamma",
        source="invented",
        kernel=Kernel(mean1=lambda c: c.mean_n(c.xh * c.dy)),
        outputs=("dx",),
    ),
    mutant(
        id="mD05",
        what="c1 has the wrong sign",
        source="invented",
        kernel=Kernel(mean1=lambda c: -CLEAN.mean1(c)),
        outputs=("dx",),
    ),
    mutant(
        id="mD06",
        what="gamma is w instead of 1 + w in backward",
        source="NVIDIA/TransformerEngine#67",
        kernel=Kernel(gamma_b=lambda c: c.w),
        ops=ZERO_CENTERED,
        outputs=("dx",),
    ),
    mutant(
        id="mD07",
        what="one power of rstd is missing in xhat * c1",
        source="invented",
        kernel=Kernel(dx=lambda c: (c.wd - (c.xc * c.c1 + c.c2)) * c.r),
        outputs=("dx",),
    ),
    mutant(
        id="mD08",
        what="the last factor rstd is missing in dx",
        source="invented",
        kernel=Kernel(dx=lambda c: c.wd - (c.xh * c.c1 + c.c2)),
        outputs=("dx",),
    ),
    mutant(
        id="mD12",
        what="dx shares the memory of dy and overwrites it too early",
        source="ggml-org/ggml#1491",
        kernel=Kernel(dx=_overwritten_dy),
        outputs=("dx",),
    ),
    mutant(
        id="mD13",
        what="the rows of dx in a last tile that is not full are not written",
        source="karpathy/llm.c#472",
        kernel=Kernel(store=lambda c, t, dtype, name: full_tiles(t.to(dtype)) if name == "dx" else t.to(dtype)),
        outputs=("dx",),
        kinds=UNWRITTEN,
        when="M is not a multiple of 8",
    ),
    mutant(
        id="mD14",
        what="c1 and c2 are summed over a tile of rows instead of a row",
        source="flagos-ai/FlagGems#59",
        kernel=Kernel(mean1=lambda c: _by_tile(c, CLEAN.mean1(c)), mean2=lambda c: _by_tile(c, CLEAN.mean2(c))),
        outputs=("dx",),
        when="M > 1",
    ),
    mutant(
        id="mD15",
        what="c1 is broadcast along the columns: column j gets that of row j mod M",
        source="BobMcDear/attorch#17",
        kernel=Kernel(mean1=_along_columns),
        outputs=("dx",),
        when="M > 1",
    ),
    mutant(
        id="mD17",
        what="xhat is rebuilt from y, with gamma kept eps away from 0",
        source="NVIDIA/apex#1715",
        kernel=Kernel(xhat_b=_xhat_from_y(clamp=True)),
        ops=_NO_RELU,
        outputs=("dx", "dw"),
        when="half dtypes, or |gamma| < eps",
    ),
    mutant(
        id="mD18",
        what="c1 and c2 are accumulated in the io dtype",
        source="invented",
        kernel=Kernel(mean1=lambda c: mean_in_io(c, c.xh * c.wd), mean2=lambda c: mean_in_io(c, c.wd)),
        dtypes=HALF,
        outputs=("dx",),
    ),
    mutant(
        id="mD19",
        what="xhat is rebuilt from y by a division by gamma",
        source="ServiceNow/Fast-LLM#220",
        kernel=Kernel(xhat_b=_xhat_from_y(clamp=False)),
        ops=_NO_RELU,
        outputs=("dx", "dw"),
        when="half dtypes, or gamma at or near 0",
    ),
    mutant(
        id="mD20",
        what="gamma is missing in wdy",
        source="karpathy/llm.c#763",
        kernel=Kernel(wdy=lambda c: c.dy),
        outputs=("dx",),
    ),
    mutant(
        id="mD21",
        what="one rstd too many in dx",
        source="invented",
        kernel=Kernel(dx=lambda c: CLEAN.dx(c) * c.r),
        outputs=("dx",),
    ),
    not_exercised(
        "mD10",
        what="the gradient of the residual is dropped",
        source="invented",
        outputs=("dx",),
        why="the ops here have no residual input",
    ),
    not_exercised(
        "mD11",
        what="the gradient of the residual is added before the backward of the norm",
        source="Dao-AILab/quack#53",
        outputs=("dx",),
        why="the ops here have no residual input",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
