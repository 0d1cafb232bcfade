# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Backward Triton kernels, but for ops that round xhat. On a CPU call ``interpreter.enable()`` before you import this.

    xhat = (x - mean) * rstd,  wdy = dy * w      (dy zero where the bitmask is; zero-centered: 1 + w)
    c1   = sum(xhat * wdy) / N,  c2 = sum(wdy) / N        (rmsnorm: c2 = 0)
    dx   = (wdy - (xhat * c1 + c2)) * rstd
    dw   = sum over rows of dy * xhat,  db = sum over rows of dy

After a residual, x above is the stored sum, and the sum's own cotangent, ``added``, is added to dx before the store:
that is the gradient of both summands, which is stored once, or twice if they differ in dtype.

Everything is fp32 until the store. dw and db are summed per group of rows into a (groups, N) buffer, then over the
groups, each in a fixed order: no atomics, the same bits on every run. Rows of up to ``MAX_BLOCK`` columns are read once
from memory, and on a GPU those that ``held`` has room for; for other rows a first kernel computes c1 and c2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from normcheck.impls.kernels.forward import load_scale, load_tile
from normcheck.impls.kernels.holds import MOST_BLOCKS, Hold, can_hold, fitting, room_on
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import ROW_COUNTS, Tile, ceil_div, power_of_two, tile, tiles, turns

MAX_BLOCK = 8192
"""x, dy, w and the sums of dw and db of a block stay in registers."""

ELEMENTS = 4096
"""Elements for each program on a GPU, if rows are narrower than those of ``TILES``."""

