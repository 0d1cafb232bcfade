# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""How the blocks of a cluster, each on a multiprocessor, share a row, and tell each other their sums. In Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MEET = gl.constexpr("""{
    .shared .align 16 .b8 meeting[144];
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 $0, meeting;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [$0], 1;
    @first mbarrier.init.shared::cta.b64 [$0+8], 1;
    @first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
}""")
"""Make a block's place to meet, whose address it returns, and say so to the others: two mbarriers, and for each of them
two sums of up to eight blocks."""

EXCHANGE = gl.constexpr("""{
    .reg .pred begins, first, peer, done;
    .reg .b32 odd, phase, bell, sums, own, there, rank, ranks, thread, bytes;
    .reg .f32 a, b;
    setp.eq.u32 begins, $5, 0;
    @begins barrier.cluster.wait.aligned;
    mov.u32 rank, %cluster_ctarank;
    mov.u32 ranks, %cluster_nctarank;
    mov.u32 thread, %tid.x;
    and.b32 odd, $5, 1;
    bfe.u32 phase, $5, 1, 1;
    mad.lo.u32 bell, odd, 8, $4;
    mad.lo.u32 sums, odd, 64, $4;
    add.u32 sums, sums, 16;
    mad.lo.u32 own, rank, 8, sums;
    mul.lo.u32 bytes, ranks, 8;
    setp.eq.u32 first, thread, 0;
    setp.lt.u32 peer, thread, ranks;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bell], bytes;
    @peer mapa.shared::cluster.u32 own, own, thread;
    @peer mapa.shared::cluster.u32 there, bell, thread;
    @peer st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [own], {$2, $3}, [there];
waits:
    mbarrier.try_wait.parity.shared::cta.b64 done, [bell], phase;
    @!done bra waits;
    mov.f32 $0, 0f00000000;
    mov.f32 $1, 0f00000000;
adds:
    ld.shared.v2.f32 {a, b}, [sums];
    add.f32 $0, $0, a;
    add.f32 $1, $1, b;
    add.u32 sums, sums, 8;
    sub.u32 ranks, ranks, 1;
    setp.ne.u32 peer, ranks, 0;
    @peer bra adds;
}""")
"""Send the sums $2 and $3 to each block of the cluster, wait for those of all, and add them up in the same order
everywhere. $4: the place; $5: how many exchanges there were, by which odd and even ones have a place each. A block that
sends for the next but one has the next of all others, who have read the present then. The first waits until all places
are made."""


@gluon.constexpr_function
def _split(blocks):
    return [[1 << i, 0] for i in range(blocks.bit_length() - 1)]


@gluon.constexpr_function
def in_registers(vector, warps, blocks):
    """The layout of a piece in registers."""
    return gl.BlockedLayout([1, vector], [1, 32], [1, warps], [1, 0], _split(blocks))


@gluon.constexpr_function
def in_shared_memory(blocks):
    """The layout of a piece in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], _split(blocks))


@gluon.jit
def meet(zeros):
    """The place where blocks exchange sums; ``zeros`` (BLOCKS,) is not used."""
    if gl.num_ctas() > 1:
        zeros = gl.inline_asm_elementwise(MEET, "=r,r", [zeros], dtype=gl.int32, is_pure=False, pack=1)
    return zeros


@gluon.jit
def over_blocks(a, b, place, turn):
    """Sums of a and b (BLOCKS,) over the blocks of the cluster, in each; ``turn``: how many exchanges there were."""
    if gl.num_ctas() > 1:
        a, b = gl.inline_asm_elementwise(
            EXCHANGE, "=&f,=&f,f,f,r,r", [a, b, place, turn], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
        )
    return a, b
