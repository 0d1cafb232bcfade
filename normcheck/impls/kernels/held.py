# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RUF005  (Triton joins tuples with a plus)
"""Kernels for wide rows, which are held in shared memory until they are done with. In Gluon: on a GPU only.

The formulas are those of ``forward`` and ``backward``. A program takes the rows of one group, one after the other, in
PIECES pieces of VECTOR columns, 16 bytes, to a thread. Asynchronous copies bring the next rows into rings of shared
memory, one ring with STAGES slots for each piece, so that each row comes once from memory and always some are on their
way.

The first SHARED pieces of the weight, and of a bias, are kept in shared memory and the next HELD in registers; others
are read again for each row, from the L1 cache if it has room.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from normcheck.impls.kernels.tiles import ROW_COUNTS


@gluon.jit
def _rings(ptr, PIECES: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr):
    """A ring for each piece. They are separate allocations, or the compiler would put a barrier between two copies."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rings = ()
    for _ in gl.static_range(PIECES):
        rings = rings + (gl.allocate_shared_memory(ptr.dtype.element_ty, [STAGES, PIECE], flat),)
    return rings


@gluon.jit
def _begin_copy(ring, slot, ptr, stride, row, last, cols, N):
    """Begin to copy a piece of a row into a slot; nothing if there is no such row."""
    async_copy.async_copy_global_to_shared(ring.index(slot), ptr + row * stride + cols, mask=(cols < N) & (row < last))


