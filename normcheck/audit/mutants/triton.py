"""Faults of real Triton kernels: our own with a few lines replaced, and the tutorial's kernel with locks.

On a CPU a fault runs interpreted, one program after the other. A store out of bounds overwrites whatever lies there, so
all of these stay within a padded row, or a few rows, of the tensor. Races, 32-bit overflows and refused launches show
on a GPU only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from normcheck.audit.mutants._patched import Lines, patched
from normcheck.audit.mutants.kernel import RELU
from normcheck.audit.mutants.mutant import STATS, VALUES, Mutant, implementations
from normcheck.cases.case import Case
from normcheck.cases.tensor_names import ROOT_FIRST
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import implementation
from normcheck.impls.triton_calls import own_kernels

_BEHIND = (*VALUES, "out_of_bounds_read")
_OVER = (*VALUES, "out_of_bounds_write")
_UNWRITTEN = (*VALUES, "unwritten")
_ALL = ("", *ROOT_FIRST)
_LAYERNORM, _RMSNORM = ("layernorm",), ("rmsnorm",)
"""Interpreted kernels are slow, and the ops share lines: a faulty line is planted in one or two ops that run it."""

_GROUPS = "M > 4, and no multiple of the 4 rows of a group"

_N = "n = tl.full((ROWS,), N, tl.float32)"
_BLOCKS = "n = tl.full((ROWS,), BLOCK, tl.float32)"
_FIRST = "residual_stride, N, here & (first_cols < N)[None, :]\n    )"
_LATER = "residual_stride, N, here & (cols < N)[None, :]"
_ROWS = "rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)"
_GROUP_ROWS = "rows = start + tl.arange(0, ROWS)\n        mask"
_STORE_Y = "tl.store(y_ptr + rows[:, None] * N + cols[None, :], z, mask=mask)"
_STORE_DX = "tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)"
_FULL_TILES = "mask=mask & (rows < M // ROWS * ROWS)[:, None])"
_PARTS = "torch.empty((groups, N)"
_GROUPS_OF_4 = Lines(
    old="t = how or _tile(M, N, on_gpu=x.is_cuda, max_block=max_block)\n"
    "    groups = turns(M, 1 if isinstance(t, Hold) else t.rows, t.groups)",
    new="t = tile(min(M, 4), N, on_gpu=x.is_cuda, elements=ELEMENTS, max_block=max_block)\n"
    "    groups = ceil_div(M, t.rows)",
    harmless=True,
)
"""Tiles and groups of at most 4 rows, so that a few rows make several groups."""


def _locked(name: str, op: str, *, barrier: bool) -> Implementation:
    """The tutorial's backward with locks, its sums in fp32, as an implementation of layernorm; the forward is ours.

    Few locks and many warps make the race show: without the barrier, an H200 lost a program's sums in 2 of 10 runs at
    (8192, 2048) and in 5 of 10 at (8192, 8192), but with 64 locks and 8 warps in none of 100 at (8192, 2048).
    """
    fixed = {"barrier": barrier, "groups": 8, "warps": 32, "many_rows": True}

    def backward(*tensors: Any, bitmask: None, zero_centered: bool, **statistics: Any) -> Any:
        import torch

        tutorial = import_module("normcheck.impls.kernels.tutorial")
        return tutorial.backward(*tensors, **statistics, **fixed, partial=torch.float32)

    def kernels(part: str) -> Any:
        return own_kernels(part) if part == "forward" else SimpleNamespace(backward=backward)

    source = "normcheck/impls/kernels/tutorial.py"
    made = implementation(op, name=name, kernels=kernels, source=source, supports=_one_block, deterministic=False)
    return replace(made, biases=(True,))


def _one_block(case: Case) -> str | None:
    return "a row is one block of at most 8192 columns" if case.N > 8192 else None


MUTANTS = (
    # Columns.
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
        kinds=_BEHIND,
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
        kinds=_BEHIND,
        when="N is no power of two, and what lies behind a row is not finite",
    ),
    patched(
        "store-columns.triton",
        what="y is stored without the mask of its columns: into the next row, and behind y",
        source="flagos-ai/FlagGems#4984",
        forward=(Lines(old=_STORE_Y, new=_STORE_Y.replace("mask=mask", "mask=mask | (rows < M)[:, None]")),),
        outputs=("", "y"),
        kinds=_OVER,
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
        kinds=_UNWRITTEN,
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
        kinds=_UNWRITTEN,
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
    # Rows.
    patched(
        "mR01.triton",
        what="a tile of rows that is not full does not store y",
        source="invented",
        forward=(Lines(old=_STORE_Y, new=_STORE_Y.replace("mask=mask)", _FULL_TILES)),),
        outputs=("y",),
        kinds=_UNWRITTEN,
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "mD13.triton",
        what="a tile of rows that is not full does not store dx",
        source="invented",
        backward=(Lines(old=_STORE_DX, new=_STORE_DX.replace("mask=mask)", _FULL_TILES)),),
        outputs=("dx",),
        kinds=_UNWRITTEN,
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "store-rows.triton",
        what="mean and rstd are stored without the mask of the rows: behind their end",
        source="invented",
        forward=(
            Lines(old="tl.store(mean_ptr + rows, mean, mask=rows < M)", new="tl.store(mean_ptr + rows, mean)"),
            Lines(old="tl.store(rstd_ptr + rows, rstd, mask=rows < M)", new="tl.store(rstd_ptr + rows, rstd)"),
        ),
        outputs=("", "mean", "rstd"),
        kinds=_OVER,
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "load-rows.triton",
        what="dy is loaded without the mask of the rows: db takes what lies behind the last one",
        source="invented",
        backward=(
            Lines(
                old="dy_stride, mask, left, M,",
                new="dy_stride, (cols < N)[None, :], left, M,",
            ),
        ),
        outputs=("dw", "db"),
        kinds=_BEHIND,
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "mW13.triton",
        what="the row index wraps, so that dw and db count rows twice",
        source="invented",
        backward=(
            Lines(
                old=_GROUP_ROWS,
                new=_GROUP_ROWS.replace("start + tl.arange(0, ROWS)", "(start + tl.arange(0, ROWS)) % M"),
            ),
        ),
        outputs=("dw", "db"),
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "mW14.triton",
        what="the row index stops at the last row, which dw and db count many times",
        source="invented",
        backward=(
            Lines(
                old=_GROUP_ROWS,
                new=_GROUP_ROWS.replace("start + tl.arange(0, ROWS)", "tl.minimum(start + tl.arange(0, ROWS), M - 1)"),
            ),
        ),
        outputs=("dw", "db"),
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "mD14.triton",
        what="c1 is the mean over a tile of rows, not over each row",
        source="flagos-ai/FlagGems#59",
        backward=(
            Lines(
                old="c1 = tl.div_rn(tl.sum(xhat * wdy, axis=1), n)",
                new="c1 = tl.zeros((ROWS,), tl.float32) + tl.sum(tl.sum(xhat * wdy, axis=1), axis=0) / (ROWS * N)",
            ),
        ),
        ops=_RMSNORM,
        outputs=("dx",),
    ),
    # Groups of rows, whose sums of dw and db are added up.
    patched(
        "mW01.triton",
        what="the sum over groups of rows leaves out the last group where it is not full",
        source="BobMcDear/attorch#18",
        backward=(
            _GROUPS_OF_4,
            Lines(
                old="sum_groups(parts, sums)",
                new="sum_groups({name: rows[: M // t.rows] for name, rows in parts.items()}, sums)",
            ),
        ),
        outputs=("dw", "db"),
        when=_GROUPS,
    ),
    patched(
        "X07.triton",
        what="room for one group more than is written, which the sum takes too",
        source="flagos-ai/FlagGems#1082",
        backward=(_GROUPS_OF_4, Lines(old=_PARTS, new="torch.empty((groups + 1, N)")),
        outputs=("dw", "db"),
        kinds=(*_UNWRITTEN, "not_repeatable"),
        when=_GROUPS,
    ),
    patched(
        "X08.triton",
        what="room for floor(M / rows of a group) groups, where ceil of it are written: the last goes behind the end",
        source="BobMcDear/attorch#18",
        backward=(_GROUPS_OF_4, Lines(old=_PARTS, new="torch.empty((M // t.rows, N)")),
        outputs=("", "dw", "db"),
        kinds=_OVER,
        when=_GROUPS,
    ),
    patched(
        "X20.triton",
        what="autotune runs the sum over groups many times, each adding to dw and db: reset_to_zero is missing",
        source="invented",
        backward=(
            _GROUPS_OF_4,
            Lines(
                old="@triton.jit(do_not_specialize=ROW_COUNTS)\ndef sum_groups_kernel",
                new="@triton.autotune([triton.Config({}, num_warps=w) for w in (1, 4)], key=['groups', 'N'])\n"
                "@triton.jit(do_not_specialize=ROW_COUNTS)\ndef sum_groups_kernel",
            ),
            Lines(
                old="tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)",
                new="before = tl.load(out_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)\n"
                "    tl.store(out_ptr + cols, before + tl.sum(total, axis=0), mask=cols < N)",
            ),
            Lines(old="EARLY=early, num_warps=t.warps,", new="EARLY=early,"),
            Lines(old="torch.empty_like if M else torch.zeros_like", new="torch.zeros_like"),
        ),
        outputs=("dw", "db"),
        kinds=(*VALUES, "not_repeatable"),
        when="the first call with a shape of more than 4 rows",
        device="cuda",
    ),
    Mutant(
        id="X01.triton",
        what="a lock is released while other threads still store what it guards: the barrier before it is missing",
        source="triton-lang/triton#6307",
        make=partial(_locked, "X01.triton", barrier=False),
        ops=_LAYERNORM,
        dtypes=("fp32",),
        outputs=("dw", "db"),
        kinds=(*VALUES, "not_repeatable"),
        when="many rows wait for a lock",
        promised="deep",
        device="cuda",
        language="triton",
    ),
    # Strides and sizes.
    patched(
        "X10.triton",
        what="dx is stored with the row stride of dy: behind its end where dy has gaps",
        source="unslothai/unsloth#10617",
        backward=(Lines(old=_STORE_DX, new=_STORE_DX.replace("* N", "* dy_stride")),),
        outputs=("", "dx"),
        kinds=(*_UNWRITTEN, "out_of_bounds_write"),
        when="dy is strided",
    ),
    patched(
        "X12.triton",
        what="dy is loaded with the row stride of x",
        source="NVIDIA/TensorRT-LLM#14810",
        backward=(Lines(old="(dy.stride(0), x.stride(0),", new="(x.stride(0), x.stride(0),"),),
        outputs=("dx", "dw", "db"),
        kinds=_BEHIND,
        when="one of x and dy is strided",
    ),
    patched(
        "X04.triton",
        what="a row's offset is computed in 32 bits",
        source="pytorch/pytorch#181555",
        forward=(Lines(old=_ROWS, new=_ROWS.replace(".to(tl.int64)", "")),),
        outputs=_ALL,
        kinds=(*_UNWRITTEN, "exception", "crash", "out_of_bounds_read", "out_of_bounds_write"),
        when="M * N or M * the row stride of x is 2^31 or more",
        promised="ci",
        device="cuda",
    ),
    patched(
        "X05.triton",
        what="rows are the second dimension of the grid, which ends at 65535",
        source="NVIDIA/apex#411",
        forward=(
            Lines(old=_ROWS, new=_ROWS.replace("program_id(0)", "program_id(1)")),
            Lines(old="(ceil_div(M, t.rows),)", new="(1, M)"),
            Lines(old="ROWS=t.rows", new="ROWS=1"),
        ),
        outputs=_ALL,
        kinds=(*_UNWRITTEN, "exception", "crash"),
        when="M > 65535",
        promised="ci",
        device="cuda",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
CONTROLS = tuple(_locked("locked.triton", op, barrier=True) for op in _LAYERNORM)
"""Correct kernels: that of X01 with its barrier. Its sums are fp32 for every dtype."""
