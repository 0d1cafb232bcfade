# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Forward Triton kernels, but for ops that round xhat. On a CPU call ``interpreter.enable()`` before you import this.

    mean = sum(x) / N                            (rmsnorm: 0)
    rstd = 1 / sqrt(sum((x - mean)^2) / N + eps)
    z    = (x - mean) * rstd * w + b             (zero-centered: 1 + w)
    y    = z, or clamp(z, lower, upper) with bit = lower < z < upper

If a residual is added, x above is x + residual, rounded to the dtype of the residual, as it is stored in ``sum_ptr``.

fp32 inside; y is rounded once, at the store, and computed from the mean and rstd that are saved. The variance takes a
second pass over x. The first ``BLOCK`` columns stay in registers between the passes, the rest is read again.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.holds import Hold, can_hold, fitting, room_on, with_room
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import BYTE, ROW_COUNTS, Tile, ceil_div, group_rows, tile, tiles

MAX_BLOCK = 16384
ELEMENTS = 2048
"""Elements for each program on a GPU, if rows are narrower than those of ``TILES``."""


TILES = tiles(
    Tile(rows=8, block=256, warps=4, stages=4, groups=896),
    Tile(rows=2, block=512, warps=1, stages=4, groups=2048),
    Tile(rows=1, block=1024, warps=1, stages=4, groups=1024),
    Tile(rows=1, block=2048, warps=2, stages=4, groups=2048),
    Tile(rows=1, block=4096, warps=4, stages=3, groups=640),
    Tile(rows=1, block=8192, warps=8, stages=4, groups=512),
    Tile(rows=1, block=16384, warps=16, stages=4, groups=128),
)
WIDE = Tile(rows=1, block=8192, warps=32)
"""Chosen from some 40 each, for the least loss over the sizes of both suites of ``normcheck bench`` on an H200. Few
programs fit on a multiprocessor, so each loads its next row early, to hide the time that this takes."""

RESIDUAL_TILES = tiles(
    Tile(rows=8, block=256, warps=4, stages=3, groups=924),
    Tile(rows=2, block=512, warps=1, stages=3, groups=2112),
    Tile(rows=2, block=1024, warps=4),
    Tile(rows=1, block=2048, warps=4),
    Tile(rows=1, block=4096, warps=4),
    Tile(rows=1, block=8192, warps=16),
    Tile(rows=1, block=16384, warps=16, stages=3, groups=132),
)
"""The same with a residual. From 1024 columns on chosen from some 30 each on an H200, where four matrices leave so much
to wait for that a program for each group of rows is faster than a few that load ahead; the narrower ones are not
measured, nor those of 16384, which are held."""

HELD_FROM = 8193
"""Columns of the narrowest rows that are held."""

RESIDUAL_HELD_FROM, MAX_TILE = 4097, 8192
"""The same with a residual, but for rows that fill a tile, up to so many columns. In layernorm of 5120 columns a tile
of 8192 has 84 % of a copy, held rows have 90 % (an H200, M * N = 2^27, bf16)."""

HOLD = Hold(warps=8, stages=1, groups=264, shared=8)
"""How rows are held on a GPU, up to ``COLUMNS`` to a thread, if they are aligned and the op has no bitmask. The fastest
of some 20 for the sizes of both suites on an H200; the weight that is not read again for each row makes most of it."""

WIDE_HOLD = Hold(warps=16, stages=1, groups=132, shared=8)
"""The same for rows that would have more columns to a thread."""

COLUMNS = 64
"""They are in a register each, of 128 if two programs are to fit on a multiprocessor."""


