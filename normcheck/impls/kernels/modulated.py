# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of modulated norms. On a CPU, call ``interpreter.enable()`` before you import this.

    mean = sum(x) / N                            (rmsnorm: 0)
    rstd = 1 / sqrt(sum((x - mean)^2) / N + eps)
    y    = (x - mean) * rstd * (1 + scale) + shift

    wdy    = dy * (1 + scale),  c1 = sum(xhat * wdy) / N,  c2 = sum(wdy) / N        (rmsnorm: c2 = 0)
    dx     = (wdy - (xhat * c1 + c2)) * rstd
    dscale = sum over the rows of a sample of dy * xhat,  dshift = that of dy

After a residual, s = residual + gate * x is normed, rounded as it is stored. With ``added``, the cotangent of s:

    ds = (dx above) + added,  dresidual = ds,  dx = gate * ds,  dgate = sum over the rows of a sample of ds * x

scale, shift and gate of a row are those of its sample, row // S, whatever tile the row is in: S need not fill one. fp32
inside, one rounding at each store. What has rows has a row stride of its own, what samples have has one. The sums of
samples are those of groups of their rows, then over these, each in a fixed order: no atomics. Samples of few rows
are no work for a program: there the terms of every row are stored, and then added up. Wide rows are held (``held``).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels import backward as plain_backward
from normcheck.impls.kernels import forward as plain_forward
from normcheck.impls.kernels.backward import TILES, WIDE, load_statistics, sum_groups
from normcheck.impls.kernels.forward import load_sum, load_tile
from normcheck.impls.kernels.gated import TILES as GATED_TILES
from normcheck.impls.kernels.holds import Hold, can_hold, room_on
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import ROW_COUNTS, Tile, ceil_div, group_rows, loading, tile, turns

MAX_BLOCK = 8192
"""Columns of the widest rows that one program holds; wider ones are read again."""

ELEMENTS = 2048
"""Elements for each program on a GPU, if rows are narrower; those of the gradients, which loop, are of ``TILES``."""

FEW_ROWS = 16
"""Samples of fewer rows are not summed by a program each."""

MOST_HELD = 65535
"""Samples whose rows are held in the backward: so many programs a grid has along its second axis."""

LOADED = 3
"""What is loaded in each turn of the gradients' loop: x, dy and scale; as many more after a residual."""

_COUNTS = (*ROW_COUNTS, "S", "B")


