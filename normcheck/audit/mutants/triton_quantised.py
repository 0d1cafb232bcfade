"""Faults of our own Triton kernels that return codes: of the scale, of the codes, and of what they are read from.

Not among them, since no case shows it: e4m3fn that is not saturated before its conversion, which saturates by itself.
"""

from __future__ import annotations

from normcheck.audit.mutants._patched import Lines, patched
from normcheck.audit.mutants.mutant import READ_BEYOND, implementations

_PLAIN, _ADDING = ("rmsnorm_quant",), ("fused_add_rmsnorm_quant",)
_CODES, _SCALES = ("q",), ("scale", "q")

_ROUND = "t = tl.clamp(t, -LARGEST, LARGEST) + 12582912.0"
_ROUNDED = "t.to(tl.int32, bitcast=True).to(tl.int8)"
_MOST_FIRST, _MOST = "tl.max(tl.abs(first), axis=1)", "tl.max(tl.abs(y), axis=1)"
_SIZES = "tl.maximum(sizes, tl.abs(x))"
_WHOLE, _FIRST_WHOLE = "(cols < N // 8 * 8)[None, :]", "(first_cols < N // 8 * 8)[None, :]"
_PLACE = "rows[:, None] * count + numbers[None, :], scale"
_STRIDE = "sums, x.stride(0),"

MUTANTS = (
    patched(
        "codes-wrap.triton",
        what="codes past the largest wrap around: saturation is missing",
        source="invented",
        quantised=(Lines(old=_ROUND, new="t += 12582912.0"),),
        coded="triton_token_int8",
        ops=_PLAIN,
        outputs=_CODES,
        when="scale=limited",
    ),
    patched(
        "codes-truncated.triton",
        what="codes are cut off, not rounded",
        source="invented",
        quantised=(
            Lines(old=_ROUND, new="t = tl.clamp(t, -LARGEST, LARGEST)"),
            Lines(old=_ROUNDED, new="t.to(tl.int8)"),
        ),
        coded="triton_token_int8",
        ops=_ADDING,
        dtypes=("bf16",),
        outputs=_CODES,
    ),
    patched(
        "scale-tail.triton",
        what="the last columns, which fill no vector of 8, do not count for the scale of a row",
        source="invented",
        quantised=(
            Lines(old=_MOST_FIRST, new=f"tl.max(tl.where({_FIRST_WHOLE}, tl.abs(first), 0.0), 1)"),
            Lines(old=_MOST, new=f"tl.max(tl.where({_WHOLE}, tl.abs(y), 0.0), 1)"),
            Lines(old=_SIZES, new=f"tl.maximum(sizes, tl.where({_WHOLE}, tl.abs(x), 0.0))"),
        ),
        coded="triton_token_int8",
        ops=_PLAIN,
        outputs=_SCALES,
        when="N % 8 != 0",
    ),
    patched(
        "scale-block.triton",
        what="the scale of each block is stored as that of the next one",
        source="invented",
        quantised=(Lines(old=_PLACE, new=_PLACE.replace("numbers[None, :]", "((numbers + 1) % count)[None, :]")),),
        coded="triton_block128",
        ops=_ADDING,
        outputs=_SCALES,
        when="N > 128",
    ),
    patched(
        "codes-stride.triton",
        what="x is loaded as if its rows were packed",
        source="invented",
        quantised=(Lines(old=_STRIDE, new="sums, N,"),),
        ops=_PLAIN,
        dtypes=("bf16",),
        outputs=_CODES,
        kinds=READ_BEYOND,
        when="a strided x",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
