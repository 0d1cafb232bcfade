# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A backward of layernorm whose programs add to shared sums of dw and db under locks, with and without its barrier.

Every program computes its rows' dx and adds their share of dw and db to the fp32 sums of its group, of which there are
``GROUPS``; a lock in global memory lets one program of a group in at a time. One thread releases it, so that all
threads have to have stored by then: that is what the barrier before it is for. In which order the programs come is
free, and so are the last bits of dw and db. On a CPU, ``interpreter.enable()`` comes before the import.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck.kernels.backward import load_statistics
from normcheck.kernels.forward import load_scale, load_tile
from normcheck.kernels.tiles import tile

GROUPS = 8
WARPS = 32
"""Few locks and many warps: without the barrier an H200 then lost a share in 2 of 10 runs at (8192, 2048), in 5 of 10
at (8192, 8192); with 64 locks and 8 warps in none of 100 at (8192, 2048)."""
MAX_N = 8192
"""A program holds whole rows, in one block."""


@triton.jit
def locked_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, locks_ptr, dy_stride, x_stride, M, N,
    GROUPS: tl.constexpr, BARRIER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, and its share of one group's sums of dw and db. One program: ROWS whole rows."""
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
    dw = tl.sum(dy * xhat, axis=0)
    db = tl.sum(dy, axis=0)

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


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    mean: Tensor,
    rstd: Tensor,
    barrier: bool,
    bitmask: None = None,
    zero_centered: bool = False,
) -> dict[str, Tensor]:
    """Gradients of layernorm: dx (M, N), dw and db (N,), from dy and x (M, N), N <= MAX_N, mean and rstd (M,)."""
    M, N = x.shape
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    dw, db = torch.zeros((2, GROUPS, N), dtype=torch.float32, device=x.device)
    if M:
        t = tile(M, N, on_gpu=x.is_cuda, elements=1, max_block=MAX_N)  # on a GPU a row a program: many want a lock
        locks = torch.zeros(GROUPS, dtype=torch.int32, device=x.device)
        locked_kernel[(triton.cdiv(M, t.rows),)](
            dy, x, weight, mean.contiguous(), rstd.contiguous(), dx, dw, db, locks, dy.stride(0), x.stride(0), M, N,
            GROUPS=GROUPS, BARRIER=barrier, ROWS=t.rows, BLOCK=t.block, num_warps=WARPS,
        )  # fmt: skip
    return {"dx": dx, "dw": dw.sum(0).to(weight.dtype), "db": db.sum(0).to(bias.dtype)}