@gluon.jit
def _keep(ptr, lanes, N, SHARED: gl.constexpr, HELD: gl.constexpr, PIECE: gl.constexpr):
    """The pieces of a vector (N,) that stay: SHARED in shared memory, then HELD in registers; none if ptr is None."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kept = ()
    for i in gl.static_range(SHARED + HELD if ptr is not None else 0):
        cols = lanes + i * PIECE
        part = gl.load(ptr + cols, mask=cols < N, other=0.0)
        if i < SHARED:
            kept = kept + (gl.allocate_shared_memory(ptr.dtype.element_ty, [PIECE], flat, part),)
        else:
            kept = kept + (part,)
    return kept


@gluon.jit
def _part(
    i: gl.constexpr, ptr, kept, lanes, N, layout: gl.constexpr,
    SHARED: gl.constexpr, HELD: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Piece i of a vector (N,), as fp32; ones if ptr is None."""
    if ptr is None:
        part = gl.full([PIECE], 1.0, gl.float32, layout)
    elif i < SHARED:
        part = kept[i].load(layout)
    elif i < SHARED + HELD:
        part = kept[i]
    else:
        cols = lanes + i * PIECE
        part = gl.load(ptr + cols, mask=cols < N, other=0.0)
    return part.to(gl.float32)


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit(do_not_specialize=ROW_COUNTS)
def held_gradients_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, added_ptr, dresidual_ptr,
    dy_stride, x_stride, added_stride, M, N, group_rows,
    ZERO_CENTERED: gl.constexpr, PIECES: gl.constexpr, VECTOR: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """dx, and one group's sums of dw and db. One program: group_rows rows.

    mean_ptr is None for rmsnorm, db_ptr if there is no bias, added_ptr if there is no residual, dresidual_ptr if dx is
    its gradient too. The first pass over a row sums c1 and c2, the second reads the same slots again. They are filled
    anew when the second pass has read all of the row or, if there is but one stage, piece by piece, which takes more
    barriers.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PIECE: gl.constexpr = 32 * WARPS * VECTOR
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [WARPS], [0])
    x_rings = _rings(x_ptr, PIECES, STAGES, PIECE)
    dy_rings = _rings(dy_ptr, PIECES, STAGES, PIECE)
    if added_ptr is not None:
        added_rings = _rings(added_ptr, PIECES, STAGES, PIECE)

    group = gl.program_id(0).to(gl.int64)
    first = group * group_rows
    last = gl.minimum(first + group_rows, M)
    lanes = gl.arange(0, PIECE, layout)
    for stage in gl.static_range(STAGES):
        for i in gl.static_range(PIECES):
            _begin_copy(x_rings[i], stage, x_ptr, x_stride, first + stage, last, lanes + i * PIECE, N)
            _begin_copy(dy_rings[i], stage, dy_ptr, dy_stride, first + stage, last, lanes + i * PIECE, N)
            if added_ptr is not None:
                _begin_copy(added_rings[i], stage, added_ptr, added_stride, first + stage, last, lanes + i * PIECE, N)
            async_copy.commit_group()
    kept = _keep(weight_ptr, lanes, N, SHARED, HELD, PIECE)
    dw = ()
    db = ()
    for _ in gl.static_range(PIECES):
        dw = dw + (gl.zeros([PIECE], gl.float32, layout),)
        if db_ptr is not None:
            db = db + (gl.zeros([PIECE], gl.float32, layout),)
    n = gl.to_tensor(N).to(gl.float32)

    next_rstd = gl.load(rstd_ptr + first)
    if mean_ptr is not None:
        next_mean = gl.load(mean_ptr + first)
    slot = 0
    for row in range(first, last):
        rstd = next_rstd
        next_rstd = gl.load(rstd_ptr + row + 1, mask=row + 1 < last, other=0.0)
        mean = 0.0
        if mean_ptr is not None:
            mean = next_mean
            next_mean = gl.load(mean_ptr + row + 1, mask=row + 1 < last, other=0.0)

        sum1 = gl.zeros([PIECE], gl.float32, layout)
        sum2 = gl.zeros([PIECE], gl.float32, layout)
        if STAGES > 1:
            async_copy.wait_group((STAGES - 1) * PIECES)
        for i in gl.static_range(PIECES):
            if STAGES == 1:
                async_copy.wait_group(PIECES - 1 - i)
            scale = _part(i, weight_ptr, kept, lanes, N, layout, SHARED, HELD, PIECE)
            if ZERO_CENTERED and weight_ptr is not None:
                scale = 1.0 + scale
            xhat = (x_rings[i].index(slot).load(layout).to(gl.float32) - mean) * rstd
            if i == PIECES - 1:
                xhat = gl.where(lanes + i * PIECE < N, xhat, 0.0)
            wdy = dy_rings[i].index(slot).load(layout).to(gl.float32) * scale
            sum1 += xhat * wdy
            sum2 += wdy
        if mean_ptr is not None:
            c1, c2 = gl.reduce((sum1, sum2), 0, _add_pairs)
            c2 = gl.div_rn(c2, n)
        else:
            c1 = gl.sum(sum1, axis=0)
            c2 = 0.0
        c1 = gl.div_rn(c1, n)

        more_dw = ()
        more_db = ()
        for i in gl.static_range(PIECES):
            cols = lanes + i * PIECE
            x = x_rings[i].index(slot).load(layout)
            dy = dy_rings[i].index(slot).load(layout)
            if added_ptr is not None:
                added = added_rings[i].index(slot).load(layout)
            if STAGES == 1:
                _begin_copy(x_rings[i], slot, x_ptr, x_stride, row + 1, last, cols, N)
                _begin_copy(dy_rings[i], slot, dy_ptr, dy_stride, row + 1, last, cols, N)
                if added_ptr is not None:
                    _begin_copy(added_rings[i], slot, added_ptr, added_stride, row + 1, last, cols, N)
                async_copy.commit_group()
            scale = _part(i, weight_ptr, kept, lanes, N, layout, SHARED, HELD, PIECE)
            if ZERO_CENTERED and weight_ptr is not None:
                scale = 1.0 + scale
            xhat = (x.to(gl.float32) - mean) * rstd
            dy = dy.to(gl.float32)
            dx = (dy * scale - (xhat * c1 + c2)) * rstd
            if added_ptr is not None:
                dx += added.to(gl.float32)
            if dresidual_ptr is not None:
                gl.store(dresidual_ptr + row * N + cols, dx.to(dresidual_ptr.dtype.element_ty), mask=cols < N)
            gl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
            more_dw = more_dw + (dw[i] + dy * xhat,)
            if db_ptr is not None:
                more_db = more_db + (db[i] + dy,)
        dw = more_dw
        db = more_db
        if STAGES > 1:
            for i in gl.static_range(PIECES):
                _begin_copy(x_rings[i], slot, x_ptr, x_stride, row + STAGES, last, lanes + i * PIECE, N)
                _begin_copy(dy_rings[i], slot, dy_ptr, dy_stride, row + STAGES, last, lanes + i * PIECE, N)
                if added_ptr is not None:
                    _begin_copy(added_rings[i], slot, added_ptr, added_stride, row + STAGES, last, lanes + i * PIECE, N)
                async_copy.commit_group()
            slot = (slot + 1) % STAGES
    async_copy.wait_group(0)

    for i in gl.static_range(PIECES):
        cols = lanes + i * PIECE
        if dw_ptr is not None:
            gl.store(dw_ptr + group * N + cols, dw[i].to(dw_ptr.dtype.element_ty), mask=cols < N)
        if db_ptr is not None:
            gl.store(db_ptr + group * N + cols, db[i].to(db_ptr.dtype.element_ty), mask=cols < N)


@gluon.jit(do_not_specialize=ROW_COUNTS)
def held_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, residual_ptr, sum_ptr,
    x_stride, residual_stride, M, N, eps, group_rows,
    ZERO_CENTERED: gl.constexpr, PIECES: gl.constexpr, VECTOR: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """y, mean, rstd, and the sum of x and the residual as it is stored, which is normed. One program: group_rows rows.

    bias_ptr, mean_ptr, and residual_ptr with sum_ptr, are None if the op has none.

    A row moves from its slots to registers, and the slots are filled anew while it is computed.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PIECE: gl.constexpr = 32 * WARPS * VECTOR
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [WARPS], [0])
    rings = _rings(x_ptr, PIECES, STAGES, PIECE)
    if residual_ptr is not None:
        residual_rings = _rings(residual_ptr, PIECES, STAGES, PIECE)

    first = gl.program_id(0).to(gl.int64) * group_rows
    last = gl.minimum(first + group_rows, M)
    lanes = gl.arange(0, PIECE, layout)
    for stage in gl.static_range(STAGES):
        for i in gl.static_range(PIECES):
            _begin_copy(rings[i], stage, x_ptr, x_stride, first + stage, last, lanes + i * PIECE, N)
            if residual_ptr is not None:
                _begin_copy(
                    residual_rings[i], stage, residual_ptr, residual_stride, first + stage, last, lanes + i * PIECE, N
                )
        async_copy.commit_group()
    kept = _keep(weight_ptr, lanes, N, SHARED, HELD, PIECE)
    if bias_ptr is not None:
        bias_kept = _keep(bias_ptr, lanes, N, SHARED, HELD, PIECE)
    n = gl.to_tensor(N).to(gl.float32)

    slot = 0
    for row in range(first, last):
        async_copy.wait_group(STAGES - 1)
        pieces = ()
        total = gl.zeros([PIECE], gl.float32, layout)
        for i in gl.static_range(PIECES):
            x = rings[i].index(slot).load(layout).to(gl.float32)
            if residual_ptr is not None:
                cols = lanes + i * PIECE
                residual = residual_rings[i].index(slot).load(layout).to(gl.float32)
                stored = (x + residual).to(sum_ptr.dtype.element_ty)
                gl.store(sum_ptr + row * N + cols, stored, mask=cols < N)
                x = stored.to(gl.float32)
            total += x
            pieces = pieces + (x,)
        for i in gl.static_range(PIECES):
            _begin_copy(rings[i], slot, x_ptr, x_stride, row + STAGES, last, lanes + i * PIECE, N)
            if residual_ptr is not None:
                _begin_copy(
                    residual_rings[i], slot, residual_ptr, residual_stride, row + STAGES, last, lanes + i * PIECE, N
                )
        async_copy.commit_group()
        slot = (slot + 1) % STAGES
        mean = 0.0
        if mean_ptr is not None:
            mean = gl.div_rn(gl.sum(total, axis=0), n)
            gl.store(mean_ptr + row, mean)

        squares = gl.zeros([PIECE], gl.float32, layout)
        for i in gl.static_range(PIECES):
            centred = pieces[i] - mean
            if i == PIECES - 1:
                centred = gl.where(lanes + i * PIECE < N, centred, 0.0)
            squares += centred * centred
        variance = gl.div_rn(gl.sum(squares, axis=0), n)
        rstd = gl.div_rn(gl.to_tensor(1.0), gl.sqrt_rn(variance + eps))
        gl.store(rstd_ptr + row, rstd)

        for i in gl.static_range(PIECES):
            cols = lanes + i * PIECE
            scale = _part(i, weight_ptr, kept, lanes, N, layout, SHARED, HELD, PIECE)
            if ZERO_CENTERED and weight_ptr is not None:
                scale = 1.0 + scale
            z = (pieces[i] - mean) * rstd * scale
            if bias_ptr is not None:
                z += _part(i, bias_ptr, bias_kept, lanes, N, layout, SHARED, HELD, PIECE)
            gl.store(y_ptr + row * N + cols, z.to(y_ptr.dtype.element_ty), mask=cols < N)
    async_copy.wait_group(0)
