# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Forward Triton kernels. On a CPU call ``interpreter.enable()`` before you import this.

    mean = sum(x) / N                            (rmsnorm: 0)
    rstd = 1 / sqrt(sum((x - mean)^2) / N + eps)
    z    = (x - mean) * rstd * w + b             (zero-centered: 1 + w)
    y    = z, or clamp(z, lower, upper) with bit = lower < z < upper

An op that rounds xhat, (x - mean) * rstd, rounds it to the dtype of y before the product with w.

If a residual is added, x above is x + residual, rounded to the dtype of the residual, as it is stored in ``sum_ptr``.

fp32 inside; y is rounded once, at the store, and computed from the mean and rstd that are saved. The variance takes a
second pass over x. The first ``BLOCK`` columns stay in registers between the passes, the rest is read again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.holds import MOST_BLOCKS, UNASKED, Hold, can_hold, room_on
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import BYTE, ROW_COUNTS, Tile, ceil_div, power_of_two, tile

MAX_BLOCK = 16384
ELEMENTS = 2048
"""Elements for each program on a GPU, if rows are narrower, and for each warp: 64 to a thread.

So a program takes a row, or few, and no loop. With few warps, which wait less for each other, many programs are on a
multiprocessor, and rows are read in their order: on an H100 that is up to 9 % faster than few programs, each of which
loops over rows of its own and loads the next ones early."""

CLAMPED_COLUMNS = 4096
"""Columns of a clamp that a program keeps at most, half as many to a thread: it packs bits besides. The second pass
over wider rows finds them in the cache."""

WIDE = Tile(rows=1, block=8192, warps=32)

HELD_FROM = 2049
"""Columns of the narrowest rows that are held, if they are aligned."""

THREAD_BYTES, PART_BYTES = 64, 32768
"""Of a row that one block holds each thread has so many bytes. Of one that blocks share, each has so many at most."""

MOST_WARPS = 32
"""Those of the largest block."""


