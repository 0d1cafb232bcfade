"""How a matrix is cut into tiles: rows and columns per program, warps, and the groups whose partial sums are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

BYTE = 8
"""Bits in a byte of the bitmask: no tile is narrower."""


_ON_THE_WAY = 192 << 10
"""Bytes of shared memory for what is loaded ahead, of the 227 KiB of a multiprocessor of Hopper."""

ROW_COUNTS = ("M", "group_rows", "groups")
"""Arguments for which Triton must not compile a kernel anew: how many rows there are changes nothing in its code."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """``rows`` x ``block`` elements, both powers of two, computed by ``warps`` warps.

    In a loop over rows: ``stages`` of them are loaded at a time; at most ``groups`` programs share the rows.
    """

    rows: int
    block: int
    warps: int
    stages: int = 1
    groups: int = 256


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is n or more; n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. (triton.cdiv, made for kernels too, takes the host 2 us more, several times a call.)"""
    return -(-a // b)


_NONE_CHOSEN: Mapping[int, Tile] = MappingProxyType({})


def tiles(*best: Tile) -> Mapping[int, Tile]:
    """Block -> its tile."""
    return MappingProxyType({t.block: t for t in best})


def tile(
    M: int,
    N: int,
    *,
    on_gpu: bool,
    elements: int,
    max_block: int,
    per_warp: int = 512,
    chosen: Mapping[int, Tile] = _NONE_CHOSEN,
    wide: Tile | None = None,
) -> Tile:
    """Choose the tile for rows of N elements, of which one program takes at most ``max_block`` columns at once.

    On a GPU a program has about ``elements``, ``per_warp`` to a warp, so that narrow rows share it, and 64 rows at
    most. The interpreter takes milliseconds for a program of any size: it gets 65536 elements, and 256 rows at most.
    ``chosen``: block -> the tile to take on a GPU, in place of that rule, if a block is a whole row; ``wide``: the tile
    of rows wider than those.
    """
    if on_gpu and wide is not None and max(chosen) < N:
        return replace(wide, rows=min(wide.rows, power_of_two(M)))
    block = min(max(power_of_two(N), BYTE), max_block)
    rows = min(power_of_two(M), max((elements if on_gpu else 65536) // block, 1), 64 if on_gpu else 256)
    if on_gpu and block >= N and block in chosen:
        best = chosen[block]
        return replace(best, rows=min(best.rows, power_of_two(M)))
    return Tile(rows=rows, block=block, warps=min(max(rows * block // per_warp, 1), 16))


def loading(t: Tile, loaded: int, itemsize: int) -> Tile:
    """``t``, with fewer stages if what they load ahead, ``loaded`` tiles of ``itemsize`` bytes each, has no room."""
    ahead = _ON_THE_WAY // (loaded * t.rows * t.block * itemsize)
    return replace(t, stages=max(1, min(t.stages, 1 + ahead)))


def turns(M: int, rows: int, groups: int) -> int:
    """Choose how many programs, at most ``groups``, take ``rows`` rows at a time in turn, each as often as the others.

    Each takes 8 rows or more, which keeps its partial sums small beside x. The number depends on the shape only: the
    same bits on every GPU.
    """
    count = ceil_div(M, rows)
    return ceil_div(count, max(ceil_div(8, rows), ceil_div(count, groups)))


def group_rows(M: int, rows: int, groups: int = 256) -> int:
    """Choose how many rows, a multiple of ``rows``, share one partial sum of dw and db.

    256 ``groups`` or fewer fill a GPU of 132 multiprocessors, one or two on each; 8 rows or more keep the partial sums
    small beside x. The number depends on the shape only: the same bits on every GPU.
    """
    least = max(8, ceil_div(M, groups))
    return ceil_div(least, rows) * rows
