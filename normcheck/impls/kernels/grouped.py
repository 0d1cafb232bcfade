# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of norms of groups of channels. On a CPU, call ``interpreter.enable()`` before you import this.

    mean = sum(x) / K,  rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)     over the K elements of a group
    z    = (x - mean) * rstd * weight + bias,  y = z, or z * sigmoid(z)  with weight and bias of a channel

    dz = dy, or dy * sigmoid(z) * (1 + z * (1 - sigmoid(z))),  s1 = sum(dz * xhat), s2 = sum(dz)  over L, for (B, C)
    c1 = sum(weight * s1) / K,  c2 = sum(weight * s2) / K                over the channels of a group
    dx = (dz * weight - (xhat * c1 + c2)) * rstd,  dw = sum of s1 over B,  db = sum of s2 over B

x and dy have strides of their own for B, C and L; y and dx have those of x if these are dense. fp32 inside, one
rounding at each store. All sums are in a fixed order: no atomics. The elements of a group are taken in the order of
memory, along L or along C.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.backward import sum_groups
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import Tile, ceil_div, tile

MAX_BLOCK = 8192
"""Elements of the longest groups that one program holds; longer ones are read again."""

ELEMENTS, FORWARD_ELEMENTS = 4096, 1024
"""Elements for each program of short groups on a GPU; in the forward also for each warp."""

_SUMMED = 256
"""Samples that a program sums at most, if there are more."""

_COUNTS = ("R", "G", "CHANNELS", "L", "C")


DENSE, CHANNELS_FIRST, CHANNELS_LAST = (tl.constexpr(order) for order in range(3))
"""How the elements of x and dy lie: those of a group without gaps, which are loaded many at a time; else by strides."""


