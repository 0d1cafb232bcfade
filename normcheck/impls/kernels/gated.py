# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of gated norms. On a CPU, call ``interpreter.enable()`` before you import this.

    a     = silu(gate), or sigmoid(gate)
    h     = x, or x * a if the gate comes before the norm
    rstd  = 1 / sqrt(sum(h^2) / N + eps)
    y     = h * rstd * w, times a if the gate comes after the norm

    own   = dy, times a if the gate comes after the norm
    wdy   = own * w,  c1 = sum(h * rstd * wdy) / N,  dh = (wdy - h * rstd * c1) * rstd
    after:   dx = dh,      dgate = dy * h * rstd * w * a'(gate)
    before:  dx = dh * a,  dgate = dh * x * a'(gate)
    dw    = sum over rows of own * h * rstd

fp32 inside, one rounding at each store. x, gate and dy have row strides of their own. The activation is computed again
in backward, which takes as long as its bytes would and saves them. dw is summed as in ``backward``, and wide rows are
held as there (``held``).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.backward import WIDE, hold, sum_groups
from normcheck.impls.kernels.forward import load_scale, load_tile
from normcheck.impls.kernels.holds import Hold, can_hold, room_on
from normcheck.impls.kernels.launch import launch
from normcheck.impls.kernels.tiles import ROW_COUNTS, Tile, ceil_div, loading, tile, tiles, turns

MAX_BLOCK = 8192
"""Columns of the widest rows that one program holds; wider ones are read twice."""

ELEMENTS = 2048
"""Elements for each program on a GPU, if rows are narrower."""

