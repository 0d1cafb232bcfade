# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RUF005  (Triton joins tuples with a plus)
"""Kernels for wide rows, which are held in shared memory until they are done with. In Gluon: on a GPU only.

The formulas are those of ``forward``, ``backward``, ``gated`` and ``modulated``. A row is in PIECES pieces, of which
each thread has VECTOR columns, 16 bytes. The widest rows are shared by a cluster of blocks, each on a multiprocessor: a
piece (BLOCKS, LANES) has a part for each block, and the blocks tell each other their sums.

The forward has a program for each row. It asks for all of it at once, and other programs on the multiprocessor compute
meanwhile. Rows begin in their order, so that the memory in use at any time lies together: on an H100 it is faster by
some percent than where each program has rows of its own.

The backward sums dw, so its programs take one row after another. Asynchronous copies bring the next rows into rings of
shared memory, one ring with STAGES slots for each piece, so that each row comes once from memory and always some are on
their way. The first SHARED pieces of the weight are kept in shared memory; others are read again for each row,
from the L1 cache if it has room.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from normcheck.impls.kernels.clusters import in_registers, in_shared_memory, meet, over_blocks
from normcheck.impls.kernels.tiles import ROW_COUNTS

AFTER, BEFORE = gl.constexpr(1), gl.constexpr(2)
"""A gate that comes after the norm, or before it; 0: there is none."""


@gluon.jit
def _rings(ptr, PIECES: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr):
    """A ring for each piece. They are separate allocations, or the compiler would put a barrier between two copies."""
    BLOCKS: gl.constexpr = gl.num_ctas()
    flat: gl.constexpr = in_shared_memory(BLOCKS)
    rings = ()
    for _ in gl.static_range(PIECES):
        rings = rings + (gl.allocate_shared_memory(ptr.dtype.element_ty, [STAGES, BLOCKS, LANES], flat),)
    return rings


@gluon.jit
def _begin_copy(ring, slot, ptr, stride, row, last, cols, N):
    """Begin to copy a piece of a row into a slot; nothing if there is no such row."""
    async_copy.async_copy_global_to_shared(ring.index(slot), ptr + row * stride + cols, mask=(cols < N) & (row < last))


@gluon.jit
def _begin_copies(i: gl.constexpr, matrices, slot, row, last, cols, N):
    """Begin to copy piece i of a row of each matrix, as one group; ``matrices``: its rings, pointer and stride."""
    for j in gl.static_range(len(matrices)):
        _begin_copy(matrices[j][0][i], slot, matrices[j][1], matrices[j][2], row, last, cols, N)
    async_copy.commit_group()


@gluon.jit
def _keep(ptr, lanes, N, SHARED: gl.constexpr, PIECE: gl.constexpr):
    """The first SHARED pieces of a vector (N,), in shared memory; none if ptr is None."""
    flat: gl.constexpr = in_shared_memory(gl.num_ctas())
    kept = ()
    for i in gl.static_range(SHARED if ptr is not None else 0):
        cols = lanes + i * PIECE
        part = gl.load(ptr + cols, mask=cols < N, other=0.0)
        kept = kept + (gl.allocate_shared_memory(ptr.dtype.element_ty, lanes.shape, flat, part),)
    return kept


@gluon.jit
def _scale(
    i: gl.constexpr, ptr, kept, lanes, N, layout: gl.constexpr,
    ZERO_CENTERED: gl.constexpr, SHARED: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Piece i of the factor (N,) in fp32: w, or 1 + w; 1 if ptr is None."""
    if ptr is None:
        scale = gl.full(lanes.shape, 1.0, gl.float32, layout)
    else:
        if i < SHARED:
            scale = kept[i].load(layout).to(gl.float32)
        else:
            cols = lanes + i * PIECE
            scale = gl.load(ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        if ZERO_CENTERED:
            scale = 1.0 + scale
    return scale


@gluon.jit
def _eights(values):
    """A piece (BLOCKS, LANES) as its columns share a byte of the bitmask, (BLOCKS, LANES / 8, 8)."""
    return gl.reshape(values, (values.shape[0], values.shape[1] // 8, 8))


@gluon.jit
def _load_bits(ptr, row, last, lanes, N, PIECES: gl.constexpr, PIECE: gl.constexpr):
    """The bytes of the bitmask of a row's pieces; none if ptr is None."""
    found = ()
    for i in gl.static_range(PIECES if ptr is not None else 0):
        left = gl.min(_eights(lanes + i * PIECE), axis=2)
        at = ptr + row * (N // 8) + left // 8
        found = found + (gl.load(at, mask=(left < N) & (row < last), other=0),)
    return found


@gluon.jit
def _dy(i: gl.constexpr, ring, slot, found, lanes, layout: gl.constexpr):
    """Piece i of dy in fp32, 0 where its bit is 0; ``found``: the bytes of the bitmask, or none."""
    dy = ring.index(slot).load(layout).to(gl.float32)
    if len(found) > 0:
        bits = found[i].to(gl.int32)[:, :, None] & _eights(1 << (lanes & 7))
        dy = gl.where(gl.convert_layout(gl.reshape(bits, lanes.shape), layout) != 0, dy, 0.0)
    return dy


@gluon.jit
def _gated(x, dy, gate, GATE: gl.constexpr, SIGMOID: gl.constexpr):
    """What is normed, the cotangent of the norm, the gate's activation and its slope; the formulas of ``gated``."""
    h = x
    own = dy
    a = 0.0
    slope = 0.0
    if GATE:
        s = 1.0 / (1.0 + gl.exp(-gate))
        a = s if SIGMOID else gate * s
        slope = s * (1.0 - s) if SIGMOID else s * (1.0 + gate * (1.0 - s))
        if GATE == BEFORE:
            h = x * a
        else:
            own = dy * a
    return h, own, a, slope


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit(do_not_specialize=ROW_COUNTS)
def held_gradients_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, bits_ptr, dx_ptr, dw_ptr, db_ptr, added_ptr, dresidual_ptr,
    source_ptr, gate_ptr, dgate_ptr, dy_stride, x_stride, added_stride, source_stride, weight_stride, M, N,
    ZERO_CENTERED: gl.constexpr, ROUNDS_XHAT: gl.constexpr, GATE: gl.constexpr, SIGMOID: gl.constexpr,
    PIECES: gl.constexpr, VECTOR: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """dx, and one group's sums of dw and db. One program: a row, and each that is so many on as there are programs of
    the sample. A sample is M rows with one weight, which is ``weight_stride`` behind that of the one before.

    mean_ptr is None for rmsnorm, bits_ptr if there is no bitmask, db_ptr if there is no bias, added_ptr if there is no
    residual, dresidual_ptr if dx is its gradient too. With a GATE these two are the gate and its gradient. source_ptr
    is what a gate of samples, gate_ptr, multiplied before the residual was added, None if there was no such. The first
    pass over a row sums c1 and c2, the second reads the same slots again. They are filled anew when the second pass has
    read all of the row or, if there is but one stage, piece by piece, which takes more barriers.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = gl.num_ctas()
    LANES: gl.constexpr = 32 * WARPS * VECTOR
    PIECE: gl.constexpr = BLOCKS * LANES
    layout: gl.constexpr = in_registers(VECTOR, WARPS, BLOCKS)
    each: gl.constexpr = gl.SliceLayout(1, layout)
    x_rings = _rings(x_ptr, PIECES, STAGES, LANES)
    dy_rings = _rings(dy_ptr, PIECES, STAGES, LANES)
    matrices = ((x_rings, x_ptr, x_stride), (dy_rings, dy_ptr, dy_stride))
    if added_ptr is not None:
        added_rings = _rings(added_ptr, PIECES, STAGES, LANES)
        matrices = matrices + ((added_rings, added_ptr, added_stride),)
    if source_ptr is not None:
        source_rings = _rings(source_ptr, PIECES, STAGES, LANES)
        matrices = matrices + ((source_rings, source_ptr, source_stride),)

    sample = gl.program_id(1).to(gl.int64)
    step = gl.num_programs(0)
    first = sample * M + gl.program_id(0)
    last = sample * M + M
    if weight_ptr is not None:
        weight_ptr += sample * weight_stride
    if gate_ptr is not None:
        gate_ptr += sample * weight_stride
    ranks = gl.arange(0, BLOCKS, each)
    lanes = ranks[:, None] * LANES + gl.arange(0, LANES, gl.SliceLayout(0, layout))[None, :]
    for stage in gl.static_range(STAGES):
        ahead = first + stage * step
        for i in gl.static_range(PIECES):
            _begin_copies(i, matrices, stage, ahead, last, lanes + i * PIECE, N)
    kept = _keep(weight_ptr, lanes, N, SHARED, PIECE)
    dw = ()
    db = ()
    dgate = ()
    for _ in gl.static_range(PIECES):
        dw = dw + (gl.zeros([BLOCKS, LANES], gl.float32, layout),)
        if db_ptr is not None:
            db = db + (gl.zeros([BLOCKS, LANES], gl.float32, layout),)
        if gate_ptr is not None:
            dgate = dgate + (gl.zeros([BLOCKS, LANES], gl.float32, layout),)
    n = gl.full([BLOCKS], N, gl.float32, each)
    turn = gl.zeros([BLOCKS], gl.int32, each)
    place = meet(turn)

    next_bits = _load_bits(bits_ptr, first, last, lanes, N, PIECES, PIECE)
    next_rstd = gl.load(rstd_ptr + first)
    if mean_ptr is not None:
        next_mean = gl.load(mean_ptr + first)
    slot = 0
    for row in range(first, last, step):
        bits = next_bits
        next_bits = _load_bits(bits_ptr, row + step, last, lanes, N, PIECES, PIECE)
        rstd = next_rstd
        next_rstd = gl.load(rstd_ptr + row + step, mask=row + step < last, other=0.0)
        mean = 0.0
        if mean_ptr is not None:
            mean = next_mean
            next_mean = gl.load(mean_ptr + row + step, mask=row + step < last, other=0.0)

        sum1 = gl.zeros([BLOCKS, LANES], gl.float32, layout)
        sum2 = gl.zeros([BLOCKS, LANES], gl.float32, layout)
        if STAGES > 1:
            async_copy.wait_group((STAGES - 1) * PIECES)
        for i in gl.static_range(PIECES):
            if STAGES == 1:
                async_copy.wait_group(PIECES - 1 - i)
            scale = _scale(i, weight_ptr, kept, lanes, N, layout, ZERO_CENTERED, SHARED, PIECE)
            x = x_rings[i].index(slot).load(layout).to(gl.float32)
            dy = _dy(i, dy_rings[i], slot, bits, lanes, layout)
            if GATE:
                gate = added_rings[i].index(slot).load(layout).to(gl.float32)
                x, dy, _a, _slope = _gated(x, dy, gate, GATE, SIGMOID)
            xhat = (x - mean) * rstd
            if i == PIECES - 1:
                xhat = gl.where(lanes + i * PIECE < N, xhat, 0.0)
            wdy = dy * scale
            sum1 += xhat * wdy
            sum2 += wdy
        if mean_ptr is not None:
            c1, c2 = gl.reduce((sum1, sum2), 1, _add_pairs)
        else:
            c1 = gl.sum(sum1, axis=1)
            c2 = gl.zeros([BLOCKS], gl.float32, each)
        c1, c2 = over_blocks(c1, c2, place, turn)
        turn += 1
        c1 = gl.div_rn(c1, n)[:, None]
        c2 = gl.div_rn(c2, n)[:, None]

        more_dw = ()
        more_db = ()
        more_dgate = ()
        for i in gl.static_range(PIECES):
            cols = lanes + i * PIECE
            x = x_rings[i].index(slot).load(layout).to(gl.float32)
            dy = _dy(i, dy_rings[i], slot, bits, lanes, layout)
            added = 0.0
            if added_ptr is not None:
                added = added_rings[i].index(slot).load(layout).to(gl.float32)
            if source_ptr is not None:
                source = source_rings[i].index(slot).load(layout).to(gl.float32)
            if STAGES == 1:
                _begin_copies(i, matrices, slot, row + step, last, cols, N)
            scale = _scale(i, weight_ptr, kept, lanes, N, layout, ZERO_CENTERED, SHARED, PIECE)
            h, own, a, slope = _gated(x, dy, added, GATE, SIGMOID)
            xhat = (h - mean) * rstd
            dx = (own * scale - (xhat * c1 + c2)) * rstd
            second = dx
            if GATE == BEFORE:
                second = dx * x * slope
                dx *= a
            elif GATE:
                second = dy * (xhat * scale) * slope
            elif added_ptr is not None:
                dx += added
                second = dx
            if gate_ptr is not None:
                more_dgate = more_dgate + (dgate[i] + dx * source,)
                dx = dx * gl.load(gate_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
            if dresidual_ptr is not None:
                gl.store(dresidual_ptr + row * N + cols, second.to(dresidual_ptr.dtype.element_ty), mask=cols < N)
            gl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
            if ROUNDS_XHAT:
                xhat = xhat.to(dx_ptr.dtype.element_ty).to(gl.float32)
            more_dw = more_dw + (dw[i] + own * xhat,)
            if db_ptr is not None:
                more_db = more_db + (db[i] + own,)
        dw = more_dw
        db = more_db
        dgate = more_dgate
        if STAGES > 1:
            ahead = row + STAGES * step
            for i in gl.static_range(PIECES):
                _begin_copies(i, matrices, slot, ahead, last, lanes + i * PIECE, N)
            slot = (slot + 1) % STAGES
    async_copy.wait_group(0)

    group = sample * step + gl.program_id(0)
    for i in gl.static_range(PIECES):
        cols = lanes + i * PIECE
        if dw_ptr is not None:
            gl.store(dw_ptr + group * N + cols, dw[i].to(dw_ptr.dtype.element_ty), mask=cols < N)
        if db_ptr is not None:
            gl.store(db_ptr + group * N + cols, db[i].to(db_ptr.dtype.element_ty), mask=cols < N)
        if dgate_ptr is not None:
            gl.store(dgate_ptr + group * N + cols, dgate[i].to(dgate_ptr.dtype.element_ty), mask=cols < N)


@gluon.jit
def _sum(i: gl.constexpr, rings, residual_rings, residual_ptr, sum_ptr, gate_ptr, cols, N, layout: gl.constexpr):
    """Piece i of the row that is normed, in fp32: x, or its sum with a residual, rounded as it is stored."""
    x = rings[i].index(0).load(layout).to(gl.float32)
    if gate_ptr is not None:
        x *= gl.load(gate_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
    if residual_ptr is not None:
        x += residual_rings[i].index(0).load(layout).to(gl.float32)
        x = x.to(sum_ptr.dtype.element_ty).to(gl.float32)
    return x


@gluon.jit(do_not_specialize=ROW_COUNTS)
def held_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, bits_ptr, residual_ptr, sum_ptr, gate_ptr,
    x_stride, residual_stride, weight_stride, M, N, eps, lower, upper,
    ZERO_CENTERED: gl.constexpr, ROUNDS_XHAT: gl.constexpr, PIECES: gl.constexpr, VECTOR: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """y, mean, rstd, and the sum of x and the residual as it is stored, which is normed. One program: a row.

    bias_ptr, mean_ptr, bits_ptr, and residual_ptr with sum_ptr, are None if the op has none, as gate_ptr is, by which x
    is multiplied before that sum. Weight, bias and gate are those of the row's sample, as in ``held_gradients_kernel``.
    Of the STAGES the first is used.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = gl.num_ctas()
    LANES: gl.constexpr = 32 * WARPS * VECTOR
    PIECE: gl.constexpr = BLOCKS * LANES
    layout: gl.constexpr = in_registers(VECTOR, WARPS, BLOCKS)
    each: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.program_id(0).to(gl.int64)
    if weight_ptr is not None:
        weight_ptr += row // M * weight_stride
    if bias_ptr is not None:
        bias_ptr += row // M * weight_stride
    if gate_ptr is not None:
        gate_ptr += row // M * weight_stride
    ranks = gl.arange(0, BLOCKS, each)
    lanes = ranks[:, None] * LANES + gl.arange(0, LANES, gl.SliceLayout(0, layout))[None, :]
    rings = _rings(x_ptr, PIECES, STAGES, LANES)
    residual_rings = rings
    if residual_ptr is not None:
        residual_rings = _rings(residual_ptr, PIECES, 1, LANES)
    for i in gl.static_range(PIECES):
        _begin_copy(rings[i], 0, x_ptr, x_stride, row, row + 1, lanes + i * PIECE, N)
        if residual_ptr is not None:
            _begin_copy(residual_rings[i], 0, residual_ptr, residual_stride, row, row + 1, lanes + i * PIECE, N)
    async_copy.commit_group()
    n = gl.full([BLOCKS], N, gl.float32, each)
    turn = gl.zeros([BLOCKS], gl.int32, each)
    place = meet(turn)

    async_copy.wait_group(0)
    total = gl.zeros([BLOCKS, LANES], gl.float32, layout)
    for i in gl.static_range(PIECES):
        cols = lanes + i * PIECE
        x = _sum(i, rings, residual_rings, residual_ptr, sum_ptr, gate_ptr, cols, N, layout)
        if residual_ptr is not None:
            gl.store(sum_ptr + row * N + cols, x.to(sum_ptr.dtype.element_ty), mask=cols < N)
        total += x
    mean = gl.zeros([BLOCKS, 1], gl.float32, layout)
    if mean_ptr is not None:
        total, _ = over_blocks(gl.sum(total, axis=1), n, place, turn)
        turn += 1
        total = gl.div_rn(total, n)
        gl.store(mean_ptr + row + ranks, total, mask=ranks == 0)
        mean = total[:, None]

    squares = gl.zeros([BLOCKS, LANES], gl.float32, layout)
    for i in gl.static_range(PIECES):
        cols = lanes + i * PIECE
        centred = _sum(i, rings, residual_rings, residual_ptr, sum_ptr, gate_ptr, cols, N, layout) - mean
        if i == PIECES - 1:
            centred = gl.where(cols < N, centred, 0.0)
        squares += centred * centred
    total, _ = over_blocks(gl.sum(squares, axis=1), n, place, turn)
    deviation = gl.sqrt_rn(gl.div_rn(total, n) + eps)
    total = gl.div_rn(gl.full([BLOCKS], 1.0, gl.float32, each), deviation)
    gl.store(rstd_ptr + row + ranks, total, mask=ranks == 0)
    rstd = total[:, None]

    for i in gl.static_range(PIECES):
        cols = lanes + i * PIECE
        scale = _scale(i, weight_ptr, (), lanes, N, layout, ZERO_CENTERED, 0, PIECE)
        x = _sum(i, rings, residual_rings, residual_ptr, sum_ptr, gate_ptr, cols, N, layout)
        z = (x - mean) * rstd
        if ROUNDS_XHAT:
            z = z.to(y_ptr.dtype.element_ty).to(gl.float32)
        z *= scale
        if bias_ptr is not None:
            z += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        if bits_ptr is not None:
            inside = (z > lower) & (z < upper)
            packed = gl.sum(_eights(gl.where(inside, 1 << (lanes & 7), 0)), axis=2)
            left = gl.min(_eights(cols), axis=2)
            gl.store(bits_ptr + row * (N // 8) + left // 8, packed.to(gl.uint8), mask=left < N)
            z = gl.where(z < lower, lower, gl.where(z > upper, upper, z))  # NaN stays NaN
        gl.store(y_ptr + row * N + cols, z.to(y_ptr.dtype.element_ty), mask=cols < N)