@triton.jit
def places(rows, at, G, CHANNELS, L, b_stride, c_stride, l_stride, ORDER: tl.constexpr):
    """Where the elements ``at`` (BLOCK,) of groups (ROWS,) lie, and their channels, both int64 (ROWS, BLOCK)."""
    if ORDER == CHANNELS_LAST:
        channel, along = at % CHANNELS, at // CHANNELS
    else:
        channel, along = at // L, at % L
    channels = ((rows % G) * CHANNELS)[:, None] + channel.to(tl.int64)[None, :]
    if ORDER == DENSE:
        place = (rows * CHANNELS * L)[:, None] + at[None, :]
    else:
        start = (rows // G * b_stride)[:, None] + channels * c_stride
        place = start + (along.to(tl.int64) * l_stride)[None, :]
    return place, channels


@triton.jit
def load_of_channels(ptr, channels, mask, missing):
    """What channels have, in fp32; ``missing`` for each if there is none."""
    if ptr is None:
        values = tl.where(mask, missing, 0.0)
    else:  # after a return triton compiles what follows all the same
        values = tl.load(ptr + channels, mask=mask, other=0.0).to(tl.float32)
    return values


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
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, xb, xc, xl, yb, yc, yl, R, G, CHANNELS, L, eps,
    SILU: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole groups, the first BLOCK elements of which stay in registers."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here, K = (rows < R)[:, None], CHANNELS * L
    first_at = tl.arange(0, BLOCK)
    first_mask = here & (first_at < K)[None, :]
    place, _channels = places(rows, first_at, G, CHANNELS, L, xb, xc, xl, ORDER)
    first = tl.load(x_ptr + place, mask=first_mask, other=0.0).to(tl.float32)
    n = tl.full((ROWS,), K, tl.float32)
    total = first
    for start in range(BLOCK, K, BLOCK):
        at = start + first_at
        place, _channels = places(rows, at, G, CHANNELS, L, xb, xc, xl, ORDER)
        total += tl.load(x_ptr + place, mask=here & (at < K)[None, :], other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(total, axis=1), n)
    tl.store(mean_ptr + rows, mean, mask=rows < R)
    centered = tl.where(first_mask, first - mean[:, None], 0.0)
    squares = centered * centered
    for start in range(BLOCK, K, BLOCK):
        at = start + first_at
        mask = here & (at < K)[None, :]
        place, _channels = places(rows, at, G, CHANNELS, L, xb, xc, xl, ORDER)
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        centered = tl.where(mask, x - mean[:, None], 0.0)
        squares += centered * centered
    variance = tl.div_rn(tl.sum(squares, axis=1), n)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < R)
    for start in range(0, K, BLOCK):
        at = start + first_at
        mask = here & (at < K)[None, :]
        place, channels = places(rows, at, G, CHANNELS, L, xb, xc, xl, ORDER)
        x = first
        if start > 0:
            x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean[:, None]) * rstd[:, None] * load_of_channels(weight_ptr, channels, mask, 1.0)
        z += load_of_channels(bias_ptr, channels, mask, 0.0)
        place, _channels = places(rows, at, G, CHANNELS, L, yb, yc, yl, ORDER)
        tl.store(y_ptr + place, activated(z, SILU), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def channel_sums_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, s1_ptr, s2_ptr, db, dc, dl, xb, xc, xl,
    R, C, CHANNELS, G, L, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """s1 and s2 (B, C) fp32. One program: ROWS whole rows (b, c) of L elements; R = B * C."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < R)[:, None]
    samples, channels = rows // C, rows % C
    groups = (samples * G + channels // CHANNELS)[:, None]
    mean = tl.load(mean_ptr + groups, mask=here, other=0.0)
    rstd = tl.load(rstd_ptr + groups, mask=here, other=0.0)
    weight = load_of_channels(weight_ptr, channels[:, None], here, 1.0)
    bias = load_of_channels(bias_ptr, channels[:, None], here, 0.0)
    sum1 = tl.zeros((ROWS, BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, L, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = here & (at < L)[None, :]
        along = at.to(tl.int64)[None, :]
        place = (samples * db + channels * dc)[:, None] + along * dl
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        place = (samples * xb + channels * xc)[:, None] + along * xl
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.where(mask, (x - mean) * rstd, 0.0)
        dz = tl.where(mask, through(dy, xhat * weight + bias, SILU), 0.0)
        sum1 += dz * xhat
        sum2 += dz
    tl.store(s1_ptr + rows, tl.sum(sum1, axis=1), mask=rows < R)
    tl.store(s2_ptr + rows, tl.sum(sum2, axis=1), mask=rows < R)


@triton.jit(do_not_specialize=_COUNTS)
def group_means_kernel(
    s1_ptr, s2_ptr, weight_ptr, c1_ptr, c2_ptr, R, G, CHANNELS, L, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """c1 and c2 (B, G) fp32, of the sums of channels. One program: ROWS groups; R = B * G."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sum1 = tl.zeros((ROWS, BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (rows < R)[:, None] & (at < CHANNELS)[None, :]
        channels = ((rows % G) * CHANNELS)[:, None] + at[None, :]
        weight = load_of_channels(weight_ptr, channels, mask, 1.0)
        place = (rows * CHANNELS)[:, None] + at[None, :]
        sum1 += weight * tl.load(s1_ptr + place, mask=mask, other=0.0)
        sum2 += weight * tl.load(s2_ptr + place, mask=mask, other=0.0)
    n = tl.full((ROWS,), CHANNELS * L, tl.float32)
    tl.store(c1_ptr + rows, tl.div_rn(tl.sum(sum1, axis=1), n), mask=rows < R)
    tl.store(c2_ptr + rows, tl.div_rn(tl.sum(sum2, axis=1), n), mask=rows < R)


@triton.jit(do_not_specialize=_COUNTS)
def grouped_dx_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, c1_ptr, c2_ptr, dx_ptr, db, dc, dl, xb, xc, xl,
    ob, oc, ol, R, G, CHANNELS, L, SILU: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx. One program: BLOCK elements of ROWS groups; R = B * G."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < R)[:, None] & (at < CHANNELS * L)[None, :]
    mean = tl.load(mean_ptr + rows, mask=rows < R, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < R, other=0.0)[:, None]
    c1 = tl.load(c1_ptr + rows, mask=rows < R, other=0.0)[:, None]
    c2 = tl.load(c2_ptr + rows, mask=rows < R, other=0.0)[:, None]
    place, channels = places(rows, at, G, CHANNELS, L, db, dc, dl, ORDER)
    dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
    place, channels = places(rows, at, G, CHANNELS, L, xb, xc, xl, ORDER)
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    weight = load_of_channels(weight_ptr, channels, mask, 1.0)
    xhat = (x - mean) * rstd
    dz = through(dy, xhat * weight + load_of_channels(bias_ptr, channels, mask, 0.0), SILU)
    place, channels = places(rows, at, G, CHANNELS, L, ob, oc, ol, ORDER)
    tl.store(dx_ptr + place, (dz * weight - (xhat * c1 + c2)) * rstd, mask=mask)


@cache
def _tile(rows: int, columns: int, *, on_gpu: bool, max_block: int) -> Tile:
    return tile(rows, columns, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block)


@cache
def _forward_tile(rows: int, columns: int, *, on_gpu: bool, max_block: int) -> Tile:
    return tile(rows, columns, on_gpu=on_gpu, elements=FORWARD_ELEMENTS, per_warp=FORWARD_ELEMENTS, max_block=max_block)


def _order(*tensors: Tensor) -> int:
    """How the elements of x, the first one, and of all others lie."""
    x = tensors[0]
    if all(t.is_contiguous() for t in tensors):
        return int(DENSE.value)
    last = x.stride(1) < x.stride(2) and x.shape[2] > 1
    return int((CHANNELS_LAST if last else CHANNELS_FIRST).value)


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
    ``max_block``: a limit in place of MAX_BLOCK.
    """
    B, C, L = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty((B, groups), dtype=torch.float32, device=x.device) for _ in range(2))
    if B:
        rows, channels = B * groups, C // groups
        t = _forward_tile(rows, channels * L, on_gpu=x.is_cuda, max_block=max_block)
        launch(
            grouped_kernel, (ceil_div(rows, t.rows),), x, weight, bias, y, mean, rstd, *x.stride(), *y.stride(),
            rows, groups, channels, L, eps, SILU=silu, ORDER=_order(x, y), ROWS=t.rows, BLOCK=t.block,
            num_warps=t.warps,
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
    make = torch.empty if B else torch.zeros
    dw, db = (None if t is None else make((C,), dtype=t.dtype, device=x.device) for t in (weight, bias))
    out = {name: t for name, t in (("dx", dx), ("dw", dw), ("db", db)) if t is not None}
    if not B:
        return out
    mean, rstd, channels, on_gpu = mean.contiguous(), rstd.contiguous(), C // groups, x.is_cuda
    many = ceil_div(B, _SUMMED)
    of_samples = torch.zeros if B % many else torch.empty
    s1, s2 = (of_samples((many * ceil_div(B, many), C), dtype=torch.float32, device=x.device) for _ in range(2))
    c1, c2 = (torch.empty((B, groups), dtype=torch.float32, device=x.device) for _ in range(2))
    of_all = (dy, x, weight, bias, mean, rstd)
    t = _tile(B * C, L, on_gpu=on_gpu, max_block=max_block)
    launch(
        channel_sums_kernel, (ceil_div(B * C, t.rows),), *of_all, s1, s2, *dy.stride(), *x.stride(),
        B * C, C, channels, groups, L, SILU=silu, ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
    )  # fmt: skip
    t = _tile(B * groups, channels, on_gpu=on_gpu, max_block=max_block)
    launch(
        group_means_kernel, (ceil_div(B * groups, t.rows),), s1, s2, weight, c1, c2,
        B * groups, groups, channels, L, ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
    )  # fmt: skip
    t = _tile(B * groups, channels * L, on_gpu=on_gpu, max_block=max_block)
    launch(
        grouped_dx_kernel, (ceil_div(B * groups, t.rows), ceil_div(channels * L, t.block)), *of_all, c1, c2, dx,
        *dy.stride(), *x.stride(), *dx.stride(), B * groups, groups, channels, L, SILU=silu, ORDER=_order(x, dy, dx),
        ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
    )  # fmt: skip
    sums: dict[str, Tensor] = {name: out[name] for name in ("dw", "db") if name in out}
    parts: dict[str, Tensor] = {name: s1 if name == "dw" else s2 for name in sums}
    if sums and many > 1:
        fewer: dict[str, Tensor] = {name: torch.empty((many, C), dtype=torch.float32, device=x.device) for name in sums}
        sum_groups(parts, fewer, samples=many)
        parts = fewer
    if sums:
        sum_groups(parts, sums)
    return out