TILES = tiles(
    *(Tile(rows=4096 // block, block=block, warps=4, stages=3, groups=264) for block in (256, 512, 1024)),
    *(Tile(rows=8192 // block, block=block, warps=8, stages=3, groups=132) for block in (2048, 4096, 8192)),
)
"""32 elements to a thread, eight warps to a multiprocessor. Chosen from some 30 each on an H100."""

WIDE = Tile(rows=2, block=1024, warps=4)

HELD_FROM = MAX_BLOCK + 1
"""Columns of the narrowest rows that are held, if they are aligned."""

MOST_COLUMNS = 16384
"""Columns of a row that a block has at most."""

NARROW, MIDDLE, TWO_ROWS = 10240, 12288, 14336
"""Columns of a block that 8 warps hold, which leave less of five pieces empty; those that 16 warps hold if there is a
bias; those of which two rows are held."""

CLUSTERS = {1: 132, 2: 66, 4: 60, 8: 30}
"""Blocks of a cluster -> programs. An H100 has multiprocessors for 30 clusters of four at a time, or more."""

SUMS = Tile(rows=256, block=16, warps=8)
"""The tile of the sum over groups on a GPU: few columns, so that all of the GPU takes part, and few turns of the loop,
each of which waits. Seven others took as long on an H200, within the spread."""


@triton.jit
def load_bits(bits_ptr, rows, start, M, N, BLOCK: tl.constexpr):
    """The bytes (ROWS, BLOCK // 8) of the bitmask of BLOCK columns from ``start`` on."""
    width = (N + 7) // 8
    at = start // 8 + tl.arange(0, BLOCK // 8)
    here = (rows < M)[:, None] & (at < width)[None, :]
    return tl.load(bits_ptr + rows[:, None] * width + at[None, :], mask=here, other=0)


@triton.jit
def cleared(dy, byte, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dy (ROWS, BLOCK), zero where its bit is zero."""
    bits = (byte[:, :, None] >> tl.arange(0, 8).to(tl.uint8)[None, None, :]) & 1
    return tl.where(tl.reshape(bits, (ROWS, BLOCK)) != 0, dy, 0.0)


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, rows, M, ROWS: tl.constexpr):
    """mean and rstd (ROWS,) as they were saved; a mean of 0 if the op has none."""
    mean = tl.zeros((ROWS,), tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    return mean, tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)


@triton.jit(do_not_specialize=ROW_COUNTS)
def row_sums_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, bits_ptr, c1_ptr, c2_ptr, dy_stride, x_stride, M, N,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c1 and c2 (M,) fp32 of rows wider than a block. One program: ROWS whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, rows, M, ROWS)
    sum1 = tl.zeros((ROWS, BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = load_tile(x_ptr, rows, cols, x_stride, mask)
        wdy = load_tile(dy_ptr, rows, cols, dy_stride, mask)
        if bits_ptr is not None:
            wdy = cleared(wdy, load_bits(bits_ptr, rows, start, M, N, BLOCK), ROWS, BLOCK)
        wdy *= load_scale(weight_ptr, cols, N, ZERO_CENTERED)[None, :]
        if mean_ptr is not None:
            x -= mean[:, None]
            sum2 += wdy
        sum1 += tl.where(mask, x * rstd[:, None], 0.0) * wdy
    n = tl.full((ROWS,), N, tl.float32)
    tl.store(c1_ptr + rows, tl.div_rn(tl.sum(sum1, axis=1), n), mask=rows < M)
    tl.store(c2_ptr + rows, tl.div_rn(tl.sum(sum2, axis=1), n), mask=rows < M)


@triton.jit(do_not_specialize=ROW_COUNTS)
def gradients_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, bits_ptr, c1_ptr, c2_ptr, dx_ptr, dw_ptr, db_ptr,
    added_ptr, dresidual_ptr, dy_stride, x_stride, added_stride, M, N,
    ZERO_CENTERED: tl.constexpr, ROUNDS_XHAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and one group's sums of dw and db. One program: BLOCK columns of ROWS rows, and of all that are so many
    tiles on as there are programs.

    c1_ptr is None if a block holds whole rows, dw_ptr if there is no weight, db_ptr if there is no bias, added_ptr if
    there is no residual, dresidual_ptr if dx is its gradient too.
    """
    group = tl.program_id(0).to(tl.int64)
    left = tl.program_id(1) * BLOCK
    cols = left + tl.arange(0, BLOCK)
    scale = load_scale(weight_ptr, cols, N, ZERO_CENTERED)
    n = tl.full((ROWS,), N, tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    if bits_ptr is not None:  # a turn ahead: copies of single bytes are not made early
        byte = load_bits(bits_ptr, group * ROWS + tl.arange(0, ROWS), left, M, N, BLOCK)
    for start in tl.range(group * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, rows, M, ROWS)
        x = load_tile(x_ptr, rows, cols, x_stride, mask)
        dy = load_tile(dy_ptr, rows, cols, dy_stride, mask)
        if bits_ptr is not None:
            dy = cleared(dy, byte, ROWS, BLOCK)
            byte = load_bits(bits_ptr, rows + tl.num_programs(0) * ROWS, left, M, N, BLOCK)
        if mean_ptr is not None:
            x -= mean[:, None]
        xhat = tl.where(mask, x * rstd[:, None], 0.0)
        wdy = dy * scale[None, :]
        c2 = tl.zeros((ROWS,), tl.float32)
        if c1_ptr is None:
            c1 = tl.div_rn(tl.sum(xhat * wdy, axis=1), n)
            if mean_ptr is not None:
                c2 = tl.div_rn(tl.sum(wdy, axis=1), n)
        else:
            c1 = tl.load(c1_ptr + rows, mask=rows < M, other=0.0)
            if mean_ptr is not None:
                c2 = tl.load(c2_ptr + rows, mask=rows < M, other=0.0)
        along = xhat * c1[:, None]
        if mean_ptr is not None:
            along += c2[:, None]
        dx = (wdy - along) * rstd[:, None]
        if added_ptr is not None:
            dx += load_tile(added_ptr, rows, cols, added_stride, mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)
        if ROUNDS_XHAT:
            xhat = xhat.to(dx_ptr.dtype.element_ty).to(tl.float32)
        dw += dy * xhat
        if db_ptr is not None:
            db += dy
    if dw_ptr is not None:
        tl.store(dw_ptr + group * N + cols, tl.sum(dw, axis=0), mask=cols < N)
    if db_ptr is not None:
        tl.store(db_ptr + group * N + cols, tl.sum(db, axis=0), mask=cols < N)


@triton.jit(do_not_specialize=ROW_COUNTS)
def sum_groups_kernel(
    parts_ptr, out_ptr, bias_parts_ptr, bias_out_ptr, groups, N,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum parts (samples, groups, N) fp32 over the groups, ROWS at a time, into out (samples, N).

    Those of the bias too, if not None. One program: BLOCK columns of one sample. EARLY: it may start before the kernel
    that writes parts has ended, and waits for it.
    """
    if EARLY:
        gdc_wait()
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(1).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, groups, ROWS):
        rows = sample * groups + start + tl.arange(0, ROWS)
        mask = (rows < (sample + 1) * groups)[:, None] & (cols < N)[None, :]
        total += load_tile(parts_ptr, rows, cols, N, mask)
        if bias_parts_ptr is not None:
            bias_total += load_tile(bias_parts_ptr, rows, cols, N, mask)
    out_ptr += sample * N
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)
    if bias_parts_ptr is not None:
        tl.store(bias_out_ptr + sample * N + cols, tl.sum(bias_total, axis=0), mask=cols < N)


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int) -> Tile:
    return tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block, chosen=TILES, wide=WIDE)


@cache
def hold(
    N: int,
    itemsize: int,
    weight_itemsize: int,
    *,
    with_bias: bool,
    with_residual: bool = False,
    with_bits: bool = False,
    with_gate: bool = False,
) -> Hold | None:
    """How rows of N elements of ``itemsize`` bytes are held, with weights of ``weight_itemsize``; None if they are not.

    The sums of dw and db stay in registers, of which 16 warps have too few for both of many columns. With a bitmask,
    which takes more instructions, 8 warps are slower still.
    ``weight_itemsize``: 0 without a weight. ``with_gate``: of the residual; it has sums of its own.
    """
    blocks = power_of_two(ceil_div(N, MOST_COLUMNS >> with_gate))
    if N < HELD_FROM or blocks > MOST_BLOCKS:
        return None
    columns = ceil_div(N, blocks)
    warps = 8 if columns <= NARROW or (with_bias and columns > MIDDLE and not with_bits) else 16
    wanted = Hold(
        warps=warps,
        blocks=blocks,
        stages=2 if columns <= TWO_ROWS or with_bits else 1,
        groups=CLUSTERS[blocks],
        shared=MOST_COLUMNS,
    )
    return fitting(wanted, N, itemsize, weight_itemsize, matrices=2 + with_residual + with_gate)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mean: Tensor | None,
    rstd: Tensor,
    bitmask: Tensor | None = None,
    zero_centered: bool = False,
    rounds_xhat: bool = False,
    added: Tensor | None = None,
    max_block: int = MAX_BLOCK,
    how: Tile | Hold | None = None,
) -> dict[str, Tensor]:
    """Gradients from dy and x (M, N), last stride 1, with the saved mean (None: rmsnorm), rstd (M,) and bitmask.

    Returns dx (M, N) in dy's dtype and, with a weight, dw (N,) in its dtype and, with a bias, db (N,) in its. M == 0
    gives dw = db = 0.
    ``added`` (M, N): the cotangent of residual_out, in the dtype of x, which is residual_out then; returns dresidual
    (M, N) in that dtype as well, the same tensor as dx if both dtypes are one.
    ``max_block``: a limit in place of MAX_BLOCK; ``how``: in place of the tile, or the hold, that is chosen for N.
    """
    M, N = x.shape
    gradients = {"dx": torch.empty((M, N), dtype=dy.dtype, device=x.device)}
    if added is not None:
        same = added.dtype == dy.dtype
        gradients["dresidual"] = gradients["dx"] if same else torch.empty((M, N), dtype=added.dtype, device=x.device)
    make = torch.empty_like if M else torch.zeros_like
    sums = {name: make(t) for name, t in (("dw", weight), ("db", bias)) if t is not None}
    if not M:
        return {**gradients, **sums}
    matrices = (x, dy) if added is None else (x, dy, added)
    itemsize = max(matrix.element_size() for matrix in matrices)
    if how is None and x.is_cuda and room_on(x.device) and can_hold(N, *matrices):
        facts = {
            "with_bias": bias is not None, "with_residual": added is not None, "with_bits": bitmask is not None
        }  # fmt: skip
        how = hold(N, itemsize, 0 if weight is None else weight.element_size(), **facts)
    t = how or _tile(M, N, on_gpu=x.is_cuda, max_block=max_block)
    groups = turns(M, 1 if isinstance(t, Hold) else t.rows, t.groups)
    parts = sums
    if groups > 1:
        parts = {name: torch.empty((groups, N), dtype=torch.float32, device=x.device) for name in sums}
    own = gradients.get("dresidual")
    stored = (gradients["dx"], parts.get("dw"), parts.get("db"), added, None if own is gradients["dx"] else own)
    strides = (dy.stride(0), x.stride(0), None if added is None else added.stride(0))
    saved = [None if s is None else s.contiguous() for s in (mean, rstd, bitmask)]
    if isinstance(t, Hold):
        from normcheck.impls.kernels.held import held_gradients_kernel

        launch(
            held_gradients_kernel, (groups,), dy, x, weight, *saved, *stored, None, None, None, *strides, None, 0, M, N,
            ZERO_CENTERED=zero_centered, ROUNDS_XHAT=rounds_xhat, GATE=0, SIGMOID=False, **t.looped(N, itemsize),
        )  # fmt: skip
    else:
        shared = {"ZERO_CENTERED": zero_centered, "ROWS": t.rows, "BLOCK": t.block, "num_warps": t.warps}
        c1 = c2 = None
        if t.block < N:
            c1, c2 = torch.empty((2, M), dtype=torch.float32, device=x.device)
            launch(
                row_sums_kernel, (ceil_div(M, t.rows),),
                dy, x, weight, *saved, c1, c2, *strides[:2], M, N, **shared,
            )  # fmt: skip
        launch(
            gradients_kernel, (groups, ceil_div(N, t.block)),
            dy, x, weight, *saved, c1, c2, *stored, *strides, M, N, **shared, ROUNDS_XHAT=rounds_xhat,
            STAGES=t.stages,
        )  # fmt: skip
    if groups > 1 and sums:
        sum_groups(parts, sums)
    return {**gradients, **sums}


def sum_groups(parts: Mapping[str, Tensor], sums: Mapping[str, Tensor], samples: int = 1) -> None:
    """Sum parts (samples * groups, N) fp32 over the groups of each sample into sums (samples, N), in a fixed order.

    ``parts`` and ``sums``: one or two of each, of the same names.
    """
    first, second = (*parts, "")[:2]
    groups, N = parts[first].shape[0] // samples, parts[first].shape[1]
    on_gpu, device = parts[first].is_cuda, parts[first].device
    t = tile(groups, N, on_gpu=False, elements=ELEMENTS, max_block=MAX_BLOCK)
    if on_gpu:
        rows = min(SUMS.rows, power_of_two(groups))
        t = replace(SUMS, rows=rows, block=min(SUMS.rows * SUMS.block // rows, SUMS.rows))
    early = on_gpu and _starts_early(device)
    launch(
        sum_groups_kernel, (ceil_div(N, t.block), samples),
        parts[first], sums[first], parts.get(second), sums.get(second), groups, N,
        ROWS=t.rows, BLOCK=t.block, EARLY=early, num_warps=t.warps, launch_pdl=early,
    )  # fmt: skip


@cache
def _starts_early(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it ends, which saves 1.6 us on an H200."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