@triton.jit
def load_tile(ptr, rows, cols, stride, mask):
    """A (ROWS, BLOCK) tile as fp32, 0 where masked; rows are int64, for their product with the stride."""
    at = ptr + rows[:, None] * stride + cols[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_sum(x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, mask):
    """The tile (ROWS, BLOCK) that is normed, as fp32: x, or its sum with a residual, which is rounded and stored."""
    x = load_tile(x_ptr, rows, cols, x_stride, mask)
    if residual_ptr is not None:
        stored = (x + load_tile(residual_ptr, rows, cols, residual_stride, mask)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows[:, None] * N + cols[None, :], stored, mask=mask)
        x = stored.to(tl.float32)
    return x


@triton.jit
def load_scale(weight_ptr, cols, N, ZERO_CENTERED: tl.constexpr):
    """The factor (BLOCK,) in fp32: w, or 1 + w; 1 if weight_ptr is None."""
    if weight_ptr is None:
        w = tl.full(cols.shape, 1.0, tl.float32)
    else:
        w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            w = 1.0 + w
    return w


@triton.jit
def store_bits(bits_ptr, inside, rows, start, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Pack a (ROWS, BLOCK) tile of booleans, false where masked, into bytes, least significant bit first."""
    eights = tl.reshape(inside.to(tl.int32), (ROWS, BLOCK // 8, 8))
    packed = tl.sum(eights << tl.arange(0, 8)[None, None, :], axis=2)
    width = (N + 7) // 8
    cols = start // 8 + tl.arange(0, BLOCK // 8)
    mask = (rows < M)[:, None] & (cols < width)[None, :]
    tl.store(bits_ptr + rows[:, None] * width + cols[None, :], packed.to(tl.uint8), mask=mask)


@triton.jit
def load_bias(bias_ptr, cols, N):
    """The summand (BLOCK,) in fp32; None if bias_ptr is None."""
    if bias_ptr is None:
        return None
    return tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_y(
    x, mean, rstd, scale, bias, y_ptr, bits_ptr, rows, start, M, N, lower, upper,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y, and the bitmask if there is one, of the tile x (ROWS, BLOCK) that begins at column ``start``."""
    cols = start + tl.arange(0, BLOCK)
    z = (x - mean[:, None]) * rstd[:, None] * scale[None, :]
    if bias is not None:
        z += bias[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if bits_ptr is not None:
        store_bits(bits_ptr, (z > lower) & (z < upper) & mask, rows, start, M, N, ROWS, BLOCK)
        z = tl.where(z < lower, lower, tl.where(z > upper, upper, z))  # NaN stays NaN
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], z, mask=mask)


@triton.jit(do_not_specialize=ROW_COUNTS)
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, bits_ptr, residual_ptr, sum_ptr,
    x_stride, residual_stride, M, N, eps, lower, upper,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows. bias_ptr, mean_ptr, bits_ptr, residual_ptr, sum_ptr are None if the op has none."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    first_cols = tl.arange(0, BLOCK)
    n = tl.full((ROWS,), N, tl.float32)
    if WHOLE:
        scale = load_scale(weight_ptr, first_cols, N, ZERO_CENTERED)
        bias = load_bias(bias_ptr, first_cols, N)

    first = load_sum(
        x_ptr, residual_ptr, sum_ptr, rows, first_cols, x_stride, residual_stride, N, here & (first_cols < N)[None, :]
    )
    total = first
    if mean_ptr is not None or residual_ptr is not None:
        for start in range(BLOCK, N, BLOCK):
            cols = start + first_cols
            total += load_sum(
                x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, here & (cols < N)[None, :]
            )
    if residual_ptr is not None:  # from here on the stored sum is read, which other threads may have stored
        tl.debug_barrier()
        x_ptr, x_stride = sum_ptr, N
    mean = tl.zeros((ROWS,), tl.float32)
    if mean_ptr is not None:
        mean = tl.div_rn(tl.sum(total, axis=1), n)
        tl.store(mean_ptr + rows, mean, mask=rows < M)

    centred = tl.where(here & (first_cols < N)[None, :], first - mean[:, None], 0.0)
    squares = centred * centred
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        centred = tl.where(mask, load_tile(x_ptr, rows, cols, x_stride, mask) - mean[:, None], 0.0)
        squares += centred * centred
    variance = tl.div_rn(tl.sum(squares, axis=1), n)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)

    if not WHOLE:
        scale = load_scale(weight_ptr, first_cols, N, ZERO_CENTERED)
        bias = load_bias(bias_ptr, first_cols, N)
    store_y(first, mean, rstd, scale, bias, y_ptr, bits_ptr, rows, 0, M, N, lower, upper, ROWS, BLOCK)
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        x = load_tile(x_ptr, rows, cols, x_stride, here & (cols < N)[None, :])
        scale = load_scale(weight_ptr, cols, N, ZERO_CENTERED)
        bias = load_bias(bias_ptr, cols, N)
        store_y(x, mean, rstd, scale, bias, y_ptr, bits_ptr, rows, start, M, N, lower, upper, ROWS, BLOCK)


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int, residual_bytes: int = 0) -> Tile:
    """The tile for rows of N elements; ``residual_bytes``: those of an element of x and one of the residual, if any."""
    chosen = RESIDUAL_TILES if residual_bytes else TILES
    t = tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block, chosen=chosen, wide=WIDE)
    return with_room(t, residual_bytes) if residual_bytes else t


