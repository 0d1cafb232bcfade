"""Where the wrong elements of an output lie: a small picture and one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from normcheck.cases.guard_bands import BLOCK_ELEMENTS
from normcheck.result import Where, three_digits

GRID_ROWS, GRID_COLUMNS = 8, 48
_CHANCE = 1e-6
"""Untouched rows are no pattern if wrong elements at random places leave them untouched with a greater chance."""

_FEWEST_REPEATS = 3
"""A period must repeat at least so often."""

_BLOCKS = tuple(2**k for k in range(3, 15))


def locate(wrong: Tensor, ratios: Tensor | None = None, *, heads: int = 1) -> Where:
    """Describe where ``wrong``, bool (rows, columns), is True: at least one element, out of its bound.

    ``ratios``: error / bound of each element, of the same shape. ``heads``: how many rows are the heads of one token.
    """
    rows, columns = wrong.shape
    pooled = () if ratios is None else _pooled(ratios)
    return Where(rows=rows, columns=columns, grid=_grid(wrong), summary=_summary(wrong, heads), ratios=pooled)


def names_a_pattern(summary: str) -> bool:
    """Whether the summary of a ``Where`` says more than how many rows and columns have wrong elements."""
    return summary == "every element" or bool(
        re.search(r"\b(only (rows?|columns?|heads?|tokens?)|all of|each|every \d+(st|nd|rd|th))\b", summary)
    )


def how_many(wrong: Tensor) -> int:
    """How many elements of ``wrong``, bool with one element at least, are True."""
    return sum(int(block.sum()) for block in _blocks(wrong))


def _blocks(wrong: Tensor, first: int = 0, end: int | None = None) -> Iterator[Tensor]:
    """Rows ``first`` to ``end`` of ``wrong`` in parts of at most BLOCK_ELEMENTS elements, or of one row.

    A sum takes eight bytes for each element.
    """
    height = max(1, BLOCK_ELEMENTS * len(wrong) // wrong.numel())
    end = len(wrong) if end is None else end
    for start in range(first, end, height):
        yield wrong[start : min(start + height, end)]


def _grid(wrong: Tensor) -> tuple[tuple[float, ...], ...]:
    """Share of wrong elements in each cell of at most GRID_ROWS x GRID_COLUMNS cells."""
    rows, columns = wrong.shape
    down, across = min(rows, GRID_ROWS), min(columns, GRID_COLUMNS)
    row_cell = torch.arange(rows, device=wrong.device) * down // rows
    column_cell = torch.arange(columns, device=wrong.device) * across // columns
    shares = torch.zeros(down, columns, dtype=torch.float64, device=wrong.device)
    heights = row_cell.bincount(minlength=down)
    ends = heights.cumsum(0).tolist()
    for share, first, end in zip(shares, [0, *ends], ends, strict=False):
        for block in _blocks(wrong, first, end):
            share += block.sum(0)
    cells = torch.zeros(down, across, dtype=torch.float64, device=wrong.device)
    cells.index_add_(1, column_cell, shares)
    sizes = heights[:, None] * column_cell.bincount(minlength=across)[None, :]
    return tuple(tuple(row) for row in (cells / sizes).tolist())


def _pooled(ratios: Tensor) -> tuple[tuple[float, ...], ...]:
    """The largest of each cell of the grid, to three digits."""
    rows, columns = ratios.shape
    by_row = torch.stack([ratios[part].amax(0) for part in _parts(rows, GRID_ROWS)])
    cells = torch.stack([by_row[:, part].amax(1) for part in _parts(columns, GRID_COLUMNS)], 1)
    return tuple(tuple(map(three_digits, row)) for row in cells.tolist())


def _parts(size: int, most: int) -> list[slice]:
    """At most ``most`` parts of ``size`` elements, of which element i lies in part ``i * parts // size``."""
    parts = min(size, most)
    edges = [-(-part * size // parts) for part in range(parts + 1)]
    return [slice(first, end) for first, end in pairwise(edges)]


def _summary(wrong: Tensor, heads: int) -> str:
    """Name the rows and columns with wrong elements and, if not all elements in both are wrong, how many."""
    rows, columns = wrong.shape
    if wrong.numel() == 1:
        return "the only element"
    down, across = (wrong.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    by_row, by_column = _words_for(down, rows, "row"), _words_for(across, columns, "column")
    of_heads = _of_heads(down, rows, heads)
    common, count = len(down) * len(across), how_many(wrong)
    if rows == 1 or columns == 1:
        return by_column if rows == 1 else by_row
    if count == common:
        if of_heads:
            return f"{of_heads}, {by_column}"
        if len(down) == rows:
            return "every element" if len(across) == columns else f"{by_column}, in every row"
        if len(across) == columns:
            last = " (the last)" if down == [rows - 1] else ""
            return f"all of row {down[0]} of {rows}{last}" if len(down) == 1 else f"{by_row}, every column"
        return f"{by_row}, {by_column}"
    if _CHANCE < (len(down) / rows) ** count < 1:
        by_row = _extent(down, rows, "row")
    elif of_heads:
        by_row = of_heads
    if _CHANCE < (len(across) / columns) ** count < 1:
        by_column = _extent(across, columns, "column")
    return f"{by_row}, {by_column}: {count:,} of the {common:,} elements in them"


def _of_heads(at: Sequence[int], rows: int, heads: int) -> str:
    """Describe the rows ``at`` as heads of tokens; "" if they are all rows, or no product of some heads and tokens."""
    tokens, own = sorted({row // heads for row in at}), sorted({row % heads for row in at})
    if heads == 1 or len(at) in (1, rows) or len(at) != len(tokens) * len(own):
        return ""
    by_token, by_head = _words_for(tokens, rows // heads, "token"), _words_for(own, heads, "head")
    return by_token if len(own) == heads else f"{by_head}, {by_token}"


def _words_for(at: Sequence[int], total: int, name: str) -> str:
    """Describe the indices ``at`` (ascending, at least one) out of ``total``. ``name``: "row", "column" and the like.

    A simple pattern if one fits all of them and no other, else their extent.
    """
    first, last = at[0], at[-1]
    if len(at) == total:
        return f"every {name}"
    if len(at) == 1:
        return f"only {name} {first} of {total}" + (" (the last)" if first == total - 1 else "")
    if len(at) == last - first + 1:
        return _run(first, last, total, name)
    return _periodic(at, total, name) or _extent(at, total, name)


def _extent(at: Sequence[int], total: int, name: str) -> str:
    """Describe indices by number and range: for when no pattern fits, or one may fit by chance."""
    return f"{len(at)} of {total} {name}s, from {at[0]} to {at[-1]}"


def _run(first: int, last: int, total: int, name: str) -> str:
    """Describe consecutive indices: a head, a tail, or a part in between."""
    if last == total - 1:
        return f"only {name}s >= {first} of {total}{_remainder(first, total, name)}"
    if first == 0:
        return f"only {name}s < {last + 1} of {total}"
    return f"only {name}s {first} to {last} of {total}"


def _remainder(first: int, total: int, name: str) -> str:
    """`` = M - M % 16`` if the tail is the remainder of a blocked loop, with the smallest block that fits, or ""."""
    size = {"row": "M", "column": "N", "token": "T", "head": "H"}[name]
    block = next((b for b in _BLOCKS if total % b == total - first and total > b), None)
    return f" = {size} - {size} % {block}" if block else ""


def _periodic(at: Sequence[int], total: int, name: str) -> str:
    """Describe the same consecutive indices in every block of one size; "" if that does not fit exactly."""
    gap = next((i for i in range(1, len(at)) if at[i] != at[i - 1] + 1), len(at))
    if gap == len(at):
        return ""
    length, period, start = gap, at[gap] - at[0], at[0]
    expected = [i for base in range(start, total, period) for i in range(base, min(base + length, total))]
    if start + length > period or len(range(start, total, period)) < _FEWEST_REPEATS or list(at) != expected:
        return ""
    if length == 1:
        if start == period - 1 and period > 2:
            return f"the last {name} of each {period}"
        return f"every {_ordinal(period)} {name}" + (f", from {start} on" if start else "")
    if start == 0:
        return f"the first {length} {name}s of each {period}"
    if start + length == period:
        return f"the last {length} {name}s of each {period}"
    return f"{name}s {start} to {start + length - 1} of each {period}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
