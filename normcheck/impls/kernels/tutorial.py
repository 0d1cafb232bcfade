# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The algorithm of Triton's LayerNorm tutorial, rewritten. On a CPU, call ``interpreter.enable()`` before.

Forward: one program a row, which goes over its columns three times. Backward: one program a row, which adds its share
of dw and db to one of ``groups`` partial sums; a lock in global memory lets one program of a group in at a time. A
second kernel sums the groups. The partial sums are kept in the dtype of x, as the tutorial keeps them: in half
precision every row is rounded before it is added, and so is every sum.

One thread releases the lock, so all threads must have stored by then: the barrier before it ensures that. The tutorial
got its barrier late. The programs come in any order, so the last bits of dw and db may differ from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.impls.kernels.backward import load_statistics, sum_groups
from normcheck.impls.kernels.forward import load_scale, load_tile
from normcheck.impls.kernels.tiles import ceil_div, tile

MAX_BYTES = 65536
"""A row has at most so many: a backward's program holds it in one block."""


@triton.jit
def rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, x_stride, N, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """y, mean and rstd. One program: a row, BLOCK columns at a time."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    block = tl.arange(0, BLOCK)

    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        total += tl.load(x_ptr + start + block, mask=start + block < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N

    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + start + block, mask=start + block < N, other=0.0).to(tl.float32)
        centred = tl.where(start + block < N, x - mean, 0.0)
        squares += centred * centred
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    for start in range(0, N, BLOCK):
        cols = start + block
        w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        b = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + cols, (x - mean) * rstd * w + b, mask=cols < N)


@triton.jit
def locked_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, locks_ptr, dy_stride, x_stride, M, N,
    GROUPS: tl.constexpr, BARRIER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, and a program's share of one group's sums of dw and db, in their dtype. One program: ROWS whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    n = tl.full((ROWS,), N, tl.float32)
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, rows, M, ROWS)
    dy = load_tile(dy_ptr, rows, cols, dy_stride, mask)
    xhat = tl.where(mask, (load_tile(x_ptr, rows, cols, x_stride, mask) - mean[:, None]) * rstd[:, None], 0.0)
    wdy = dy * load_scale(weight_ptr, cols, N, False)[None, :]
    c1 = tl.div_rn(tl.sum(xhat * wdy, axis=1), n)
    c2 = tl.div_rn(tl.sum(wdy, axis=1), n)
    dx = (wdy - (xhat * c1[:, None] + c2[:, None])) * rstd[:, None]
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)
    dw = tl.sum(dy * xhat, axis=0).to(dw_ptr.dtype.element_ty)
    db = tl.sum(dy, axis=0).to(db_ptr.dtype.element_ty)

    group = tl.program_id(0) % GROUPS
    here = group * N + cols
    while tl.atomic_cas(locks_ptr + group, 0, 1) == 1:
        pass
    dw += tl.load(dw_ptr + here, mask=cols < N, other=0.0)
    db += tl.load(db_ptr + here, mask=cols < N, other=0.0)
    tl.store(dw_ptr + here, dw, mask=cols < N)
    tl.store(db_ptr + here, db, mask=cols < N)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(locks_ptr + group, 0)


def forward(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> dict[str, Tensor]:
    """Normalise the rows of x (M, N), last stride 1, by weight and bias (N,): y as x, packed; mean, rstd (M,) fp32."""
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    mean, rstd = torch.empty((2, M), dtype=torch.float32, device=x.device)
    if M:
        block = min(triton.next_power_of_2(N), MAX_BYTES // x.element_size())
        rows_kernel[(M,)](
            x, weight, bias, y, mean, rstd, x.stride(0), N, eps, BLOCK=block, num_warps=min(max(block // 256, 1), 8)
        )
    return {"y": y, "mean": mean, "rstd": rstd}


def groups_of(N: int) -> int:
    """How many partial sums of dw and db the tutorial keeps for rows of N columns: more if these are short."""
    return 256 if N <= 1024 else 128 if N <= 4096 else 96 if N <= 8192 else 64


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    mean: Tensor,
    rstd: Tensor,
    barrier: bool,
    partial: torch.dtype | None = None,
    groups: int | None = None,
    warps: int | None = None,
    many_rows: bool = False,
) -> dict[str, Tensor]:
    """Gradients of layernorm: dx (M, N) as x, dw and db (N,) as weight, from dy and x (M, N), mean and rstd (M,).

    A row has at most ``MAX_BYTES``. ``partial``: the dtype of the partial sums, None: that of x. ``groups``, ``warps``:
    None: as in the tutorial. ``many_rows``: several to a program on a CPU, where a program costs milliseconds.
    """
    M, N = x.shape
    groups = groups or groups_of(N)
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    sums = {"dw": torch.empty_like(weight), "db": torch.empty_like(bias)}
    parts = {name: torch.zeros((groups, N), dtype=partial or x.dtype, device=x.device) for name in sums}
    if M:
        t = tile(M, N, on_gpu=x.is_cuda or not many_rows, elements=1, max_block=MAX_BYTES)
        locks = torch.zeros(groups, dtype=torch.int32, device=x.device)
        locked_kernel[(ceil_div(M, t.rows),)](
            dy, x, weight, mean.contiguous(), rstd.contiguous(), dx, parts["dw"], parts["db"], locks,
            dy.stride(0), x.stride(0), M, N,
            GROUPS=groups, BARRIER=barrier, ROWS=t.rows, BLOCK=t.block,
            num_warps=warps or min(max(t.block // 256, 1), 8),
        )  # fmt: skip
    sum_groups(parts, sums)
    return {"dx": dx, **sums}