@cache
def hold(N: int, itemsize: int, weight_itemsize: int, *, with_bias: bool, with_residual: bool = False) -> Hold | None:
    """How rows of N elements of ``itemsize`` bytes are held, with weights of ``weight_itemsize``; None: not at all.

    ``weight_itemsize``: 0 without a weight.
    """
    how = HOLD if HOLD.columns(N, itemsize) <= COLUMNS else WIDE_HOLD
    fills_a_tile = N <= MAX_TILE and N & (N - 1) == 0
    least = RESIDUAL_HELD_FROM if with_residual and not fills_a_tile else HELD_FROM
    if least > N or how.columns(N, itemsize) > COLUMNS:
        return None
    sizes = (N, itemsize, weight_itemsize)
    if with_residual and (half := fitting(how, *sizes, matrices=2, vectors=1 + with_bias, programs=2)):
        return half
    return fitting(how, *sizes, matrices=1 + with_residual, vectors=1 + with_bias)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    centered: bool = True,
    zero_centered: bool = False,
    clips: tuple[float, float] | None = None,
    residual: Tensor | None = None,
    max_block: int = MAX_BLOCK,
    how: Tile | Hold | None = None,
) -> dict[str, Tensor]:
    """Normalise the rows of x (M, N), last stride 1, by weight (N,) and bias (N,), each of which may be None.

    ``centered``: subtract the mean; ``zero_centered``: scale by 1 + weight; ``clips``: (lower, upper) of a clamp.
    ``residual`` (M, N), last stride 1, in a dtype of its own, is added to x first; the sum is rounded to that dtype, is
    what is normed, and is returned as residual_out. It goes with no clips.
    ``how``: in place of the tile, or the hold, that is chosen for N; programs of tiles with stages loop over rows.
    Returns y (M, N) in x's dtype, rstd and, if centered, mean (M,) fp32, with clips bitmask (M, ceil(N / 8)) uint8, and
    with a residual residual_out (M, N) in its dtype.
    """
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centered else None
    width = ceil_div(N, BYTE)
    bitmask = torch.empty((M, width), dtype=torch.uint8, device=x.device) if clips else None
    added = () if residual is None else (residual,)
    sums = None if residual is None else torch.empty((M, N), dtype=residual.dtype, device=x.device)
    if M:
        itemsize = max(matrix.element_size() for matrix in (x, *added))
        if how is None and not clips and x.is_cuda and room_on(x.device) and can_hold(N, x, *added):
            facts = {"with_bias": bias is not None, "with_residual": residual is not None}
            how = hold(N, itemsize, 0 if weight is None else weight.element_size(), **facts)
        residual_bytes = 0 if residual is None else x.element_size() + residual.element_size()
        t = how or _tile(M, N, on_gpu=x.is_cuda, max_block=max_block, residual_bytes=residual_bytes)
        strides = (x.stride(0), None if residual is None else residual.stride(0))
        arguments = (
            x, weight, bias, y, mean, rstd, bitmask, residual, sums, *strides, M, N, eps, *(clips or (0.0, 0.0))
        )  # fmt: skip
        if isinstance(t, Hold):
            from normcheck.impls.kernels.held import held_forward_kernel

            constants = t.constants(N, itemsize)
            for unused in ("STAGES", "SHARED", "HELD"):
                constants.pop(unused)
            launch(
                held_forward_kernel, (M,), x, weight, bias, y, mean, rstd, residual, sums, *strides, M, N, eps,
                ZERO_CENTERED=zero_centered, **constants,
            )  # fmt: skip
        else:
            launch(
                forward_kernel, (ceil_div(M, t.rows),), *arguments,
                ZERO_CENTERED=zero_centered, ROWS=t.rows, BLOCK=t.block, WHOLE=t.block >= N, num_warps=t.warps,
            )  # fmt: skip
    outputs = {"y": y, "residual_out": sums, "mean": mean, "rstd": rstd, "bitmask": bitmask}
    return {name: tensor for name, tensor in outputs.items() if tensor is not None}
