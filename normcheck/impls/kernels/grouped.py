# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of norms of groups of channels. On a CPU, call ``interpreter.enable()`` before you import this.

    mean = sum(x) / K,  rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)     over the K elements of a group
    z    = (x - mean) * rstd * weight + bias,  y = z, or z * sigmoid(z)  with weight and bias of a channel

    dz = dy, or dy * sigmoid(z) * (1 + z * (1 - sigmoid(z))),  wdz = dz * weight
    c1 = sum(xhat * wdz) / K,  c2 = sum(wdz) / K                         over a group
    dx = (wdz - (xhat * c1 + c2)) * rstd
    dw = sum of dz * xhat, db = sum of dz                                over L and the samples

x and dy have strides of their own for B, C and L; y and dx have those of x if these are dense. fp32 inside, one
rounding at each store. All sums are in a fixed order: no atomics.

A tile is (ROWS, CHANNEL_BLOCK, LENGTH_BLOCK): so many groups, channels of each and elements of each channel. So no
element looks for its channel, and a weight is loaded once for all of its elements. Triton lays a tile out in the order
of memory, along L or along C, as it knows the strides. A group that fits into one tile is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels import backward as plain
from normcheck.impls.kernels.backward import sum_groups
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import Tile, ceil_div, power_of_two, tile, tiles, turns

MAX_BLOCK = 8192
"""Elements of the longest groups that one program holds; longer ones are read again."""

ELEMENTS = 2048
"""Elements for each program on a GPU, and for each warp, if groups are shorter; those of the gradients, which loop, are
of ``TILES``."""