@triton.jit
def load_factor(scale_ptr, rows, cols, S, stride, mask):
    """1 + scale of the sample of each row, a tile (ROWS, BLOCK) in fp32."""
    return 1.0 + load_tile(scale_ptr, rows // S, cols, stride, mask)


@triton.jit
def store_y(x, mean, rstd, scale_ptr, shift_ptr, y_ptr, rows, cols, S, stride, N, mask):
    """y of the tile x (ROWS, BLOCK)."""
    y = (x - mean[:, None]) * rstd[:, None] * load_factor(scale_ptr, rows, cols, S, stride, mask)
    y += load_tile(shift_ptr, rows // S, cols, stride, mask)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y, mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def modulated_kernel(
    x_ptr, scale_ptr, shift_ptr, y_ptr, mean_ptr, rstd_ptr, residual_ptr, sum_ptr, gate_ptr,
    x_stride, residual_stride, stride, M, N, S, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows, the first BLOCK columns of which stay in registers. mean_ptr: None if rmsnorm;
    residual_ptr, sum_ptr and gate_ptr: None if no residual is added.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    first_cols = tl.arange(0, BLOCK)
    first_mask = here & (first_cols < N)[None, :]
    first = load_sum(
        x_ptr, residual_ptr, sum_ptr, rows, first_cols, x_stride, residual_stride, N, first_mask, gate_ptr, S, stride
    )
    n = tl.full((ROWS,), N, tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    total = first
    if mean_ptr is not None or residual_ptr is not None:
        for start in range(BLOCK, N, BLOCK):
            cols = start + first_cols
            mask = here & (cols < N)[None, :]
            total += load_sum(
                x_ptr, residual_ptr, sum_ptr, rows, cols, x_stride, residual_stride, N, mask, gate_ptr, S, stride
            )
    if residual_ptr is not None:  # from here on the stored sum is read, which other threads may have stored
        tl.debug_barrier()
        x_ptr, x_stride = sum_ptr, N
    if mean_ptr is not None:
        mean = tl.div_rn(tl.sum(total, axis=1), n)
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    centered = tl.where(first_mask, first - mean[:, None], 0.0)
    squares = centered * centered
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        centered = tl.where(mask, load_tile(x_ptr, rows, cols, x_stride, mask) - mean[:, None], 0.0)
        squares += centered * centered
    variance = tl.div_rn(tl.sum(squares, axis=1), n)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    store_y(first, mean, rstd, scale_ptr, shift_ptr, y_ptr, rows, first_cols, S, stride, N, first_mask)
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        x = load_tile(x_ptr, rows, cols, x_stride, mask)
        store_y(x, mean, rstd, scale_ptr, shift_ptr, y_ptr, rows, cols, S, stride, N, mask)


@triton.jit
def load_terms(dy_ptr, x_ptr, scale_ptr, mean, rstd, rows, cols, dy_stride, x_stride, stride, S, mask):
    """dy, xhat and dy * (1 + scale), each a tile (ROWS, BLOCK), 0 where masked."""
    dy = load_tile(dy_ptr, rows, cols, dy_stride, mask)
    x = load_tile(x_ptr, rows, cols, x_stride, mask)
    xhat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
    return dy, xhat, dy * load_factor(scale_ptr, rows, cols, S, stride, mask)


@triton.jit(do_not_specialize=_COUNTS)
def modulated_row_sums_kernel(
    dy_ptr, x_ptr, scale_ptr, mean_ptr, rstd_ptr, c1_ptr, c2_ptr, dy_stride, x_stride, stride, M, N, S,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c1 and c2 (M,) fp32 of rows wider than a block. One program: ROWS whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, rows, M, ROWS)
    sum1 = tl.zeros((ROWS, BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        _dy, xhat, wdy = load_terms(
            dy_ptr, x_ptr, scale_ptr, mean, rstd, rows, cols, dy_stride, x_stride, stride, S, mask
        )
        sum1 += xhat * wdy
        sum2 += wdy
    n = tl.full((ROWS,), N, tl.float32)
    tl.store(c1_ptr + rows, tl.div_rn(tl.sum(sum1, axis=1), n), mask=rows < M)
    tl.store(c2_ptr + rows, tl.div_rn(tl.sum(sum2, axis=1), n), mask=rows < M)


@triton.jit(do_not_specialize=_COUNTS)
def modulated_gradients_kernel(
    dy_ptr, x_ptr, scale_ptr, mean_ptr, rstd_ptr, c1_ptr, c2_ptr, dx_ptr, dscale_ptr, dshift_ptr,
    added_ptr, dresidual_ptr, source_ptr, gate_ptr, dgate_ptr,
    dy_stride, x_stride, added_stride, source_stride, stride, M, N, S, group_rows, groups,
    SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and the sums of dscale and dshift of one group of rows. One program: BLOCK columns of group_rows rows.

    With SUMS a sample has ``groups`` of them; else dscale_ptr and dshift_ptr get the terms of each row. c1_ptr is None
    if a block holds whole rows. x is what is normed, source what the gate multiplies; these, from added_ptr to
    dgate_ptr, are None if no residual is added.
    """
    group = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.full((ROWS,), N, tl.float32)
    dscale = tl.zeros((ROWS, BLOCK), tl.float32)
    dshift = tl.zeros((ROWS, BLOCK), tl.float32)
    dgate = tl.zeros((ROWS, BLOCK), tl.float32)
    if SUMS:
        sample = group // groups
        first = sample * S + (group % groups) * group_rows
        last = tl.minimum(first + group_rows, (sample + 1) * S)
    else:
        first = group * group_rows
        last = tl.minimum(first + group_rows, M)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & (cols < N)[None, :]
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, rows, last, ROWS)
        dy, xhat, wdy = load_terms(
            dy_ptr, x_ptr, scale_ptr, mean, rstd, rows, cols, dy_stride, x_stride, stride, S, mask
        )
        c2 = tl.zeros((ROWS,), tl.float32)
        if c1_ptr is None:
            c1 = tl.div_rn(tl.sum(xhat * wdy, axis=1), n)
            if mean_ptr is not None:
                c2 = tl.div_rn(tl.sum(wdy, axis=1), n)
        else:
            c1 = tl.load(c1_ptr + rows, mask=rows < last, other=0.0)
            if mean_ptr is not None:
                c2 = tl.load(c2_ptr + rows, mask=rows < last, other=0.0)
        at = rows[:, None] * N + cols[None, :]
        dx = (wdy - (xhat * c1[:, None] + c2[:, None])) * rstd[:, None]
        if gate_ptr is not None:
            dx += load_tile(added_ptr, rows, cols, added_stride, mask)
            tl.store(dresidual_ptr + at, dx, mask=mask)
            of_gate = dx * load_tile(source_ptr, rows, cols, source_stride, mask)
            if SUMS:
                dgate += of_gate
            else:
                tl.store(dgate_ptr + at, of_gate, mask=mask)
            dx *= load_tile(gate_ptr, rows // S, cols, stride, mask)
        tl.store(dx_ptr + at, dx, mask=mask)
        if SUMS:
            dscale += dy * xhat
            dshift += dy
        else:
            tl.store(dscale_ptr + at, dy * xhat, mask=mask)
            tl.store(dshift_ptr + at, dy, mask=mask)
    if SUMS:
        tl.store(dscale_ptr + group * N + cols, tl.sum(dscale, axis=0), mask=cols < N)
        tl.store(dshift_ptr + group * N + cols, tl.sum(dshift, axis=0), mask=cols < N)
        if gate_ptr is not None:
            tl.store(dgate_ptr + group * N + cols, tl.sum(dgate, axis=0), mask=cols < N)


@triton.jit(do_not_specialize=_COUNTS)
def sum_parts_kernel(parts_ptr, out_ptr, B, groups, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum parts (B, groups, N) fp32 over the groups of each sample, in their order. One program: ROWS samples."""
    samples = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (samples < B)[:, None] & (cols < N)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for group in range(groups):
        total += load_tile(parts_ptr, samples * groups + group, cols, N, mask)
    tl.store(out_ptr + samples[:, None] * N + cols[None, :], total, mask=mask)


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int) -> Tile:
    return tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block)


@cache
def _gradients_tile(M: int, N: int, *, on_gpu: bool, max_block: int, itemsize: int, loaded: int) -> Tile:
    chosen = TILES if loaded == LOADED else GATED_TILES
    t = tile(M, N, on_gpu=on_gpu, elements=2 * ELEMENTS, max_block=max_block, chosen=chosen, wide=WIDE)
    return loading(t, loaded, itemsize)


def forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float,
    centered: bool,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    max_block: int = MAX_BLOCK,
    how: Hold | None = None,
) -> dict[str, Tensor]:
    """Norm the rows of x (M, N) and modulate them by scale and shift (B, N), of one row stride; each has M / B rows.

    With a ``residual`` (M, N), in a dtype of its own, and ``gate`` (B, N), in the dtype and with the row stride of
    scale, what is normed is residual + gate * x, as it is stored in the dtype of the residual: residual_out.
    Returns y (M, N) in the dtype of x, rstd (M,) in fp32, if it is ``centered`` mean (M,), and residual_out (M, N).
    ``max_block``: a limit in place of MAX_BLOCK; ``how``: in place of the hold that is chosen for N.
    """
    (M, N), B = x.shape, scale.shape[0]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    names = ("rstd", "mean") if centered else ("rstd",)
    saved = {name: torch.empty((M,), dtype=torch.float32, device=x.device) for name in names}
    sums = None if residual is None else torch.empty((M, N), dtype=residual.dtype, device=x.device)
    rows = (x,) if residual is None else (x, residual)
    sizes = [matrix.element_size() for matrix in rows]
    if how is None and x.is_cuda and room_on(x.device) and can_hold(N, *rows):
        how = plain_forward.hold(N, max(sizes), sum(sizes))
    statistics = (y, saved.get("mean"), saved["rstd"])
    strides = (x.stride(0), None if residual is None else residual.stride(0), scale.stride(0))
    if M and how is not None:
        from normcheck.impls.kernels.held import held_forward_kernel

        launch(
            held_forward_kernel, (M,), x, scale, shift, *statistics, None, residual, sums, gate,
            *strides, M // B, N, eps, 0.0, 0.0, ZERO_CENTERED=True, ROUNDS_XHAT=False, **how.constants(N, max(sizes)),
        )  # fmt: skip
    elif M:
        t = _tile(M, N, on_gpu=x.is_cuda, max_block=max_block)
        launch(
            modulated_kernel, (ceil_div(M, t.rows),), x, scale, shift, *statistics, residual, sums, gate,
            *strides, M, N, M // B, eps, ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
        )  # fmt: skip
    return {"y": y, **saved} if sums is None else {"y": y, "residual_out": sums, **saved}


def backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    *,
    rstd: Tensor,
    mean: Tensor | None,
    source: Tensor | None = None,
    gate: Tensor | None = None,
    added: Tensor | None = None,
    max_block: int = MAX_BLOCK,
    few_rows: int = FEW_ROWS,
    how: Hold | None = None,
) -> dict[str, Tensor]:
    """Gradients from dy and x (M, N), last stride 1, scale (B, N) and the saved rstd and mean (M,), None of an rmsnorm.

    Returns dx (M, N) in the dtype of x, and dscale and dshift (B, N) in that of scale, 0 if M == 0. ``few_rows``: a
    limit in place of FEW_ROWS; ``how``: in place of the hold that is chosen for N, if samples have more rows.
    After a residual, x is residual_out, ``source`` (M, N) what ``gate``, as of forward, has multiplied, and ``added``
    (M, N) the cotangent of residual_out, in its dtype; returns dx in the dtype of source, dresidual in that of x, and
    dresidual_gate as dscale.
    """
    (M, N), B = x.shape, scale.shape[0]
    summed = source is not None
    dx = torch.empty((M, N), dtype=x.dtype if source is None else source.dtype, device=x.device)
    names = ("dscale", "dshift", "dresidual_gate") if summed else ("dscale", "dshift")
    make = torch.empty if M else torch.zeros
    sums = make((len(names), B, N), dtype=scale.dtype, device=x.device)
    out = {"dx": dx, **dict(zip(names, sums, strict=True))}
    if summed:
        out["dresidual"] = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if not M:
        return out
    S, rstd, mean = M // B, rstd.contiguous(), None if mean is None else mean.contiguous()
    rows, by_sample = [matrix for matrix in (dy, x, added, source) if matrix is not None], few_rows <= S
    itemsize = max(matrix.element_size() for matrix in rows)
    t = _gradients_tile(M, N, on_gpu=x.is_cuda, max_block=max_block, itemsize=itemsize, loaded=LOADED * (1 + summed))
    if how is None and by_sample and B <= MOST_HELD and x.is_cuda and room_on(x.device) and can_hold(N, *rows):
        with_sum = {"with_residual": summed, "with_gate": summed}
        how = plain_backward.hold(N, itemsize, scale.element_size(), with_bias=True, **with_sum)
    per_group = group_rows(S, t.rows, max(t.groups // B, 1)) if by_sample else t.rows
    groups = ceil_div(S, per_group) if by_sample else S
    if how is not None:
        groups = turns(S, 1, max(how.groups // B, 1))
    programs = B * groups if by_sample else ceil_div(M, per_group)
    parts = sums
    if groups > 1:
        parts = torch.empty((len(names), B * groups, N), dtype=torch.float32, device=x.device)
    each, strides = parts.unbind(), (dy.stride(0), x.stride(0), scale.stride(0))
    of_sum = (added, out["dresidual"], source, gate, each[2]) if summed else (None,) * 5
    own_strides = [None if matrix is None else matrix.stride(0) for matrix in (added, source)]
    shared = {"ROWS": t.rows, "BLOCK": t.block, "num_warps": t.warps}
    c1 = c2 = None
    if t.block < N and how is None:
        c1, c2 = torch.empty((2, M), dtype=torch.float32, device=x.device)
        grid = (ceil_div(M, t.rows),)
        launch(modulated_row_sums_kernel, grid, dy, x, scale, mean, rstd, c1, c2, *strides, M, N, S, **shared)
    if how is not None:
        from normcheck.impls.kernels.held import held_gradients_kernel

        launch(
            held_gradients_kernel, (groups, B), dy, x, scale, mean, rstd, None, dx, *each[:2], *of_sum,
            *strides[:2], *own_strides, strides[2], S, N, ZERO_CENTERED=True, ROUNDS_XHAT=False,
            GATE=0, SIGMOID=False, **how.looped(N, itemsize),
        )  # fmt: skip
    else:
        launch(
            modulated_gradients_kernel, (programs, ceil_div(N, t.block)),
            dy, x, scale, mean, rstd, c1, c2, dx, *each[:2], *of_sum,
            *strides[:2], *own_strides, strides[2], M, N, S, per_group, groups,
            SUMS=by_sample, **shared, STAGES=t.stages,
        )  # fmt: skip
    if groups == 1:
        return out
    parts, sums, samples = parts.flatten(0, 1), sums.flatten(0, 1), len(names) * B
    if by_sample:  # a sample has many groups, and there are few samples
        sum_groups({"": parts}, {"": sums}, samples=samples)
    else:
        s = _tile(samples, N, on_gpu=x.is_cuda, max_block=max_block)
        grid, size = (ceil_div(samples, s.rows), ceil_div(N, s.block)), {"ROWS": s.rows, "BLOCK": s.block}
        launch(sum_parts_kernel, grid, parts, sums, samples, groups, N, **size, num_warps=s.warps)
    return out
