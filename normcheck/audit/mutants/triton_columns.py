"""Faults of our own Triton kernels along a row: masks of columns, blocks of columns, divisors.

On a CPU a fault runs interpreted, one program after the other. A store out of bounds overwrites whatever lies there, so
all of these stay within a padded row of the tensor.
"""

from __future__ import annotations

from normcheck.audit.mutants._patched import STORE_Y, Lines, patched
from normcheck.audit.mutants.kernel import RELU
from normcheck.audit.mutants.mutant import READ_BEYOND, STATS, UNWRITTEN, WRITTEN_BEYOND, implementations
from normcheck.cases.tensor_names import ROOT_FIRST

_ALL = ("", *ROOT_FIRST)
_LAYERNORM, _RMSNORM = ("layernorm",), ("rmsnorm",)
"""Interpreted kernels are slow, and the ops share lines: a faulty line is planted in one or two ops that run it."""

_N = "n = tl.full((ROWS,), N, tl.float32)"
_BLOCKS = "n = tl.full((ROWS,), BLOCK, tl.float32)"
_FIRST = "residual_stride, N, here & (first_cols < N)[None, :]\n    )"
_LATER = "residual_stride, N, here & (cols < N)[None, :]"

MUTANTS = (
    patched(
        "mF01.triton",
        what="padded columns add (0 - mean)^2 to the variance: tl.where is missing",
        source="linkedin/Liger-Kernel#519",
        forward=(
            Lines(
                old="centred = tl.where(here & (first_cols < N)[None, :], first - mean[:, None], 0.0)",
                new="centred = first - mean[:, None]",
            ),
        ),
        outputs=STATS,
        when="N is no power of two",
    ),
    patched(
        "mF02.triton",
        what="mean and variance are divided by the block's width, not by N",
        source="invented",
        forward=(Lines(old=_N, new=_BLOCKS),),
        ops=(*_LAYERNORM, *_RMSNORM),
        outputs=STATS,
        when="N is no power of two",
    ),
    patched(
        "mF15.triton",
        what="blocks of 64 columns, of which the mean leaves out the last where it is not full",
        source="invented",
        forward=(
            Lines(old="MAX_BLOCK = 16384", new="MAX_BLOCK = 64", harmless=True),
            Lines(old=_LATER, new=_LATER.replace("cols < N", "cols < N // BLOCK * BLOCK")),
        ),
        dtypes=("fp32",),
        outputs=STATS,
        when="N > 64",
    ),
    patched(
        "load-columns.triton",
        what="x is loaded without the mask of its columns: the sum takes what lies behind the row",
        source="invented",
        forward=(Lines(old=_FIRST, new=_FIRST.replace(" & (first_cols < N)[None, :]", "")),),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="N is no power of two",
    ),
    patched(
        "load-times-mask.triton",
        what="x is loaded without the mask of its columns and multiplied by it: NaN behind a row stays NaN",
        source="invented",
        forward=(
            Lines(
                old=_FIRST,
                new="residual_stride, N, here) * (first_cols < N)[None, :].to(tl.float32)",
            ),
        ),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="N is no power of two, and what lies behind a row is not finite",
    ),
    patched(
        "store-columns.triton",
        what="y is stored without the mask of its columns: into the next row, and behind y",
        source="flagos-ai/FlagGems#4984",
        forward=(Lines(old=STORE_Y, new=STORE_Y.replace("mask=mask", "mask=mask | (rows < M)[:, None]")),),
        outputs=("", "y"),
        kinds=WRITTEN_BEYOND,
        when="N is no power of two",
    ),
    patched(
        "no-other.triton",
        what="masked loads without other, whose zeros the sums rely on",
        source="invented",
        forward=(Lines(old="mask=mask, other=0.0", new="mask=mask"),),
        outputs=_ALL,
        when="N is no power of two, and a compiler that leaves the register as it was",
        device="cuda",
        not_exercised="no fault today: the interpreter and, in triton 3.6 and 3.7, the code for NVIDIA GPUs give 0",
    ),
    patched(
        "mB07.triton",
        what="the last byte of a row's bits is not stored where it is not full",
        source="invented",
        forward=(
            Lines(
                old="mask = (rows < M)[:, None] & (cols < width)", new="mask = (rows < M)[:, None] & (cols < N // 8)"
            ),
        ),
        ops=RELU,
        outputs=("bitmask",),
        kinds=UNWRITTEN,
        when="N % 8 != 0",
    ),
    patched(
        "mD03.triton",
        what="c1 and c2 are divided by the block's width, not by N",
        source="invented",
        backward=(Lines(old=_N, new=_BLOCKS, times=2),),
        outputs=("dx",),
        when="N is no power of two",
    ),
    patched(
        "mW12.triton",
        what="dw and db are not stored behind the last full 32 columns",
        source="invented",
        backward=(
            Lines(old="tl.sum(dw, axis=0), mask=cols < N)", new="tl.sum(dw, axis=0), mask=cols < N // 32 * 32)"),
            Lines(old="tl.sum(db, axis=0), mask=cols < N)", new="tl.sum(db, axis=0), mask=cols < N // 32 * 32)"),
        ),
        outputs=("dw", "db"),
        kinds=UNWRITTEN,
        when="N % 32 != 0",
    ),
    patched(
        "tail-block.triton",
        what="blocks of 64 columns, of which c1 and c2 leave out the last where it is not full",
        source="invented",
        backward=(
            Lines(old="MAX_BLOCK = 8192", new="MAX_BLOCK = 64", harmless=True),
            Lines(old="for start in range(0, N, BLOCK):", new="for start in range(0, N // BLOCK * BLOCK, BLOCK):"),
        ),
        dtypes=("fp32",),
        outputs=("dx",),
        when="N > 64",
    ),
    patched(
        "wide-tail.triton",
        what="c1 and c2 of a row wider than a block leave out its last block where that is not full",
        source="invented",
        backward=(
            Lines(old="for start in range(0, N, BLOCK):", new="for start in range(0, N // BLOCK * BLOCK, BLOCK):"),
        ),
        dtypes=("fp32",),
        outputs=("dx",),
        when="N > 8192",
        promised="ci",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