TILES = tiles(
    *(Tile(rows=2048 // block, block=block, warps=4, stages=3, groups=528) for block in (256, 512, 1024)),
    *(t for block, t in plain.TILES.items() if block > 1024),
)
"""Those of a norm of rows, but of short groups fewer to a program, and more programs. Chosen from seven on an H100."""

_COUNTS = ("R", "B", "G", "parts")


@triton.jit
def rows_of(R, G, ROWS: tl.constexpr):
    """The rows of a program, and the sample and group of each, all int64 (ROWS,). A row is a group of a sample, or a
    head of a token.
    """
    first = tl.program_id(0).to(R.dtype) * ROWS  # of 32 bits, if so many count all: a division takes long
    beyond = (first % G).to(tl.int32) + tl.arange(0, ROWS)
    samples = (first // G).to(tl.int64) + beyond // G
    return first.to(tl.int64) + tl.arange(0, ROWS), samples, (beyond % G).to(tl.int64)


@triton.jit
def tile_of(t, CHANNELS, L, CHANNEL_BLOCK: tl.constexpr, LENGTH_BLOCK: tl.constexpr):
    """Of tile ``t`` of a group the channels in it (CHANNEL_BLOCK,) and the places along L (LENGTH_BLOCK,), both int64,
    and which elements there are, (1, CHANNEL_BLOCK, LENGTH_BLOCK).
    """
    across = tl.cdiv(L, LENGTH_BLOCK)
    c = (t // across * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)).to(tl.int64)
    along = (t % across * LENGTH_BLOCK + tl.arange(0, LENGTH_BLOCK)).to(tl.int64)
    return c, along, (c < CHANNELS)[None, :, None] & (along < L)[None, None, :]


@triton.jit
def places(ptr, c, along, c_stride, l_stride):
    """Where the elements of a tile lie; ``ptr``: where its groups begin, (ROWS, 1, 1)."""
    return ptr + (c * c_stride)[None, :, None] + (along * l_stride)[None, None, :]


@triton.jit
def load_at(ptr, c, along, c_stride, l_stride, mask):
    """A tile in fp32, 0 where masked."""
    return tl.load(places(ptr, c, along, c_stride, l_stride), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_of_channels(ptr, groups, c, CHANNELS, missing):
    """What channels ``c`` of groups (ROWS,) have, (ROWS, CHANNEL_BLOCK, 1) in fp32; ``missing`` if there is none."""
    mask = (groups >= 0)[:, None] & (c < CHANNELS)[None, :]
    if ptr is None:
        values = tl.where(mask, missing, 0.0)
    else:  # after a return triton compiles what follows all the same
        at = (groups * CHANNELS)[:, None] + c[None, :]
        values = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    return values[:, :, None]


@triton.jit
def sum_of(values, BY_CHANNEL: tl.constexpr):
    """The sums of a tile's rows, (ROWS,), first along the axis of which a thread has several elements."""
    return tl.sum(tl.sum(values, axis=1 if BY_CHANNEL else 2), axis=1)


@triton.jit
def sum_for_channels(values, BESIDE: tl.constexpr):
    """The sums of a tile's channels, (1, CHANNEL_BLOCK), or (ROWS, CHANNEL_BLOCK) if its rows are groups BESIDE."""
    sums = tl.sum(values, axis=2)
    return sums if BESIDE else tl.sum(sums, axis=0)[None, :]


@triton.jit
def activated(z, SILU: tl.constexpr):
    """silu of z, or z itself."""
    return z / (1.0 + tl.exp(-z)) if SILU else z


@triton.jit
def through(dy, z, SILU: tl.constexpr):
    """The cotangent of z, from that of y."""
    if SILU:
        s = 1.0 / (1.0 + tl.exp(-z))
        return dy * (s * (1.0 + z * (1.0 - s)))
    return dy


@triton.jit(do_not_specialize=_COUNTS)
def grouped_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, xb, xc, xl, yb, yc, yl, R, G, CHANNELS, L, tiles, eps,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, LENGTH_BLOCK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole groups, the first of their ``tiles`` stays in registers. R = B * G."""
    rows, samples, groups = rows_of(R, G, ROWS)
    here = (rows < R)[:, None, None]
    x_ptr += (samples * xb + groups * CHANNELS * xc)[:, None, None]
    y_ptr += (samples * yb + groups * CHANNELS * yc)[:, None, None]
    c, along, there = tile_of(0, CHANNELS, L, CHANNEL_BLOCK, LENGTH_BLOCK)
    first_mask = here & there
    first = load_at(x_ptr, c, along, xc, xl, first_mask)
    n = tl.full((ROWS,), CHANNELS * L, tl.float32)
    total = first
    for t in range(1, tiles):
        c, along, there = tile_of(t, CHANNELS, L, CHANNEL_BLOCK, LENGTH_BLOCK)
        total += load_at(x_ptr, c, along, xc, xl, here & there)
    mean = tl.div_rn(sum_of(total, BY_CHANNEL), n)
    tl.store(mean_ptr + rows, mean, mask=rows < R)
    mean = mean[:, None, None]
    centered = tl.where(first_mask, first - mean, 0.0)
    squares = centered * centered
    for t in range(1, tiles):
        c, along, there = tile_of(t, CHANNELS, L, CHANNEL_BLOCK, LENGTH_BLOCK)
        centered = tl.where(here & there, load_at(x_ptr, c, along, xc, xl, here & there) - mean, 0.0)
        squares += centered * centered
    variance = tl.div_rn(sum_of(squares, BY_CHANNEL), n)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < R)
    rstd = rstd[:, None, None]
    for t in range(tiles):
        c, along, there = tile_of(t, CHANNELS, L, CHANNEL_BLOCK, LENGTH_BLOCK)
        x = first
        if t > 0:
            x = load_at(x_ptr, c, along, xc, xl, here & there)
        z = (x - mean) * rstd * load_of_channels(weight_ptr, groups, c, CHANNELS, 1.0)
        z += load_of_channels(bias_ptr, groups, c, CHANNELS, 0.0)
        tl.store(places(y_ptr, c, along, yc, yl), activated(z, SILU), mask=here & there)


@triton.jit
def load_terms(
    dy_ptr, x_ptr, mean, rstd, weight, bias, c, along, dc, dl, xc, xl, mask, SILU: tl.constexpr
):  # fmt: skip
    """xhat and dz, 0 where masked."""
    xhat = tl.where(mask, (load_at(x_ptr, c, along, xc, xl, mask) - mean) * rstd, 0.0)
    dy = load_at(dy_ptr, c, along, dc, dl, mask)
    return xhat, tl.where(mask, through(dy, xhat * weight + bias, SILU), 0.0)


@triton.jit(do_not_specialize=_COUNTS)
def group_means_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, c1_ptr, c2_ptr, db, dc, dl, xb, xc, xl,
    R, G, CHANNELS, L, tiles,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, LENGTH_BLOCK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """c1 and c2 (R,) fp32 of groups of several tiles. One program: ROWS whole groups; R = B * G."""
    rows, samples, groups = rows_of(R, G, ROWS)
    here = (rows < R)[:, None, None]
    mean = tl.load(mean_ptr + rows, mask=rows < R, other=0.0)[:, None, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < R, other=0.0)[:, None, None]
    dy_ptr += (samples * db + groups * CHANNELS * dc)[:, None, None]
    x_ptr += (samples * xb + groups * CHANNELS * xc)[:, None, None]
    sum1 = tl.zeros((ROWS, CHANNEL_BLOCK, LENGTH_BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, CHANNEL_BLOCK, LENGTH_BLOCK), tl.float32)
    for t in range(tiles):
        c, along, there = tile_of(t, CHANNELS, L, CHANNEL_BLOCK, LENGTH_BLOCK)
        weight = load_of_channels(weight_ptr, groups, c, CHANNELS, 1.0)
        bias = load_of_channels(bias_ptr, groups, c, CHANNELS, 0.0)
        xhat, dz = load_terms(dy_ptr, x_ptr, mean, rstd, weight, bias, c, along, dc, dl, xc, xl, here & there, SILU)
        sum1 += xhat * (dz * weight)
        sum2 += dz * weight
    n = tl.full((ROWS,), CHANNELS * L, tl.float32)
    tl.store(c1_ptr + rows, tl.div_rn(sum_of(sum1, BY_CHANNEL), n), mask=rows < R)
    tl.store(c2_ptr + rows, tl.div_rn(sum_of(sum2, BY_CHANNEL), n), mask=rows < R)


@triton.jit(do_not_specialize=_COUNTS)
def grouped_gradients_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, c1_ptr, c2_ptr, dx_ptr, dw_ptr, db_ptr,
    db, dc, dl, xb, xc, xl, ob, oc, ol, B, G, CHANNELS, L, parts,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, LENGTH_BLOCK: tl.constexpr,
    BY_CHANNEL: tl.constexpr, STAGES: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """dx, and sums of dw and db. One program: a tile of one group, of ROWS samples, and of all that are ``parts`` times
    as many on; if BESIDE, of ROWS groups of one sample, and of each that is ``parts`` on.

    c1_ptr is None if a tile holds whole groups, dw_ptr if there is no weight, db_ptr if there is no bias.
    """
    at_once: tl.constexpr = 1 if BESIDE else ROWS
    abreast: tl.constexpr = ROWS if BESIDE else 1
    across_groups = tl.cdiv(G, abreast)
    part, t = tl.program_id(0) // across_groups, tl.program_id(1)
    groups = (tl.program_id(0) % across_groups * abreast + tl.arange(0, abreast)).to(tl.int64)
    groups = tl.where(groups < G, groups, -1)
    c, along, there = tile_of(t, CHANNELS, L, CHANNEL_BLOCK, LENGTH_BLOCK)
    weight = load_of_channels(weight_ptr, groups, c, CHANNELS, 1.0)
    bias = load_of_channels(bias_ptr, groups, c, CHANNELS, 0.0)
    n = tl.full((ROWS,), CHANNELS * L, tl.float32)
    dw = tl.zeros((ROWS, CHANNEL_BLOCK, LENGTH_BLOCK), tl.float32)
    db_sum = tl.zeros((ROWS, CHANNEL_BLOCK, LENGTH_BLOCK), tl.float32)
    for start in tl.range(part * at_once, B, parts * at_once, num_stages=STAGES):
        samples = (start + tl.arange(0, at_once)).to(tl.int64)
        here = (samples < B) & (groups >= 0)
        mask = here[:, None, None] & there
        mean = tl.load(mean_ptr + samples * G + groups, mask=here, other=0.0)[:, None, None]
        rstd = tl.load(rstd_ptr + samples * G + groups, mask=here, other=0.0)[:, None, None]
        dy_rows = dy_ptr + (samples * db + groups * CHANNELS * dc)[:, None, None]
        x_rows = x_ptr + (samples * xb + groups * CHANNELS * xc)[:, None, None]
        xhat, dz = load_terms(dy_rows, x_rows, mean, rstd, weight, bias, c, along, dc, dl, xc, xl, mask, SILU)
        wdz = dz * weight
        if c1_ptr is None:
            c1 = tl.div_rn(sum_of(xhat * wdz, BY_CHANNEL), n)
            c2 = tl.div_rn(sum_of(wdz, BY_CHANNEL), n)
        else:
            c1 = tl.load(c1_ptr + samples * G + groups, mask=here, other=0.0)
            c2 = tl.load(c2_ptr + samples * G + groups, mask=here, other=0.0)
        dx = (wdz - (xhat * c1[:, None, None] + c2[:, None, None])) * rstd
        dx_rows = dx_ptr + (samples * ob + groups * CHANNELS * oc)[:, None, None]
        tl.store(places(dx_rows, c, along, oc, ol), dx, mask=mask)
        dw += dz * xhat
        db_sum += dz
    across = tl.cdiv(L, LENGTH_BLOCK)
    at = (part * across + t % across).to(tl.int64) * G * CHANNELS + (groups * CHANNELS)[:, None] + c[None, :]
    mask = (groups >= 0)[:, None] & (c < CHANNELS)[None, :]
    if dw_ptr is not None:
        tl.store(dw_ptr + at, sum_for_channels(dw, BESIDE), mask=mask)
    if db_ptr is not None:
        tl.store(db_ptr + at, sum_for_channels(db_sum, BESIDE), mask=mask)


@dataclass(frozen=True)
class _Cut:
    """How groups are cut: the rows of each program, ``tiles`` of each group, ``across`` of them along L, the constants
    of a kernel, and of a loop over samples its stages and how many programs share them at most.
    """

    rows: int
    tiles: int
    across: int
    constants: dict[str, int]
    stages: int
    programs: int


@cache
def _cut(
    rows: int, channels: int, length: int, *, by_channel: bool, on_gpu: bool, max_block: int, loops: bool = False
) -> _Cut:
    """The tiles of ``rows`` groups, which are longest along L, or along C if memory is (``by_channel``)."""
    inner, outer = map(power_of_two, (channels, length) if by_channel else (length, channels))
    inner = min(inner, max_block)
    outer = min(outer, max_block // inner)
    how: dict[str, Any] = (
        {"elements": 2 * ELEMENTS, "chosen": TILES} if loops else {"elements": ELEMENTS, "per_warp": ELEMENTS}
    )
    t = tile(rows, inner * outer, on_gpu=on_gpu, max_block=max_block, **how)
    channel_block, length_block = (inner, outer) if by_channel else (outer, inner)
    across = ceil_div(length, length_block)
    blocks = {"CHANNEL_BLOCK": channel_block, "LENGTH_BLOCK": length_block, "BY_CHANNEL": by_channel}
    return _Cut(
        rows=t.rows, tiles=across * ceil_div(channels, channel_block), across=across,
        constants={"ROWS": t.rows, **blocks, "num_warps": t.warps}, stages=t.stages, programs=t.groups,
    )  # fmt: skip


def _by_channel(x: Tensor) -> bool:
    """Whether the elements of a group lie along C."""
    return x.shape[2] == 1 or x.stride(1) < x.stride(2)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    groups: int,
    silu: bool,
    max_block: int = MAX_BLOCK,
) -> dict[str, Tensor]:
    """Norm the ``groups`` of channels of x (B, C, L), of any strides; weight and bias (C,) or None.

    Returns y (B, C, L) in the dtype of x, mean and rstd (B, groups) in fp32. ``silu``: it is applied to the norm.
    ``max_block``: a limit in place of MAX_BLOCK, a power of two.
    """
    B, C, L = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty((B, groups), dtype=torch.float32, device=x.device) for _ in range(2))
    if B:
        rows, channels = B * groups, C // groups
        cut = _cut(rows, channels, L, by_channel=_by_channel(x), on_gpu=x.is_cuda, max_block=max_block)
        launch(
            grouped_kernel, (ceil_div(rows, cut.rows),), x, weight, bias, y, mean, rstd, *x.stride(), *y.stride(),
            rows, groups, channels, L, cut.tiles, eps, SILU=silu, **cut.constants,
        )  # fmt: skip
    return {"y": y, "mean": mean, "rstd": rstd}


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    max_block: int = MAX_BLOCK,
) -> dict[str, Tensor]:
    """Gradients from dy and x (B, C, L), of any strides, and the saved mean and rstd (B, groups).

    Returns dx in the dtype of x, and dw and db (C,) in those of weight and bias, as far as there are any.
    """
    B, C, L = x.shape
    dx = torch.empty_like(x)
    make = torch.empty_like if B else torch.zeros_like
    sums: dict[str, Tensor] = {
        name: make(t, memory_format=torch.contiguous_format)
        for name, t in (("dw", weight), ("db", bias))
        if t is not None
    }
    if not B:
        return {"dx": dx, **sums}
    channels, own = C // groups, {"by_channel": _by_channel(x), "on_gpu": x.is_cuda, "max_block": max_block}
    of_all = (dy, x, weight, bias, mean.contiguous(), rstd.contiguous())
    strides, size = (*dy.stride(), *x.stride()), (groups, channels, L)
    beside = groups > B and not x.is_cuda  # a GPU has enough to do with one group to a program
    cut = _cut(groups if beside else B, channels, L, **own, loops=True)
    c1 = c2 = None
    if cut.tiles > 1:
        c1, c2 = torch.empty((2, B * groups), dtype=torch.float32, device=x.device)
        of_means = _cut(B * groups, channels, L, **own)
        launch(
            group_means_kernel, (ceil_div(B * groups, of_means.rows),), *of_all, c1, c2, *strides,
            B * groups, *size, of_means.tiles, SILU=silu, **of_means.constants,
        )  # fmt: skip
    across, at_once = (ceil_div(groups, cut.rows), 1) if beside else (groups, cut.rows)
    parts = turns(B, at_once, max(cut.programs // across, 1))
    stored = sums
    if parts * cut.across > 1:
        whole = (parts * cut.across, C)
        stored = {name: torch.empty(whole, dtype=torch.float32, device=x.device) for name in sums}
    launch(
        grouped_gradients_kernel, (across * parts, cut.tiles), *of_all, c1, c2, dx, stored.get("dw"), stored.get("db"),
        *strides, *dx.stride(), B, *size, parts, SILU=silu, **cut.constants, STAGES=cut.stages, BESIDE=beside,
    )  # fmt: skip
    if sums and stored is not sums:
        sum_groups(stored, sums)
    return {"dx": dx, **sums}