@triton.jit
def load_tile(ptr, rows, cols, stride, mask):
    """A (ROWS, BLOCK) tile as fp32, 0 where masked; rows are int64, for their product with the stride."""
    at = ptr + rows[:, None] * stride + cols[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_sum(
    x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, mask, gate_ptr=None, S=1, gate_stride=0
):  # fmt: skip
    """The tile (ROWS, BLOCK) that is normed, as fp32: x, or its sum with a residual, which is rounded and stored.

    With a gate (B, N), x is first multiplied by that of its sample, which has S rows.
    """
    x = load_tile(x_ptr, rows, cols, x_stride, mask)
    if gate_ptr is not None:
        x *= load_tile(gate_ptr, rows // S, cols, gate_stride, mask)
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
    """The summand (BLOCK,) in fp32; zeros, not to be added, if bias_ptr is None."""
    if bias_ptr is None:
        b = tl.zeros(cols.shape, tl.float32)
    else:
        b = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return b


@triton.jit
def store_y(
    x, mean, rstd, scale, bias_ptr, bias, y_ptr, bits_ptr, rows, start, M, N, lower, upper,
    ROUNDS_XHAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y, and the bitmask if there is one, of the tile x (ROWS, BLOCK) that begins at column ``start``."""
    cols = start + tl.arange(0, BLOCK)
    z = (x - mean[:, None]) * rstd[:, None]
    if ROUNDS_XHAT:
        z = z.to(y_ptr.dtype.element_ty).to(tl.float32)
    z *= scale[None, :]
    if bias_ptr is not None:
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
    ZERO_CENTERED: tl.constexpr, ROUNDS_XHAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows. bias_ptr, mean_ptr, bits_ptr, residual_ptr, sum_ptr are None if the op has none."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    first_cols = tl.arange(0, BLOCK)
    n = tl.full((ROWS,), N, tl.float32)
    end = N
    if WHOLE:  # no loop is left, and the weight is asked for with the rows
        end = BLOCK
        scale = load_scale(weight_ptr, first_cols, N, ZERO_CENTERED)
        bias = load_bias(bias_ptr, first_cols, N)

    first = load_sum(
        x_ptr, residual_ptr, sum_ptr, rows, first_cols, x_stride, residual_stride, N, here & (first_cols < N)[None, :]
    )
    total = first
    if mean_ptr is not None or residual_ptr is not None:
        for start in range(BLOCK, end, BLOCK):
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
    for start in range(BLOCK, end, BLOCK):
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
    store_y(
        first, mean, rstd, scale, bias_ptr, bias, y_ptr, bits_ptr, rows, 0, M, N, lower, upper, ROUNDS_XHAT, ROWS, BLOCK
    )
    for start in range(BLOCK, end, BLOCK):
        cols = start + first_cols
        x = load_tile(x_ptr, rows, cols, x_stride, here & (cols < N)[None, :])
        scale = load_scale(weight_ptr, cols, N, ZERO_CENTERED)
        bias = load_bias(bias_ptr, cols, N)
        store_y(
            x, mean, rstd, scale, bias_ptr, bias, y_ptr, bits_ptr, rows, start, M, N, lower, upper,
            ROUNDS_XHAT, ROWS, BLOCK,
        )  # fmt: skip


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int, clamped: bool = False) -> Tile:
    """The tile for rows of N elements."""
    if on_gpu and clamped and N > CLAMPED_COLUMNS:
        return Tile(rows=1, block=CLAMPED_COLUMNS // 2 if N <= 2 * CLAMPED_COLUMNS else CLAMPED_COLUMNS, warps=8)
    if on_gpu and N > MAX_BLOCK:
        return WIDE
    per_warp = ELEMENTS // 2 if clamped else ELEMENTS
    return tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, per_warp=per_warp, max_block=max_block)


@cache
def hold(N: int, itemsize: int, element_bytes: int) -> Hold | None:
    """How rows of N elements of at most ``itemsize`` bytes are held; None if they are not.

    ``element_bytes``: those of an element of x and one of the residual, if any.
    """
    if N < HELD_FROM:
        return None
    warps = power_of_two(ceil_div(N * itemsize, 32 * THREAD_BYTES))
    if warps <= MOST_WARPS:
        return Hold(warps=warps)
    blocks = power_of_two(ceil_div(N * itemsize, PART_BYTES))
    if blocks > MOST_BLOCKS:
        return None
    shared = Hold(warps=8, blocks=blocks)
    held = shared.pieces(N, itemsize) * shared.piece_bytes // itemsize * element_bytes
    return replace(shared, stages=2) if held == UNASKED else shared


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    centered: bool = True,
    zero_centered: bool = False,
    rounds_xhat: bool = False,
    clips: tuple[float, float] | None = None,
    residual: Tensor | None = None,
    max_block: int = MAX_BLOCK,
    how: Tile | Hold | None = None,
) -> dict[str, Tensor]:
    """Normalise the rows of x (M, N), last stride 1, by weight (N,) and bias (N,), each of which may be None.

    ``centered``: subtract the mean; ``zero_centered``: scale by 1 + weight; ``rounds_xhat``: before that, to x's
    dtype; ``clips``: (lower, upper) of a clamp.
    ``residual`` (M, N), last stride 1, in a dtype of its own, is added to x first; the sum is rounded to that dtype, is
    what is normed, and is returned as residual_out. It goes with no clips.
    ``how``: in place of the tile, or the hold, that is chosen for N.
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
        if how is None and x.is_cuda and room_on(x.device) and can_hold(N, x, *added):
            how = hold(N, itemsize, sum(matrix.element_size() for matrix in (x, *added)))
        t = how or _tile(M, N, on_gpu=x.is_cuda, max_block=max_block, clamped=bool(clips))
        strides = (x.stride(0), None if residual is None else residual.stride(0))
        arguments = (
            x, weight, bias, y, mean, rstd, bitmask, residual, sums, *strides, M, N, eps, *(clips or (0.0, 0.0))
        )  # fmt: skip
        if isinstance(t, Hold):
            from normcheck.impls.kernels.held import held_forward_kernel

            launch(
                held_forward_kernel, (M,), *arguments[:9], None, *strides, 0, *arguments[11:],
                ZERO_CENTERED=zero_centered, ROUNDS_XHAT=rounds_xhat, **t.constants(N, itemsize),
            )  # fmt: skip
        else:
            launch(
                forward_kernel, (ceil_div(M, t.rows),), *arguments,
                ZERO_CENTERED=zero_centered, ROUNDS_XHAT=rounds_xhat, ROWS=t.rows, BLOCK=t.block, WHOLE=t.block >= N,
                num_warps=t.warps,
            )  # fmt: skip
    outputs = {"y": y, "residual_out": sums, "mean": mean, "rstd": rstd, "bitmask": bitmask}
    return {name: tensor for name, tensor in outputs.items() if tensor is not None}
