"""Faults of our own Triton kernels across rows: tiles and groups of rows, strides, sizes; and of the tutorial's locks.

On a CPU a fault runs interpreted, one program after the other. A store out of bounds overwrites whatever lies there, so
all of these stay within a few rows of the tensor. Races, 32-bit overflows and refused launches show on a GPU only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from normcheck.audit.mutants._patched import STORE_Y, Lines, patched
from normcheck.audit.mutants.mutant import READ_BEYOND, UNWRITTEN, VALUES, WRITTEN_BEYOND, Mutant, implementations
from normcheck.cases.case import Case
from normcheck.cases.tensor_names import ROOT_FIRST
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import implementation
from normcheck.impls.triton_calls import own_kernels

_ALL = ("", *ROOT_FIRST)
_LAYERNORM, _RMSNORM = ("layernorm",), ("rmsnorm",)
"""Interpreted kernels are slow, and the ops share lines: a faulty line is planted in one or two ops that run it."""

_GROUPS = "M > 4, and no multiple of the 4 rows of a group"
_ROWS = "rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)"
_GROUP_ROWS = "rows = start + tl.arange(0, ROWS)\n        mask"
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
    # Rows.
    patched(
        "mR01.triton",
        what="a tile of rows that is not full does not store y",
        source="invented",
        forward=(Lines(old=STORE_Y, new=STORE_Y.replace("mask=mask)", _FULL_TILES)),),
        outputs=("y",),
        kinds=UNWRITTEN,
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "mD13.triton",
        what="a tile of rows that is not full does not store dx",
        source="invented",
        backward=(Lines(old=_STORE_DX, new=_STORE_DX.replace("mask=mask)", _FULL_TILES)),),
        outputs=("dx",),
        kinds=UNWRITTEN,
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
        kinds=WRITTEN_BEYOND,
        when="M is no multiple of a tile's rows",
    ),
    patched(
        "load-rows.triton",
        what="dy is loaded without the mask of the rows: db takes what lies behind the last one",
        source="invented",
        backward=(
            Lines(
                old="  dy = load_tile(dy_ptr, rows, cols, dy_stride, mask)",
                new="  dy = load_tile(dy_ptr, rows, cols, dy_stride, (cols < N)[None, :])",
            ),
        ),
        outputs=("dw", "db"),
        kinds=READ_BEYOND,
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
        kinds=(*UNWRITTEN, "not_repeatable"),
        when=_GROUPS,
    ),
    patched(
        "X08.triton",
        what="room for floor(M / rows of a group) groups, where ceil of it are written: the last goes behind the end",
        source="BobMcDear/attorch#18",
        backward=(_GROUPS_OF_4, Lines(old=_PARTS, new="torch.empty((M // t.rows, N)")),
        outputs=("", "dw", "db"),
        kinds=WRITTEN_BEYOND,
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
        kinds=(*UNWRITTEN, "out_of_bounds_write"),
        when="dy is strided",
    ),
    patched(
        "X12.triton",
        what="dy is loaded with the row stride of x",
        source="NVIDIA/TensorRT-LLM#14810",
        backward=(Lines(old="(dy.stride(0), x.stride(0),", new="(x.stride(0), x.stride(0),"),),
        outputs=("dx", "dw", "db"),
        kinds=READ_BEYOND,
        when="one of x and dy is strided",
    ),
    patched(
        "X04.triton",
        what="a row's offset is computed in 32 bits",
        source="pytorch/pytorch#181555",
        forward=(Lines(old=_ROWS, new=_ROWS.replace(".to(tl.int64)", "")),),
        outputs=_ALL,
        kinds=(*UNWRITTEN, "exception", "crash", "out_of_bounds_read", "out_of_bounds_write"),
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
        kinds=(*UNWRITTEN, "exception", "crash"),
        when="M > 65535",
        promised="ci",
        device="cuda",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
CONTROLS = tuple(_locked("locked.triton", op, barrier=True) for op in _LAYERNORM)
"""Correct kernels: that of X01 with its barrier. Its sums are fp32 for every dtype."""