TILES = tiles(
    Tile(rows=4, block=512, warps=2, stages=3, groups=528),
    *(Tile(rows=2048 // block or 1, block=block, warps=8, stages=3, groups=264) for block in (1024, 2048, 4096)),
    Tile(rows=1, block=8192, warps=16, stages=3, groups=132),
)
"""Those of the gradients, whose programs loop over rows. Chosen from ten each on an H100."""


@triton.jit
def activation(z, SIGMOID: tl.constexpr):
    """The activation of z, and its slope, in fp32."""
    s = tl.sigmoid(z)
    if SIGMOID:
        a = s
        slope = s * (1.0 - s)
    else:
        a = z * s
        slope = s * (1.0 + z * (1.0 - s))
    return a, slope


@triton.jit
def load_gated(
    x_ptr, gate_ptr, rows, cols, x_stride, gate_stride, mask, BEFORE: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """The tile x (ROWS, BLOCK), what is normed of it, the activation and its slope; x is 0 where masked."""
    x = load_tile(x_ptr, rows, cols, x_stride, mask)
    a, slope = activation(load_tile(gate_ptr, rows, cols, gate_stride, mask), SIGMOID)
    h = x
    if BEFORE:
        h = x * a
    return x, h, a, slope


@triton.jit(do_not_specialize=ROW_COUNTS)
def gated_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, gate_stride, M, N, eps,
    BEFORE: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows, of which the first BLOCK columns stay in registers."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (rows < M)[:, None]
    first_cols = tl.arange(0, BLOCK)
    mask = here & (first_cols < N)[None, :]
    _x, first, first_a, _slope = load_gated(
        x_ptr, gate_ptr, rows, first_cols, x_stride, gate_stride, mask, BEFORE, SIGMOID
    )
    squares = first * first
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        _x, h, _a, _slope = load_gated(x_ptr, gate_ptr, rows, cols, x_stride, gate_stride, mask, BEFORE, SIGMOID)
        squares += h * h
    variance = tl.div_rn(tl.sum(squares, axis=1), tl.full((ROWS,), N, tl.float32))
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    store_gated(first, first_a, rstd, weight_ptr, y_ptr, rows, first_cols, M, N, BEFORE)
    for start in range(BLOCK, N, BLOCK):
        cols = start + first_cols
        mask = here & (cols < N)[None, :]
        _x, h, a, _slope = load_gated(x_ptr, gate_ptr, rows, cols, x_stride, gate_stride, mask, BEFORE, SIGMOID)
        store_gated(h, a, rstd, weight_ptr, y_ptr, rows, cols, M, N, BEFORE)


@triton.jit
def store_gated(h, a, rstd, weight_ptr, y_ptr, rows, cols, M, N, BEFORE: tl.constexpr):
    """y of the tile h (ROWS, BLOCK)."""
    y = h * rstd[:, None] * load_scale(weight_ptr, cols, N, False)[None, :]
    if not BEFORE:
        y *= a
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def load_cotangent(dy_ptr, weight_ptr, a, rows, cols, stride, N, mask, BEFORE: tl.constexpr):
    """dy, that of the norm, and that times the weight, each a tile (ROWS, BLOCK)."""
    dy = load_tile(dy_ptr, rows, cols, stride, mask)
    own = dy
    if not BEFORE:
        own = dy * a
    return dy, own, own * load_scale(weight_ptr, cols, N, False)[None, :]


@triton.jit(do_not_specialize=ROW_COUNTS)
def gated_row_sums_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, c1_ptr, dy_stride, x_stride, gate_stride, M, N,
    BEFORE: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c1 (M,) fp32 of rows wider than a block. One program: ROWS whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        _x, h, a, _slope = load_gated(x_ptr, gate_ptr, rows, cols, x_stride, gate_stride, mask, BEFORE, SIGMOID)
        _dy, _own, wdy = load_cotangent(dy_ptr, weight_ptr, a, rows, cols, dy_stride, N, mask, BEFORE)
        total += h * rstd[:, None] * wdy
    n = tl.full((ROWS,), N, tl.float32)
    tl.store(c1_ptr + rows, tl.div_rn(tl.sum(total, axis=1), n), mask=rows < M)


@triton.jit(do_not_specialize=ROW_COUNTS)
def gated_gradients_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, c1_ptr, dx_ptr, dgate_ptr, dw_ptr,
    dy_stride, x_stride, gate_stride, M, N,
    BEFORE: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, dgate, and one group's sum of dw. One program: BLOCK columns of ROWS rows, and of all that
    are so many tiles on as there are programs.

    c1_ptr is None if a block holds whole rows, dw_ptr if there is no weight.
    """
    group = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = load_scale(weight_ptr, cols, N, False)[None, :]
    n = tl.full((ROWS,), N, tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(group * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        x, h, a, slope = load_gated(x_ptr, gate_ptr, rows, cols, x_stride, gate_stride, mask, BEFORE, SIGMOID)
        dy, own, wdy = load_cotangent(dy_ptr, weight_ptr, a, rows, cols, dy_stride, N, mask, BEFORE)
        xhat = h * rstd
        if c1_ptr is None:
            c1 = tl.div_rn(tl.sum(xhat * wdy, axis=1), n)
        else:
            c1 = tl.load(c1_ptr + rows, mask=rows < M, other=0.0)
        dh = (wdy - xhat * c1[:, None]) * rstd
        if BEFORE:
            dx = dh * a
            dgate = dh * x * slope
        else:
            dx = dh
            dgate = dy * (xhat * scale) * slope
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)
        tl.store(dgate_ptr + rows[:, None] * N + cols[None, :], dgate, mask=mask)
        dw += own * xhat
    if dw_ptr is not None:
        tl.store(dw_ptr + group * N + cols, tl.sum(dw, axis=0), mask=cols < N)


_LOADED = 4
"""What is loaded in each turn of the backward's loop: x, dy, the gate and the weight."""


@cache
def _tile(M: int, N: int, *, on_gpu: bool, max_block: int) -> Tile:
    return tile(M, N, on_gpu=on_gpu, elements=ELEMENTS, max_block=max_block)


@cache
def _gradients_tile(M: int, N: int, *, on_gpu: bool, max_block: int, itemsize: int) -> Tile:
    t = tile(M, N, on_gpu=on_gpu, elements=2 * ELEMENTS, max_block=max_block, chosen=TILES, wide=WIDE)
    return loading(t, _LOADED, itemsize)


def forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    before: bool = False,
    sigmoid: bool = False,
    max_block: int = MAX_BLOCK,
) -> dict[str, Tensor]:
    """Norm and gate the rows of x (M, N) by gate (M, N), both of last stride 1, and weight (N,) or none.

    Returns y (M, N) in the dtype of x and rstd (M,) in fp32. ``max_block``: a limit in place of MAX_BLOCK.
    """
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    rstd = torch.empty((M,), dtype=torch.float32, device=x.device)
    if M:
        t = _tile(M, N, on_gpu=x.is_cuda, max_block=max_block)
        launch(
            gated_kernel, (ceil_div(M, t.rows),), x, gate, weight, y, rstd, x.stride(0), gate.stride(0), M, N, eps,
            BEFORE=before, SIGMOID=sigmoid, ROWS=t.rows, BLOCK=t.block, num_warps=t.warps,
        )  # fmt: skip
    return {"y": y, "rstd": rstd}


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    rstd: Tensor,
    before: bool = False,
    sigmoid: bool = False,
    max_block: int = MAX_BLOCK,
    how: Hold | None = None,
) -> dict[str, Tensor]:
    """Gradients from dy, x and gate (M, N), last stride 1, and the saved rstd (M,).

    Returns dx and dgate (M, N) in the dtype of x and, with a weight, dw (N,) in its dtype, 0 if M == 0.
    ``how``: in place of the hold that is chosen for N.
    """
    M, N = x.shape
    dx, dgate = (torch.empty((M, N), dtype=x.dtype, device=x.device) for _ in range(2))
    dw = None if weight is None else (torch.empty_like if M else torch.zeros_like)(weight)
    out = {"dx": dx, "dgate": dgate} if dw is None else {"dx": dx, "dgate": dgate, "dw": dw}
    if not M:
        return out
    itemsize = x.element_size()
    if how is None and x.is_cuda and room_on(x.device) and can_hold(N, x, dy, gate):
        how = hold(N, itemsize, 0 if weight is None else weight.element_size(), with_bias=False, with_residual=True)
    t = _gradients_tile(M, N, on_gpu=x.is_cuda, max_block=max_block, itemsize=itemsize)
    groups = turns(M, t.rows, t.groups) if how is None else turns(M, 1, how.groups)
    parts = dw
    if dw is not None and groups > 1:
        parts = torch.empty((groups, N), dtype=torch.float32, device=x.device)
    strides, rstd = (dy.stride(0), x.stride(0), gate.stride(0)), rstd.contiguous()
    if how is not None:
        from normcheck.impls.kernels.held import AFTER, BEFORE, held_gradients_kernel

        launch(
            held_gradients_kernel, (groups,), dy, x, weight, None, rstd, None, dx, parts, None, gate, dgate,
            None, None, None, *strides, None, 0, M, N, ZERO_CENTERED=False, ROUNDS_XHAT=False,
            GATE=(BEFORE if before else AFTER).value, SIGMOID=sigmoid, **how.looped(N, itemsize),
        )  # fmt: skip
    shared = {"BEFORE": before, "SIGMOID": sigmoid, "ROWS": t.rows, "BLOCK": t.block, "num_warps": t.warps}
    c1 = None
    if t.block < N and how is None:
        c1 = torch.empty((M,), dtype=torch.float32, device=x.device)
        grid = (ceil_div(M, t.rows),)
        launch(gated_row_sums_kernel, grid, dy, x, gate, weight, rstd, c1, *strides, M, N, **shared)
    if how is None:
        launch(
            gated_gradients_kernel, (groups, ceil_div(N, t.block)),
            dy, x, gate, weight, rstd, c1, dx, dgate, parts, *strides, M, N, **shared, STAGES=t.stages,
        )  # fmt: skip
    if dw is not None and parts is not None and groups > 1:
        sum_groups({"dw": parts}, {"dw": dw})
    return out
