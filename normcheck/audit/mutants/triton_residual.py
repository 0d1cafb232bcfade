"""Faults of our own Triton kernels that add a residual: those of its sum, its gate, and the sum's cotangent.

Not among them, since no case shows them: a residual that is read with the row stride of x, as which it lies; a missing
barrier between the store of the sum and its loads, which the interpreter does not need.
"""

from __future__ import annotations

from normcheck.audit.mutants._patched import Lines, patched
from normcheck.audit.mutants.mutant import READ_BEYOND, UNWRITTEN, WRITTEN_BEYOND, implementations

_RMSNORM, _LAYERNORM = ("fused_add_rmsnorm",), ("fused_add_layernorm",)
_STORED = ("residual_out", "mean", "rstd", "y")
_BOTH = ("dx", "dresidual")
_MODULATED = ("fused_add_rmsnorm_modulate",)

_LOAD = "load_tile(residual_ptr, rows, cols, residual_stride, mask)"
_STORE = "tl.store(sum_ptr + rows[:, None] * N + cols[None, :], stored, mask=mask)"
_NORMED = "x = stored.to(tl.float32)"
_AGAIN = "x_ptr, x_stride = sum_ptr, N"
_ADD = "dx += load_tile(added_ptr, rows, cols, added_stride, mask)"
_STORE_OWN = "tl.store(dresidual_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)"
_GATED = "x *= load_tile(gate_ptr, rows // S, cols, gate_stride, mask)"
_TERMS = "tl.store(dgate_ptr + at, of_gate, mask=mask)"
_SOURCE = "load_tile(source_ptr, rows, cols, source_stride, mask)"

MUTANTS = (
    patched(
        "residual-stride.triton",
        what="the residual is loaded as if its rows were packed",
        source="invented",
        forward=(Lines(old=_LOAD, new=_LOAD.replace("residual_stride", "N")),),
        ops=_RMSNORM,
        outputs=_STORED,
        kinds=READ_BEYOND,
        when="a strided residual",
    ),
    patched(
        "sum-stride.triton",
        what="residual_out is stored with the row stride of x: behind its end if x has gaps",
        source="invented",
        forward=(Lines(old=_STORE, new=_STORE.replace("* N", "* x_stride")),),
        ops=_RMSNORM,
        outputs=("", *_STORED),
        kinds=(*UNWRITTEN, "out_of_bounds_write"),
        when="a strided x",
    ),
    patched(
        "sum-columns.triton",
        what="residual_out is stored without the mask of its columns: into the next row, and behind its end",
        source="invented",
        forward=(
            Lines(old=_STORE, new=_STORE.replace("mask=mask", "mask=tl.max(mask.to(tl.int32), axis=1)[:, None] > 0")),
        ),
        ops=_RMSNORM,
        outputs=("", *_STORED),
        kinds=WRITTEN_BEYOND,
        when="N is no power of two",
    ),
    patched(
        "sum-exact.triton",
        what="the sum in fp32 is normed, though the stored one is declared",
        source="invented",
        forward=(Lines(old=_NORMED, new=f"x += {_LOAD}"),),
        ops=_LAYERNORM,
        dtypes=("bf16",),
        outputs=("mean", "rstd", "y"),
    ),
    patched(
        "sum-blocks.triton",
        what="blocks of 64 columns, of which those behind the first are normed without the residual",
        source="invented",
        forward=(
            Lines(old="MAX_BLOCK = 16384", new="MAX_BLOCK = 64", harmless=True),
            Lines(old=_AGAIN, new="x_ptr, x_stride = x_ptr, x_stride"),
        ),
        ops=_RMSNORM,
        outputs=("rstd", "y"),
        when="N > 64",
    ),
    patched(
        "dresidual_out.triton",
        what="dresidual_out is forgotten",
        source="invented",
        backward=(Lines(old=_ADD, new="dx += 0.0"),),
        ops=_LAYERNORM,
        outputs=_BOTH,
    ),
    patched(
        "dresidual_out-stride.triton",
        what="dresidual_out is loaded with the row stride of dy",
        source="invented",
        backward=(Lines(old=_ADD, new=_ADD.replace("added_stride", "dy_stride")),),
        ops=_RMSNORM,
        outputs=_BOTH,
        kinds=READ_BEYOND,
        when="one row of dy for all",
    ),
    patched(
        "dresidual-dtype.triton",
        what="dresidual is rounded to the dtype of x, though the residual has fp32",
        source="invented",
        backward=(Lines(old=_STORE_OWN, new=_STORE_OWN.replace(", dx,", ", dx.to(dx_ptr.dtype.element_ty),")),),
        ops=_LAYERNORM,
        outputs=("dresidual",),
        when="residual_dtype=fp32",
    ),
    patched(
        "residual_gate-tile.triton",
        what="a tile of rows has the gate of its first one",
        source="invented",
        forward=(Lines(old=_GATED, new=_GATED.replace("rows //", "(rows * 0 + tl.min(rows, axis=0)) //")),),
        ops=("fused_add_layernorm_modulate",),
        outputs=_STORED,
        when="several samples in a tile",
    ),
    patched(
        "modulated-sum-blocks.triton",
        what="blocks of 64 columns, of which those behind the first are normed without residual and gate",
        source="invented",
        modulated=(
            Lines(old="MAX_BLOCK = 8192", new="MAX_BLOCK = 64", harmless=True),
            Lines(old=_AGAIN, new="x_ptr, x_stride = x_ptr, x_stride"),
        ),
        ops=_MODULATED,
        outputs=("rstd", "y"),
        when="N > 64",
    ),
    patched(
        "residual_gate-x-stride.triton",
        what="x is loaded for dresidual_gate with the row stride of the sum",
        source="invented",
        modulated=(Lines(old=_SOURCE, new=_SOURCE.replace("source_stride", "x_stride")),),
        ops=_MODULATED,
        outputs=("dresidual_gate",),
        kinds=READ_BEYOND,
        when="a strided x",
    ),
    patched(
        "residual_gate-few-rows.triton",
        what="dresidual_gate of samples of few rows is summed of ds alone, without x",
        source="invented",
        modulated=(Lines(old=_TERMS, new=_TERMS.replace("of_gate", "dx")),),
        ops=_MODULATED,
        dtypes=("bf16",),
        outputs=("dresidual_gate",),
        when="samples of fewer than 16 rows",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
