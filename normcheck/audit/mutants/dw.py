"""Faults in dw and db: rows lost or counted twice, partial sums, wrong terms, too little precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import (
    CLEAN,
    HALF,
    LAYERNORMS,
    RELU,
    TILE,
    ZERO_CENTERED,
    Kernel,
    KernelCall,
    only,
    rounded,
)
from normcheck.audit.mutants.mutant import UNWRITTEN, Mutant, implementations, mutant

_GRID = 132  # multiprocessors of an H100


def _tiles_in_io(c: KernelCall, t: Tensor) -> Tensor:
    """(M, N) -> (N,): summed in fp32 inside a tile of rows, and in the io dtype over the tiles."""
    total = torch.zeros_like(c.w)
    for tile in torch.split(t, TILE):
        total = rounded(total + tile.sum(0), c.io)
    return total


def _rows(choose: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel that sums dw and db over the rows that ``choose`` picks from the row numbers 0 to M - 1."""
    return Kernel(reduce_m=lambda t: t[choose(torch.arange(len(t), device=t.device))].sum(0))


def _padded(rows: Tensor) -> Tensor:
    """The row numbers of whole tiles; those of the last tile may lie beyond M."""
    return torch.arange(-(-len(rows) // TILE) * TILE, device=rows.device)


def _tail_columns_unwritten(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    t = t.to(dtype)
    return only(t, slice(c.N // 32 * 32)) if name in ("dw", "db") else t


def _via_bf16(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return (rounded(t, torch.bfloat16) if name in ("dw", "db") else t).to(dtype)


def _unmasked(c: KernelCall) -> Tensor:
    assert c.dy_io is not None
    return c.dy_io.reshape(-1, c.N).float()


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="mW01",
        what="the last M mod 8 rows are missed in dw and db",
        source="BobMcDear/attorch#18",
        kernel=_rows(lambda rows: rows[: len(rows) // TILE * TILE]),
        outputs=("dw", "db"),
        when="M is not a multiple of 8",
    ),
    mutant(
        id="mW03",
        what="one of four partial sums of dw and db is lost",
        source="triton-lang/triton#6307",
        kernel=_rows(lambda rows: rows[rows % 4 != 1]),
        outputs=("dw", "db"),
        when="M > 1",
    ),
    mutant(
        id="mW04",
        what="dw and db are added up in the io dtype from tile to tile",
        source="linkedin/Liger-Kernel#950",
        kernel=Kernel(dw=lambda c: _tiles_in_io(c, c.dy * c.xh), db=lambda c: _tiles_in_io(c, c.dy)),
        dtypes=HALF,
        outputs=("dw", "db"),
        when="M > 8, or fp32 weights",
    ),
    mutant(
        id="mW05",
        what="dw is formed without xhat",
        source="invented",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy)),
        outputs=("dw",),
    ),
    mutant(
        id="mW06",
        what="dw is formed without subtracting the mean",
        source="invented",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy * c.x * c.r)),
        ops=LAYERNORMS,
        outputs=("dw",),
        when="mean != 0",
    ),
    mutant(
        id="mW07",
        what="dw is formed without rstd",
        source="invented",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy * c.xc)),
        outputs=("dw",),
    ),
    mutant(
        id="mW09",
        what="dw has an extra factor (1 + w) / w",
        source="invented",
        kernel=Kernel(dw=lambda c: CLEAN.dw(c) * (1 + c.w) / c.w),
        ops=ZERO_CENTERED,
        outputs=("dw",),
    ),
    mutant(
        id="mW10",
        what="dw and db are divided by M",
        source="invented",
        kernel=Kernel(reduce_m=lambda t: t.sum(0) / len(t)),
        outputs=("dw", "db"),
        when="M is not 1",
    ),
    mutant(
        id="mW11",
        what="dw and db are added to a buffer that holds ones",
        source="karpathy/llm.c#408",
        kernel=Kernel(reduce_m=lambda t: t.sum(0) + 1),
        outputs=("dw", "db"),
    ),
    mutant(
        id="mW12",
        what="the last N mod 32 columns of dw and db are not written",
        source="paiml/trueno#178",
        kernel=Kernel(store=_tail_columns_unwritten),
        outputs=("dw", "db"),
        kinds=UNWRITTEN,
        when="N is not a multiple of 32",
    ),
    mutant(
        id="mW13",
        what="in dw and db a last tile that is not full wraps to the first rows",
        source="invented",
        kernel=_rows(lambda rows: _padded(rows) % max(len(rows), 1)),
        outputs=("dw", "db"),
        when="M is not a multiple of 8",
    ),
    mutant(
        id="mW14",
        what="in dw and db a last tile that is not full repeats the last row",
        source="invented",
        kernel=_rows(lambda rows: _padded(rows).clamp(max=len(rows) - 1)),
        outputs=("dw", "db"),
        when="M is not a multiple of 8",
    ),
    mutant(
        id="mW15",
        what="dw and db are rounded to bf16 on the way to their dtype",
        source="linkedin/Liger-Kernel#1253",
        kernel=Kernel(store=_via_bf16),
        outputs=("dw", "db"),
        when="the weights are not bf16",
    ),
    mutant(
        id="mW16",
        what="row 0 is skipped in dw and db",
        source="invented",
        kernel=Kernel(reduce_m=lambda t: t[1:].sum(0)),
        outputs=("dw", "db"),
    ),
    mutant(
        id="mW17",
        what="dw and db use dy before it is masked",
        source="invented",
        kernel=Kernel(
            dw=lambda c: c.sum_m(_unmasked(c) * c.xh),
            db=lambda c: c.sum_m(_unmasked(c)),
        ),
        ops=RELU,
        outputs=("dw", "db"),
    ),
    mutant(
        id="mW18",
        what="dw and db have a grid of 132 programs of 8 rows and no loop over the rest",
        source="invented",
        kernel=Kernel(reduce_m=lambda t: t[: _GRID * TILE].sum(0)),
        outputs=("dw", "db"),
        when="M > 1056",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
